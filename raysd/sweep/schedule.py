"""Which node does what: blocks are handed out whole, come back if their node is lost, and more of them may be added until the end is declared.

All arms of a block run on one node, since no two nodes are equal. What a killed attempt had measured counts on: what is compared with each other must be of
one node, and is else measured again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raysd.sweep.cells import Cell


@dataclass(frozen=True)
class Block:
    """One round of all arms."""

    number: int
    """From 0."""
    cells: tuple[Cell, ...]
    """In run order."""


@dataclass(frozen=True)
class Answering:
    """The report split answered by every engine, for acceptance and losslessness; by one node, before it takes a block."""


Work = Block | Answering


def left_to_measure(cells: Sequence[Cell], kept_on: Mapping[Cell, str], node: str) -> list[Cell]:
    """The cells of a block that a node has still to measure, in their order. kept_on: the node of each cell that is measured and valid.

    Cells that are compared with each other and were all measured on one node, whichever, are done; of others those of another node are measured again.
    """
    return [cell for cell in cells if not _group_is_whole(cell, cells, kept_on) and kept_on.get(cell) != node]


def is_whole(cells: Sequence[Cell], kept_on: Mapping[Cell, str]) -> bool:
    """Whether no node has anything of a block left to measure."""
    return all(_group_is_whole(cell, cells, kept_on) for cell in cells)


def _group_is_whole(cell: Cell, cells: Sequence[Cell], kept_on: Mapping[Cell, str]) -> bool:
    """Whether a cell, and those of its block that are compared with it, are measured, all on one node."""
    nodes = {kept_on.get(each) for each in cells if each.compared == cell.compared}
    return len(nodes) == 1 and None not in nodes


class Schedule:
    """Hands out work to nodes, each of which asks from a thread of its own."""

    def __init__(self, work: Sequence[Work], kept_on: Mapping[Cell, str]) -> None:
        """work: in the order in which it is to be done. kept_on: as left_to_measure has it."""
        self._waiting: list[Work] = list(work)
        self._kept_on = dict(kept_on)
        self._taken = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, node: str) -> tuple[Work, list[Cell]] | None:
        """The next work for a node, and which cells of it are left to measure; waits while others may still give some back. None: there is none, and will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            work = min(self._waiting, key=lambda each: (self._preference(each, node), self._waiting.index(each)))
            self._waiting.remove(work)
            self._taken += 1
            return work, left_to_measure(work.cells, self._kept_on, node) if isinstance(work, Block) else []

    def measured(self, cell: Cell, node: str) -> None:
        """A cell is measured and valid."""
        with self._changed:
            self._kept_on[cell] = node

    def done(self) -> bool:
        """A node has finished what it took. Returns whether nothing is waiting or taken any more."""
        with self._changed:
            self._taken -= 1
            return not self._waiting and self._taken == 0

    def give_back(self, work: Work) -> None:
        """A node that was lost had taken this; whoever asks next does what is left of it."""
        with self._changed:
            self._waiting.insert(0, work)
            self._taken -= 1
            self._changed.notify_all()

    def add(self, blocks: Sequence[Block]) -> None:
        """More blocks."""
        with self._changed:
            self._waiting += blocks
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the end is declared. For who has something left to do, the stage has ended before its time."""
        return self._closed

    def close(self) -> None:
        """There is no more: everybody who waits is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _preference(self, work: Work, node: str) -> int:
        """What was begun on this node first, then what nobody has begun, then what another node began: it may yet come for it."""
        if isinstance(work, Answering):
            return 0
        began = {self._kept_on[cell] for cell in work.cells if cell in self._kept_on}
        return 0 if node in began else 2 if began else 1
