"""What a run would do: each stage is found, has to run, or cannot; and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysd.artifacts import Record, Store, difference
from raysd.errors import DamagedError, TryAgainError
from raysd.experiment.hardware import StageResources
from raysd.pipeline.stages import Stage

PLAN_HEADER = ["stage", "fingerprint", "state", "inputs", "resources", "writes", "why"]
"""Columns of `PlannedStage.as_row`."""

State = Literal["cached", "run", "blocked"]


@dataclass(frozen=True)
class PlannedStage:
    """One stage and what is to become of it."""

    stage: Stage
    state: State
    why: str
    record: Record | None = None
    """Of its artifact, if it was found."""

    def as_json(self, resources: StageResources, expected_bytes: int | None) -> dict[str, Any]:
        """The stage as `raysd plan --json` prints it; expected_bytes: what it will write, null if that is not known yet."""
        return {
            "stage": self.stage.name,
            "fingerprint": self.stage.fingerprint,
            "state": self.state,
            "why": self.why,
            "inputs": self.stage.identity["inputs"],
            "resources": resources.model_dump(mode="json"),
            "expected_bytes": expected_bytes,
        }

    def as_row(self, resources: StageResources, expected_bytes: int | None) -> list[str]:
        """The stage as `raysd plan` prints it."""
        size = "found" if self.state == "cached" else "?" if expected_bytes is None else f"{expected_bytes / 1e6:,.1f} MB"
        return [self.stage.name, self.stage.fingerprint[:8], self.state, ", ".join(self.stage.inputs) or "-", resources.words(), size, self.why]


def plan(stages: Sequence[Stage], store: Store) -> list[PlannedStage]:
    """Decides each stage from its record, in the order given; leases only say why. Writes nothing."""
    planned: dict[str, PlannedStage] = {}
    for stage in stages:
        planned[stage.name] = PlannedStage(stage, *_decide(stage, [planned[name] for name in stage.inputs], store))
    return list(planned.values())


def block(planned: Sequence[PlannedStage], why: str) -> list[PlannedStage]:
    """The same plan with all that would run blocked for one reason, told once."""
    first = next((entry.stage.name for entry in planned if entry.state != "cached"), None)
    return [entry if entry.state == "cached" else PlannedStage(entry.stage, "blocked", why if entry.stage.name == first else f"as {first}") for entry in planned]


def _decide(stage: Stage, inputs: Sequence[PlannedStage], store: Store) -> tuple[State, str, Record | None]:
    try:
        record = store.record(stage.key)
    except DamagedError as err:
        return "blocked", f"{err.what} ({err.where}); {err.fix}", None
    if record is not None:
        return "cached", f"made {record.ended[:16].replace('T', ' ')} UTC", record
    blocked = [planned.stage.name for planned in inputs if planned.state == "blocked"]
    if blocked:
        return "blocked", f"input {blocked[0]} is blocked", None
    running = [f"input {planned.stage.name} runs" for planned in inputs if planned.state == "run"]
    reasons = _begun(stage, store) + _changes(stage, store, {planned.stage.name for planned in inputs if planned.state == "run"}) + running
    return "run", "; ".join(reasons) if reasons else "never run", None


def _begun(stage: Stage, store: Store) -> list[str]:
    """What the lease of an artifact that is not there yet says."""
    seen = store.lease(stage.key)
    if seen is None:
        return []
    state = seen.state()
    if state == "running":
        return [f"{seen.lease.owner} works on it: {seen.lease.doing}"]
    if state == "failed" and seen.lease.error["kind"] != TryAgainError.__name__:
        return [f"the last attempt failed: {seen.lease.error['what']}"]
    return ["its artifact was deleted"] if state == "released" else ["the last attempt was interrupted"]


def _changes(stage: Stage, store: Store, running: set[str]) -> list[str]:
    """What differs from the newest record of the same stage; an input that runs is told by the caller."""
    try:
        newest = store.newest_record(stage.experiment, stage.name)
    except DamagedError as err:  # an artifact that this run does not use: it can explain nothing, and it stops nothing
        return [f"an earlier artifact cannot be compared: {err.what}"]
    if newest is None:
        return []
    before, after = dict(newest.identity), dict(stage.identity)
    before_inputs, after_inputs = before.pop("inputs"), after.pop("inputs")
    lines = difference(before, after)
    for name in sorted({*before_inputs, *after_inputs} - running):
        old, new = before_inputs.get(name), after_inputs.get(name)
        if old != new:
            lines.append(f"input {name} changed: {(old or 'none')[:8]} -> {(new or 'none')[:8]}")
    return lines
