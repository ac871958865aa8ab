"""One node at work: it holds the engines, puts the load of cells on them, and has the report split answered."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from raysd.artifacts.stage import no_progress
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError, StageError
from raysd.experiment import Experiment
from raysd.experiment.sweep import SweepSection
from raysd.hardware.catalogue import CPU
from raysd.load.arrivals import Load
from raysd.load.requests import Request
from raysd.load.run import RunLoad, run_load
from raysd.prompts.prompt_set import PromptSet
from raysd.sweep.cells import NONE, Cell, Engine, engine_name, plan_engines
from raysd.sweep.engine import Launch, Server, engine_spec
from raysd.sweep.engines import Engines
from raysd.sweep.lossless import Answer, Comparison, compare, served_gap
from raysd.sweep.measure import Measured, limits_of, measure_cell, run_counted, unmeasured, wait_until_idle
from raysd.sweep.provenance import node_facts
from raysd.sweep.residency import decide_residency
from raysd.sweep.served import greedy_requests, refuse_failures
from raysd.sweep.smi import find_tool
from raysd.sweep.telemetry import Telemetry
from raysd.sweep.warm_up import warm_up
from raysd.sweep.workloads import WorkloadPrompt, ready_prompts, warm_up_prompts, workload_prompts
from raysd.target import load_tokenizer, resolve_target

ANSWER_CONCURRENCY = 8
"""Requests in flight while the answers that are compared are asked for; the same for every arm."""
ANSWER_TRIES = 2
"""An engine that dies while it answers is started once more; one that does so again must not be measured."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Answers:
    """The greedy answers of one engine to the report split, and what it counted over them."""

    answers: list[Answer]
    counted: AcceptanceCounts


class Node(Protocol):
    """A node of a sweep, as the stage sees it: this machine, or an actor on another one. Each call may raise NodeLostError."""

    name: str
    section: SweepSection
    together: bool
    """Whether its engines are up at once."""

    def to_start(self, engine: Engine) -> list[Engine]:
        """What `prepare` would start; nothing if the engine is up, or cannot be had."""

    def prepare(self, engine: Engine) -> bool:
        """Sees to it that an engine is up and warm; whether it is. Raises EngineError if the node is of no use: without its baseline, or without any draft."""

    def measure(self, cell: Cell) -> Measured:
        """A cell. It is invalid if its engine cannot be had, or dies."""

    def answer(self, engine: Engine) -> Answers | None:
        """The report split answered; None if the engine cannot be had."""

    def compare(self, none: Answers, arm: Answers) -> list[Comparison]:
        """An arm's answers against the baseline's; the target is asked where they part. Raises EngineError without the baseline."""

    def facts(self) -> dict[str, Any]:
        """Where and with what it measured, JSON-ready."""

    def logs(self) -> dict[str, bytes]:
        """The logs of its engines by name that are not in the stage's own folder already."""


class Bench:
    """The Node of this machine. To be closed, also after an error."""

    def __init__(self, name: str, experiment: Experiment, prompts: PromptSet, inputs: Mapping[str, Path], launch: Launch, available_bytes: int, logs: Path,
                 wait_for_memory: Callable[[], None] = lambda: None, run: RunLoad = run_load) -> None:
        """prompts: the report split, and those of workloads. inputs: `train` and `quantize` hold the drafts, as their arms need them. available_bytes: of memory, for engines.
        logs: the folder for their logs. wait_for_memory: as Engines has it. run: what puts a load on an engine."""
        section = experiment.sweep
        target = resolve_target(experiment.target, no_progress)
        tokenizer = load_tokenizer(target, experiment.target)
        specs = {engine: engine_spec(experiment, target, draft_folder(experiment, inputs, engine[0]), engine[1]) for engine in plan_engines(section)}
        self.name, self.section, self._experiment, self._limits, self._run = name, section, experiment, limits_of(section), run
        self._workloads = {workload.name: ready_prompts(workload, experiment, prompts, tokenizer) for workload in section.workloads}
        self._questions = greedy_requests(prompts.split("report", section.report_prompts), tokenizer, section.answer_tokens, experiment.target.max_model_len, experiment.prompts.path)
        self._residency = decide_residency(section.residency, list(specs.values()), available_bytes)
        self.together = self._residency.together
        self._warm_ups: dict[str, list[dict[int, float]]] = {}
        self._engines = Engines(specs, self.together, launch, logs, self._warm_up, wait_for_memory)
        self._telemetry = Telemetry(partial(print, flush=True), None if experiment.hardware.name == CPU else find_tool())
        self._telemetry.open()

    def to_start(self, engine: Engine) -> list[Engine]:
        return self._engines.to_start(engine)

    def prepare(self, engine: Engine) -> bool:
        while self._engines.to_start(engine):
            try:
                self._engines.get(engine)
            except EngineError as err:
                print(f"{engine_name(engine)} did not start: {err}", flush=True)
        self._check_of_use()
        return engine in self._engines.up

    def measure(self, cell: Cell) -> Measured:
        try:
            self._see_to_it_that_all_are_idle()
            server = self._engines.get(cell.engine)
        except EngineError as err:
            self._check_of_use()
            return unmeasured(cell, self.name, err)
        try:
            if warm_up_requests := self._as_requests(warm_up_prompts(self._workloads[cell.workload], cell.concurrency, self.section.seed)):
                load, _ = run_counted(server, warm_up_requests, cell.concurrency, self._limits, self._run)
                refuse_failures(load.results, server.log_path)
            return measure_cell(cell, self._requests(cell), server, self.name, self.section, self._telemetry.rows, self._run)
        except EngineError as err:
            self._engines.put_away(cell.engine)
            return unmeasured(cell, self.name, err)

    def answer(self, engine: Engine) -> Answers | None:
        error: EngineError | None = None
        for _ in range(ANSWER_TRIES):
            if not self.prepare(engine):
                return None
            server = self._engines.get(engine)
            try:
                load, counted = run_counted(server, self._questions, min(ANSWER_CONCURRENCY, self.section.engine.max_num_seqs), self._limits, self._run)
                refuse_failures(load.results, server.log_path)
            except EngineError as err:
                error = err
                self._engines.put_away(engine)
                continue
            if engine[1] is None or counted.acceptance.drafts > 0:
                return Answers([Answer(result.prompt_id, result.token_ids, result.finish_reason) for result in load.results], counted.acceptance)
            error = EngineError(what=f"the engine {engine_name(engine)} answered {len(load.results)} prompts and counted no draft", where=server.log_path,
                                fix="check in the log that the draft was loaded")
            break  # found now rather than after an hour of cells
        self._engines.refuse(engine, error)
        self._check_of_use()
        return None

    def compare(self, none: Answers, arm: Answers) -> list[Comparison]:
        if self.section.acceptance.rates is not None:
            return []  # what is accepted by the dice is not what the target says, and no answer is to be compared
        baseline = self._engines.get(NONE)
        gap = served_gap(baseline.address, baseline.model)
        return [compare(of_none, of_arm, question.prompt, self.section.near_tie_nat, gap)
                for of_none, of_arm, question in zip(none.answers, arm.answers, self._questions, strict=True)]

    def facts(self) -> dict[str, Any]:
        return node_facts() | {"residency": {"together": self.together, "why": self._residency.why},
                               "engines": {engine_name(engine): {"command": command, "start_s": self._engines.start_s.get(engine),
                                                                 "warm_up_token_ms": self._warm_ups.get(engine_name(engine), [])}
                                           for engine, command in self._engines.commands.items()}}

    def logs(self) -> dict[str, bytes]:
        return {}

    def close(self) -> None:
        """Ends the engines, and telemetry."""
        try:
            self._engines.close()
        finally:
            self._telemetry.close()

    def _requests(self, cell: Cell) -> list[Request]:
        """The same for every arm and k of a block."""
        return self._as_requests(workload_prompts(self._workloads[cell.workload], cell.concurrency, cell.requests, cell.block, self.section.seed))

    def _as_requests(self, prompts: Sequence[WorkloadPrompt]) -> list[Request]:
        return [Request(each.id, each.token_ids, each.max_tokens, self.section.temperature, each.ignore_eos, category=each.category) for each in prompts]

    def _see_to_it_that_all_are_idle(self) -> None:
        """What is measured beside a busy engine would be wrong; one that stays busy, or is dead, is put away."""
        for engine, server in self._engines.up.items():
            try:
                wait_until_idle(server)
            except EngineError:
                self._engines.put_away(engine)

    def _check_of_use(self) -> None:
        """Raises the EngineError of the engine without which nothing can be compared here."""
        given_up, engines = self._engines.given_up(), plan_engines(self.section)
        drafting = [engine for engine in engines if engine != NONE]
        if NONE in given_up:
            raise given_up[NONE]
        if drafting and all(engine in given_up for engine in drafting):
            raise given_up[drafting[0]]

    def _warm_up(self, engine: Engine, server: Server) -> None:
        """The engine meets every batch size that it will be measured at, until its answers get no faster."""
        def one_round() -> dict[int, float]:
            token_ms = {}
            for concurrency in self.section.concurrency_of(engine[0]):
                questions = [self._questions[index % len(self._questions)] for index in range(concurrency)]
                short = [Request(each.prompt_id, each.prompt, min(WARM_UP_TOKENS, each.max_tokens), 0.0, True) for each in questions]
                results = self._run(server.address, server.model, short, Load(concurrency=concurrency), self._limits, False).results
                refuse_failures(results, server.log_path)
                token_ms[concurrency] = round(statistics.median((each.ended_ns - each.dispatched_ns) / 1e6 / each.output_tokens for each in results), 3)
            return token_ms

        self._warm_ups[engine_name(engine)] = warm_up(one_round)


def draft_folder(experiment: Experiment, inputs: Mapping[str, Path], arm: str) -> Path | None:
    """The checkpoint that an arm drafts with; None for `none`. Raises StageError if the stage that makes it was not run."""
    if arm == "none":
        return None
    if arm == "bf16" and experiment.draft.checkpoint is not None:
        return experiment.draft.checkpoint
    stage = {"bf16": "train", "fp8": "quantize"}[arm]
    if stage not in inputs:
        raise StageError(what=f"the arm {arm} has no draft: the stage {stage} gave nothing", where="sweep.arms", fix=f"run the stage {stage} first, or remove the arm")
    folder = inputs[stage] / "draft"
    if not (folder / "config.json").is_file():
        raise StageError(what=f"the artifact of the stage {stage} holds no draft", where=folder, fix=f"delete the artifact to run the stage {stage} again")
    return folder
