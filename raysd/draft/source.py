"""Where a worker's conversations come from, step after step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from raysd.draft.gradient import balanced
from raysd.draft.schedule import ConversationOrder
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation


class Source(Protocol):
    """Conversations to learn from. A step's are the same in every attempt."""

    def step(self, number: int) -> list[Conversation]:
        """This worker's share of a step, 0-based; asked for in ascending order, from any number on."""


class CapturedSource:
    """Reads a capture artifact: the conversations of one step at a time, and of the next while this one is computed."""

    def __init__(self, captured: Captured, section: TrainSection, rank: int, workers: int) -> None:
        self._captured, self._rank, self._workers, self._per_step = captured, rank, workers, section.conversations_per_step
        self._order = ConversationOrder(len(captured), section.seed)
        self._steps = section.steps
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[list[Conversation]]] | None = None

    def __enter__(self) -> CapturedSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def step(self, number: int) -> list[Conversation]:
        """This worker's conversations of a step. The longest are dealt out first, so that no worker waits long for another."""
        found = self._ahead[1].result() if self._ahead is not None and self._ahead[0] == number else self._read(number)
        following = number + 1
        self._ahead = (following, self._reader.submit(self._read, following)) if following < self._steps else None
        return found

    def _read(self, number: int) -> list[Conversation]:
        chosen = self._order.between(number * self._per_step, (number + 1) * self._per_step)
        share = balanced([self._captured.tokens(i) for i in chosen], self._workers)[self._rank]
        return [self._captured[chosen[i]] for i in sorted(share)]
