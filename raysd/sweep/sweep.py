"""The stage: blocks of cells measured on one node or several, kept as they come, and written as one data set."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError, NodeLostError
from raysd.sweep import tables
from raysd.sweep.bench import Answers, Node
from raysd.sweep.cells import NONE, Cell, Engine, engine_name, plan_block, plan_engines
from raysd.sweep.kept import keep, kept
from raysd.sweep.lossless import Answer, Comparison, Difference, counts
from raysd.sweep.measure import Measured
from raysd.sweep.schedule import Answering, Block, Schedule, Work, is_whole
from raysd.sweep.sequential import wanted_blocks

OpenNodes = Callable[[StageRun], AbstractContextManager[Sequence[Node]]]
"""`with open_nodes(run) as nodes:` no engine of theirs is left on exit."""

Tell = Callable[[Callable[[], None]], None]
"""Has something done by the stage's own thread, which alone touches the store."""


@dataclass
class Results:
    """What is known of a sweep so far."""

    cells: dict[Cell, Measured] = field(default_factory=dict)
    answers: dict[Engine, Answers] = field(default_factory=dict)
    comparisons: dict[Engine, list[Comparison]] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    """Facts of each node."""


def sweep(run: StageRun, open_nodes: OpenNodes) -> dict[str, Any]:
    """Measures every cell of the experiment's sweep; writes cells/, requests/, telemetry, answers, lossless and acceptance as Parquet, provenance.json and logs/.

    run.inputs: `train` and `quantize` hold the drafts, as their arms need them. What is finished is kept as a piece, and a later attempt does
    not repeat it. A cell whose engine does not start, or dies, is measured once more and is else invalid, with the reason, and the sweep goes on; so it does when
    one of several nodes is lost. Raises EngineError where nothing can be compared, since the baseline does not start, or no draft does; NodeLostError if
    all nodes are lost. Returns the metrics: acceptance and verdicts by arm for the first k, and counts.
    """
    desk = _Desk(run)
    if not desk.is_whole():
        try:
            with open_nodes(run) as nodes:
                desk.work_with(nodes)
        finally:
            desk.see_them_off()
    return desk.write()


class _Desk:
    """The stage's own side: what is known, what is kept of it, and who is at work. Its methods are called by the stage's thread alone."""

    def __init__(self, run: StageRun) -> None:
        self._run, self._section = run, run.experiment.sweep
        self._results = what_is_kept(run)
        self._blocks = max([wanted_blocks([], self._section.blocks, self._section.until_ci), *(cell.block + 1 for cell in self._results.cells)])
        self._begun_s = time.monotonic()
        self._at_work: dict[str, threading.Thread] = {}
        self._together, self._nodes = True, 1

    def is_whole(self) -> bool:
        """Whether there is nothing left to do."""
        engines, results, kept_on = plan_engines(self._section), self._results, self._kept_on()
        return (all(is_whole(self._block(number).cells, kept_on) for number in range(self._blocks)) and self._wanted() <= self._blocks
                and all(engine in results.answers for engine in engines) and all(engine in results.comparisons for engine in engines if engine != NONE))

    def work_with(self, nodes: Sequence[Node]) -> None:
        """Has the nodes do what is left. Raises what ended the last of them, or what is no fault of a node at once."""
        self._together, self._nodes = all(node.together for node in nodes), len(nodes)
        answered = all(engine in self._results.comparisons for engine in plan_engines(self._section) if engine != NONE) and NONE in self._results.answers
        self._schedule = Schedule([*([] if answered else [Answering()]), *map(self._block, range(self._blocks))], self._kept_on())
        to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for node in nodes:
            at_node = _AtNode(node, self, self._schedule, to_do.put, dict(self._results.answers))
            self._at_work[node.name] = threading.Thread(target=at_node.work, name=f"sweep on {node.name}", daemon=True)
        for thread in self._at_work.values():
            thread.start()
        try:
            while self._at_work:
                to_do.get()()
        finally:
            self._schedule.close()
        for node in nodes:
            for name, log in node.logs().items():
                (self._run.out / "logs").mkdir(exist_ok=True)
                (self._run.out / "logs" / name).write_bytes(log)
        self._run.progress("all cells are measured", len(self._cells()), len(self._cells()), "cells")

    def see_them_off(self) -> None:
        """Waits for who was still at work when the stage ended before its time; without their engines they soon find out."""
        for thread in self._at_work.values():
            thread.join()

    def says(self, node: str, doing: str) -> None:
        """A node begins something."""
        cells = self._cells()
        self._run.progress(f"{doing}{self._on(node)}", sum(cell in self._results.cells for cell in cells), len(cells), "cells")

    def has_started(self, node: str, facts: dict[str, Any]) -> None:
        """Engines of a node have started."""
        self._results.nodes[node] = facts
        keep(self._run, "nodes", {}, self._results.nodes)

    def has_measured(self, node: str, cell: Cell, measured: Measured) -> None:
        """A node has a cell."""
        self._results.cells[cell] = measured
        if measured.valid:
            keep(self._run, "cells", cell.identity(), {"row": measured.row, "requests": measured.requests, "telemetry": measured.telemetry})
        else:  # not kept: the next attempt measures it again
            print(f"invalid: {cell.label()}{self._on(node)}: {'; '.join(measured.row['invalid_reasons'])}", flush=True)

    def has_answered(self, engine: Engine, given: Answers) -> None:
        """An engine has answered the report split."""
        self._results.answers[engine] = given
        keep(self._run, "answers", {"engine": engine_name(engine)}, {
            "answers": [[each.prompt_id, list(each.token_ids), each.finish_reason] for each in given.answers], "counted": asdict(given.counted)})

    def has_compared(self, engine: Engine, comparisons: list[Comparison]) -> None:
        """An engine's answers are compared with the baseline's."""
        self._results.comparisons[engine] = comparisons
        keep(self._run, "comparisons", {"engine": engine_name(engine)}, {"comparisons": [asdict(each) for each in comparisons]})

    def has_done(self) -> None:
        """A node has done what it took. When all have, more blocks are added, one a node, if they are wanted."""
        if not self._schedule.done():
            return
        more = min(self._wanted() - self._blocks, self._nodes)
        if more <= 0 or time.monotonic() - self._begun_s > self._section.until_ci_limit_s:
            self._schedule.close()
            return
        self._schedule.add([self._block(number) for number in range(self._blocks, self._blocks + more)])
        self._blocks += more

    def has_ended(self, node: str, error: BaseException | None) -> None:
        """A node does nothing any more."""
        self._at_work.pop(node).join()
        if error is None:
            return
        if not self._at_work or not isinstance(error, (EngineError, NodeLostError)):
            raise error
        print(f"given up: the node {node}: {error}", flush=True)

    def write(self) -> dict[str, Any]:
        """Writes the data set; returns the metrics."""
        measured = [self._results.cells[cell] for cell in self._cells()]
        write_results(self._run.out, measured, self._results)
        return metrics(self._section.k[0], measured, self._results)

    def _kept_on(self) -> dict[Cell, str]:
        return {cell: measured.row["node"] for cell, measured in self._results.cells.items()}

    def _wanted(self) -> int:
        """How many blocks there should be, by what is known so far."""
        rows = [measured.row for measured in self._results.cells.values()]
        return wanted_blocks(rows, self._section.blocks, self._section.until_ci, self._section.max_blocks)

    def _block(self, number: int) -> Block:
        return Block(number, tuple(plan_block(self._section, number, self._together)))

    def _cells(self) -> list[Cell]:
        return [cell for number in range(self._blocks) for cell in plan_block(self._section, number, together=True)]

    def _on(self, node: str) -> str:
        return f" on {node}" if self._nodes > 1 else ""


class _AtNode:
    """What a node does, in a thread of its own: one piece of work after the other, until there is none."""

    def __init__(self, node: Node, desk: _Desk, schedule: Schedule, tell: Tell, answers: dict[Engine, Answers]) -> None:
        self._node, self._desk, self._schedule, self._tell = node, desk, schedule, tell
        self._answers = answers
        self._hopeless: set[tuple[Engine, str, int]] = set()

    def work(self) -> None:
        work: Work | None = None
        error: BaseException | None = None
        try:
            while (taken := self._schedule.take(self._node.name)) is not None:
                work, left = taken
                if isinstance(work, Answering):
                    self._answer()
                for cell in left:
                    if self._schedule.closed:
                        return
                    self._measure(cell)
                work = None
                self._tell(self._desk.has_done)
        except BaseException as err:  # the stage's thread raises it
            error = err
            if work is not None:
                self._schedule.give_back(work)
        self._tell(partial(self._desk.has_ended, self._node.name, error))

    def _measure(self, cell: Cell) -> None:
        self._prepare(cell.engine)
        self._says(cell.label())
        measured, point = self._node.measure(cell), (cell.engine, cell.workload, cell.concurrency)
        if not measured.valid and point not in self._hopeless:
            self._prepare(cell.engine)
            self._says(f"once more, {cell.label()}")
            measured = self._node.measure(cell)
            if not measured.valid:
                self._hopeless.add(point)  # no second try in the next blocks
        if measured.valid:
            self._hopeless.discard(point)
            self._schedule.measured(cell, self._node.name)
        self._tell(partial(self._desk.has_measured, self._node.name, cell, measured))

    def _answer(self) -> None:
        engines = plan_engines(self._node.section)
        for engine in reversed(engines):  # the baseline, which is asked about the others' answers, comes last, and begins the first block
            if engine not in self._answers and self._prepare(engine):
                self._says(f"{engine_name(engine)} answers the report split")
                if (given := self._node.answer(engine)) is not None:
                    self._answers[engine] = given
                    self._tell(partial(self._desk.has_answered, engine, given))
        self._prepare(NONE)
        self._says("comparing the answers with the baseline's")
        for engine in engines[1:]:
            if engine in self._answers:
                self._tell(partial(self._desk.has_compared, engine, self._node.compare(self._answers[NONE], self._answers[engine])))

    def _prepare(self, engine: Engine) -> bool:
        starting = self._node.to_start(engine)
        if not starting:
            return True
        self._says(f"starting {len(starting)} engine{'s' * (len(starting) > 1)}: {', '.join(map(engine_name, starting))}")
        prepared = self._node.prepare(engine)
        self._tell(partial(self._desk.has_started, self._node.name, self._node.facts()))
        return prepared

    def _says(self, doing: str) -> None:
        self._tell(partial(self._desk.says, self._node.name, doing))


def what_is_kept(run: StageRun) -> Results:
    """What earlier attempts have kept."""
    section, results = run.experiment.sweep, Results(nodes=kept(run, "nodes", {}) or {})
    for engine in plan_engines(section):
        if (document := kept(run, "answers", {"engine": engine_name(engine)})) is not None:
            counted = document["counted"]
            results.answers[engine] = Answers([Answer(prompt_id, tuple(token_ids), reason) for prompt_id, token_ids, reason in document["answers"]],
                                              AcceptanceCounts(**counted | {"per_position": tuple(counted["per_position"])}))
        if (document := kept(run, "comparisons", {"engine": engine_name(engine)})) is not None:
            results.comparisons[engine] = [Comparison(**each | {"difference": each["difference"] and Difference(**each["difference"])})
                                           for each in document["comparisons"]]
    most = section.max_blocks if section.until_ci else section.blocks
    for cell in (cell for number in range(most) for cell in plan_block(section, number, together=True)):
        if (document := kept(run, "cells", cell.identity())) is not None:
            results.cells[cell] = Measured(**document)
    return results


def write_results(out: Path, measured: Sequence[Measured], results: Results) -> None:
    """Writes all tables and provenance.json."""
    tables.write_partitioned(out / "cells", tables.CELLS, [each.row for each in measured])
    tables.write_partitioned(out / "requests", tables.REQUESTS, [row for each in measured for row in each.requests])
    tables.write_table(out / "telemetry.parquet", tables.TELEMETRY, [row for each in measured for row in each.telemetry])
    tables.write_table(out / "answers.parquet", tables.ANSWERS, [
        {"arm": arm, "k": k, "prompt_id": answer.prompt_id, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason}
        for (arm, k), given in results.answers.items() for answer in given.answers])
    tables.write_table(out / "lossless.parquet", tables.LOSSLESS, [
        {"arm": arm, "k": k, "prompt_id": each.prompt_id, "verdict": each.verdict, "position": each.difference and each.difference.position,
         "token_none": each.difference and each.difference.token_none, "token_arm": each.difference and each.difference.token_arm, "gap_nat": each.gap_nat}
        for (arm, k), compared in results.comparisons.items() for each in compared])
    tables.write_table(out / "acceptance.parquet", tables.ACCEPTANCE, [
        {"arm": arm, "k": k, **given.counted.as_metrics()} for (arm, k), given in results.answers.items() if arm != "none"])
    (out / "provenance.json").write_text(json.dumps({"nodes": results.nodes}, indent=1, ensure_ascii=False), encoding="utf-8")


def metrics(first_k: int, measured: Sequence[Measured], results: Results) -> dict[str, Any]:
    """The figures of the record."""
    gaps = [each.gap_nat for compared in results.comparisons.values() for each in compared if each.gap_nat is not None]
    return {"acceptance": {arm: {"k": k, **given.counted.as_metrics()} for (arm, k), given in results.answers.items() if k == first_k},
            "lossless": {arm: counts(compared) for (arm, k), compared in results.comparisons.items() if k == first_k and compared},
            "largest_gap_nat": max(gaps, default=None), "cells": len(measured), "valid_cells": sum(each.valid for each in measured),
            "engine_start_s": {name: engine["start_s"] for facts in results.nodes.values() for name, engine in facts["engines"].items()}}
