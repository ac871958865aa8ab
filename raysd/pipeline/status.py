"""What is in a store and who works on it: `raysd status`, `raysd logs` and `raysd stop`, from records and leases alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysd.artifacts import ArtifactKey, Store
from raysd.artifacts.lease import BEAT_S, Lease, ask_to_stop, withdraw_stop
from raysd.artifacts.store import RUN, Content, Found
from raysd.errors import ArtifactError, TryAgainError
from raysd.pipeline.stages import OURS, VERSIONS, Stage

STOP_PATIENCE_S = 60.0
"""For an owner to see the request, end its engines and save its work."""

State = Literal["done", "running", "stale", "failed"]


@dataclass(frozen=True)
class Status:
    """One artifact, finished or not."""

    key: ArtifactKey
    state: State
    started: str | None
    """UTC, ISO 8601, by the owner's clock."""
    owner: str | None
    """USER@HOST:PID; None for an artifact whose leases are gone."""
    why: str
    """What is being done, or why it failed."""
    lease: Lease | None
    modified_s: float
    """When it was last written, on the store's clock."""

    def as_json(self) -> dict[str, Any]:
        """The artifact as `raysd status --json` prints it."""
        return {"experiment": self.key.experiment, "stage": self.key.stage, "state": self.state, "fingerprint": self.key.fingerprint,
                "started": self.started, "owner": self.owner, "why": self.why}

    def as_row(self) -> list[str]:
        """The artifact as `raysd status` prints it."""
        started = "-" if self.started is None else f"{self.started[:16].replace('T', ' ')} UTC"
        return [self.key.experiment, self.key.stage, self.state, self.key.fingerprint[:8], started, self.owner or "-", self.why]


STATUS_HEADER = ["experiment", "stage", "state", "fingerprint", "started", "owner", ""]
"""Columns of `Status.as_row`."""


def statuses(store: Store, experiment: str | None = None, skipped: list[ArtifactError] | None = None) -> list[Status]:
    """Every artifact of a store, finished or not, by experiment, in the order of the stages, the newest first. skipped: as `Home.list` takes it."""
    order = list(VERSIONS)
    told = [status for status in _read(store, experiment, skipped) if status.key.stage in order]
    return sorted(told, key=lambda status: (status.key.experiment, order.index(status.key.stage), -status.modified_s))


def newest(told: Sequence[Status]) -> list[Status]:
    """The first of each stage of each experiment."""
    firsts: dict[tuple[str, str], Status] = {}
    for status in told:
        firsts.setdefault((status.key.experiment, status.key.stage), status)
    return list(firsts.values())


def stop(store: Store, experiment: str | None, sleep: Callable[[float], None] = time.sleep) -> list[Status]:
    """Asks all that runs, of one experiment or of the whole store, to stop: whoever works on a stage, and whoever runs an experiment, be it between two
    stages or while its job waits. Returns what was running once it has ended.

    Raises TryAgainError if an owner does not stop in time, or is not heard of any more although nobody knows that it has ended.
    """
    running = [status for status in _read(store, experiment) if status.state == "running"]
    running.sort(key=lambda status: status.key.stage != RUN)  # first those who would begin something else
    for status in running:
        ask_to_stop(store.home, status.key.prefix, status.lease)
    deadline = time.monotonic() + STOP_PATIENCE_S
    try:
        for status in running:
            while (seen := store.lease(status.key)) is not None and seen.lease.number == status.lease.number and seen.lease.state == "held":
                if seen.lease.process.has_ended():
                    break
                if time.monotonic() > deadline or seen.state() == "stale":
                    raise TryAgainError(what=f"{status.owner} has not stopped {status.key.stage}; its last heartbeat is {seen.age_s:.0f} s old",
                                        where=store.place(status.key), fix="look at its log (`raysd logs`); end its process by hand if it hangs, or its Ray job: ray job stop")
                sleep(BEAT_S / 5)
    finally:
        for status in running:
            withdraw_stop(store.home, status.key.prefix, status.lease)
    return running


def log_to_show(store: Store, stages: Sequence[Stage], wanted: str | None, attempt: int | None) -> tuple[ArtifactKey, int]:
    """The log that a person most likely means: the one written last, of the stage and the attempt that are asked for. Raises ArtifactError if there is none."""
    found = [(modified_s, place, number) for place, stage in enumerate(stages) if wanted in (None, stage.name)
             for number, modified_s in store.logs(stage.key).items() if attempt in (None, number)]
    if not found:
        asked = f"of the stage {wanted}" if wanted else "of any stage"
        raise ArtifactError(what=f"there is no log {asked}" + (f", attempt {attempt}" if attempt else ""), where=store.uri,
                            fix="run the experiment first; a script that was started by hand told its terminal, or `ray job logs`")
    _, place, number = max(found)
    return stages[place].key, number


def is_running(store: Store, key: ArtifactKey) -> bool:
    """Whether somebody works on the artifact."""
    seen = store.lease(key)
    return seen is not None and seen.state() == "running"


def _read(store: Store, experiment: str | None, skipped: list[ArtifactError] | None = None) -> list[Status]:
    """All that can be told of artifacts and of runs, in no order."""
    found = [each for each in store.inventory(experiment, skipped) if each.key.stage in OURS]
    return [status for each, content in zip(found, store.read_all(found), strict=True) if (status := _status(each, content)) is not None]


def _status(found: Found, content: Content) -> Status | None:
    """None for what is left of an attempt that never began: a log without a lease."""
    lease = content.lease.lease if content.lease else None
    owner = lease.owner if lease else None
    if content.error is not None:
        return Status(found.key, "failed", None, None, content.error.what, None, found.modified_s)
    if content.record is not None:
        return Status(found.key, "done", content.record.started, owner, "", lease, found.modified_s)
    if content.lease is None:
        return None
    state = content.lease.state()
    if state == "failed":
        return Status(found.key, "failed", lease.started, owner, lease.error["what"], lease, found.modified_s)
    if state == "released":
        return Status(found.key, "failed", lease.started, owner, "its record is gone", lease, found.modified_s)
    return Status(found.key, state, lease.started, owner, lease.doing, lease, found.modified_s)
