"""Leases: who is writing an artifact now, told by a heartbeat, and taken over when the heartbeat stops.

The leases of an artifact are files `lease-00001.json`, `lease-00002.json`, ... beside its record, each created only if it is absent: whoever creates
the next number is the only one that works, and whoever finds a higher number than its own has lost the artifact (a fencing token, as in Lamport's
and Chubby's sequencers). Nothing else needs a lock, so that a folder and S3 do the same.

A lease is stale when its file has not been written for STALE_S on the home's own clock, which no runner's clock can put off; or at once if its owner
was a process of this machine that has ended. One that cannot be read says nothing of its owner and goes stale by its age alone.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from raysd.artifacts.home import Entry, Home
from raysd.errors import RaysdError, StageError, TryAgainError, to_dict

BEAT_S = 5.0
STALE_S = 30.0
"""Six beats: an owner that is merely slow keeps its lease."""
RELEASE_PATIENCE_S = 10.0

Clock = Callable[[], datetime]
"""This machine's time, UTC."""

LEASE_NAME = re.compile(r"lease-\d{5}\.json")


class LeaseHeldError(TryAgainError):
    """Somebody else works on the artifact."""


class LeaseLostError(TryAgainError):
    """Somebody else has taken the artifact over."""


class Process(BaseModel):
    """One process of one boot of one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: str
    boot: str
    """The kernel's boot id and the process namespace: a number means the same process only within both."""
    pid: int
    started: float
    """The process's start on the kernel's clock, since numbers are used again."""

    @classmethod
    def this(cls) -> Process:
        return cls(host=socket.gethostname(), boot=_boot(), pid=os.getpid(), started=_start_of(os.getpid()) or 0.0)

    def has_ended(self) -> bool:
        """Whether it is known to have ended: a process of another machine is not."""
        return self.boot == _boot() and _start_of(self.pid) != self.started


class Lease(BaseModel):
    """What a lease file holds. Times are for people: no decision reads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    experiment: str
    stage: str
    fingerprint: str
    number: int
    """From 1, one more each time the artifact changes hands."""
    token: str
    """Random, so that an owner knows its own file again after an answer was lost."""
    owner: str
    """USER@HOST:PID."""
    process: Process
    job: str
    """The Ray job; empty for a script run by hand."""
    state: Literal["held", "released", "failed"]
    """`released`: the artifact is done. `failed`: the attempt ended without it."""
    inputs: dict[str, str]
    """Stage name to fingerprint of what it reads, or, for a run, of all that it makes: `raysd gc` leaves it alone."""
    started: str
    """UTC, ISO 8601, by the owner's clock."""
    beats: int
    doing: str
    """What the owner said last of its progress."""
    error: dict[str, str] | None
    """Why it failed, as `errors.to_dict` writes it."""

    @model_validator(mode="after")
    def _failed_for_a_reason(self) -> Lease:
        if self.state == "failed" and (self.error is None or not {"kind", "what", "where", "fix"} <= self.error.keys()):
            raise ValueError("error: says nothing, and the attempt failed")
        return self


@dataclass(frozen=True)
class SeenLease:
    """The newest lease of an artifact as somebody finds it."""

    lease: Lease
    age_s: float
    """Since its last beat, on the home's clock."""

    def state(self) -> Literal["running", "stale", "released", "failed"]:
        """What it says, and whether its owner is still there."""
        if self.lease.state != "held":
            return self.lease.state
        # A time to come, as after the home's clock was set back, is as old as one gone by: a living owner writes the next one within a beat.
        return "stale" if abs(self.age_s) > STALE_S or self.lease.process.has_ended() else "running"


def lease_key(prefix: str, number: int, suffix: str = "json") -> str:
    """Where the lease of a number is; prefix: the artifact's, ending with `/`."""
    return f"{prefix}lease-{number:05d}.{suffix}"


def newest_lease(home: Home, prefix: str) -> SeenLease | None:
    """The lease with the highest number, or None."""
    entries = lease_entries(home.list(f"{prefix}lease-"))
    return read_lease(home, entries[-1], home.now_s()) if entries else None


def lease_entries(entries: list[Entry]) -> list[Entry]:
    """The lease files among stored files, the highest number last."""
    return [entry for entry in entries if LEASE_NAME.fullmatch(entry.key.rpartition("/")[2])]


def read_lease(home: Home, entry: Entry, now_s: float) -> SeenLease | None:
    """The lease in a stored file; None if it has been deleted since. now_s: the home's clock."""
    content = home.get(entry.key)
    if content is None:
        return None
    try:
        lease = Lease.model_validate_json(content)
    except ValidationError:
        lease = _unreadable(entry.key)
    if lease.number != _number_of(entry.key):  # a copy of another one
        lease = _unreadable(entry.key)
    return SeenLease(lease, now_s - entry.modified_s)


def _unreadable(key: str) -> Lease:
    """What is known of a lease that does not parse: where it is, and that somebody has written it."""
    experiment, stage, fingerprint, name = key.split("/")[-4:]
    return Lease(experiment=experiment, stage=stage, fingerprint=fingerprint, number=_number_of(key), token="", owner="somebody", job="", state="held",
                 process=Process(host="", boot="", pid=0, started=0), inputs={}, started="an unknown time", beats=0, doing=f"{name} cannot be read", error=None)


def _number_of(key: str) -> int:
    return int(key[-len("00001.json"):-len(".json")])


class HeldLease:
    """A lease that this process holds: beats in a thread until it is let go."""

    def __init__(self, home: Home, prefix: str, lease: Lease, beat_s: float = BEAT_S) -> None:
        self._home, self._prefix, self._beat_s = home, prefix, beat_s
        self.lease = lease
        self.doing = lease.doing
        self._lost: str | None = None
        self.asked_to_stop = False
        """Whether `raysd stop` ends it."""
        self._done = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat_until_done, daemon=True, name="raysd-lease")

    def check(self) -> None:
        """Raises LeaseLostError if somebody has taken the artifact over, by what the last beat saw."""
        if self._lost is not None:
            raise LeaseLostError(what=f"another run took the stage {self.lease.stage} over, as this one had not been heard of: {self._lost}",
                                 where=self._home.place(self._prefix), fix="run again: it follows the other run")

    def check_now(self) -> None:
        """As `check`, asking the home: before what must not be done twice."""
        self._look()
        self.check()

    def start(self) -> None:
        self._thread.start()

    def let_go(self, error: RaysdError | None) -> None:
        """Ends the beats and says how the attempt ended. error: why it failed; None: its artifact is there."""
        self._done.set()
        self._thread.join(RELEASE_PATIENCE_S)
        if self._lost is None:
            self._write(state="released" if error is None else "failed", error=None if error is None else to_dict(error))

    def _beat_until_done(self) -> None:
        last_s = time.monotonic()
        while not self._done.wait(self._beat_s):
            try:
                self._look()
                if self._lost is not None:
                    return
                self._write(beats=self.lease.beats + 1, doing=self.doing)
                last_s = time.monotonic()
            except RaysdError as err:  # the home may answer again before the lease is stale; what matters meets the same error in the main thread
                print(f"lease: no beat for {time.monotonic() - last_s:.0f} s: {err.what}", file=sys.stderr, flush=True)

    def _write(self, **changes: Any) -> None:
        with self._writing:  # or a beat that is under way could arrive after the last word
            self.lease = self.lease.model_copy(update=changes)
            self._home.put(lease_key(self._prefix, self.lease.number), self.lease.model_dump_json(indent=1).encode("utf-8"))

    def _look(self) -> None:
        """Notes a higher lease, and obeys a request to stop."""
        entries = self._home.list(f"{self._prefix}lease-")
        newest = lease_entries(entries)[-1:]
        if newest and newest[0].key > lease_key(self._prefix, self.lease.number):  # numbers are padded: keys are in their order
            self._lost = self._home.place(newest[0].key)
            return
        stop = lease_key(self._prefix, self.lease.number, "stop")
        if not self._done.is_set() and any(entry.key == stop for entry in entries):
            self._home.delete([stop])
            self.asked_to_stop = True
            os.kill(os.getpid(), signal.SIGTERM)


def utc_now() -> datetime:
    """This machine's time."""
    return datetime.now(UTC)


@contextlib.contextmanager
def hold_lease(home: Home, prefix: str, experiment: str, stage: str, fingerprint: str, inputs: dict[str, str], job: str = "", beat_s: float = BEAT_S,
               clock: Clock = utc_now) -> Iterator[HeldLease]:
    """Holds the artifact's lease; on the way out it says how the attempt ended.

    clock: this machine's, for what people read. Raises LeaseHeldError if somebody else has the lease and is alive.
    """
    seen = newest_lease(home, prefix)
    if seen is not None and seen.state() == "running":
        raise _held(home, prefix, seen.lease)
    process = Process.this()
    lease = Lease(experiment=experiment, stage=stage, fingerprint=fingerprint, number=1 if seen is None else seen.lease.number + 1, token=uuid.uuid4().hex,
                  owner=f"{_user()}@{process.host}:{process.pid}", process=process, job=job, state="held", inputs=inputs,
                  started=clock().isoformat(timespec="seconds"), beats=0, doing="starting", error=None)
    if not home.create(lease_key(prefix, lease.number), lease.model_dump_json(indent=1).encode("utf-8")):
        seen = newest_lease(home, prefix)
        raise _held(home, prefix, lease if seen is None else seen.lease)
    held = HeldLease(home, prefix, lease, beat_s)
    held.start()
    try:
        yield held
    except BaseException as err:
        _raise_if_lost(held, err)
        why = _why_ended(err, held)
        try:
            held.let_go(why)
        except RaysdError as also:
            err.add_note(f"the lease could not be released: {also.what}; it is stale in {STALE_S:g} s")
        if held.asked_to_stop:
            for note in getattr(err, "__notes__", ()):
                why.add_note(note)
            raise why from err
        raise
    held.let_go(None)


def _raise_if_lost(held: HeldLease, err: BaseException) -> None:
    """Raises LeaseLostError if the attempt ended on an error because its successor has cleared its files away."""
    if not isinstance(err, Exception) or isinstance(err, TryAgainError):  # the latter: it is known to be lost, or the home does not answer
        return
    try:
        held.check_now()
    except LeaseLostError as lost:
        held.let_go(lost)
        raise lost from err
    except RaysdError as also:
        err.add_note(f"whether the lease is still held is not known: {also.what}")


def _why_ended(err: BaseException, held: HeldLease) -> RaysdError:
    """What the lease says of a failed attempt. A follower goes on itself after a TryAgainError, and ends with any other error."""
    where = f"{held.lease.stage} of {held.lease.experiment}"
    if held.asked_to_stop:
        return StageError(what="ended with `raysd stop`", where=where, fix="run again to go on from its unfinished work")
    if isinstance(err, RaysdError):
        return err
    if isinstance(err, Exception):
        return StageError(what=f"the stage ended on an unexpected error: {type(err).__name__}: {err}", where=where, fix="its log holds the traceback")
    return TryAgainError(what=f"the attempt was interrupted: {err or type(err).__name__}", where=where, fix="run again to go on from its unfinished work")


def ask_to_stop(home: Home, prefix: str, lease: Lease) -> None:
    """Asks the owner of a lease, wherever it runs, to stop: it does at its next beat, within BEAT_S."""
    home.put(lease_key(prefix, lease.number, "stop"), b"")


def withdraw_stop(home: Home, prefix: str, lease: Lease) -> None:
    """Takes a request to stop back, that was not obeyed."""
    home.delete([lease_key(prefix, lease.number, "stop")])


def _held(home: Home, prefix: str, lease: Lease) -> LeaseHeldError:
    return LeaseHeldError(what=f"the stage {lease.stage} is being run by {lease.owner} (since {lease.started})", where=home.place(prefix),
                          fix="wait for it (`raysd run` follows it), or end it with `raysd stop`")


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex  # not Linux: no process is ever known to have ended, and leases go stale by their age alone


def _start_of(pid: int) -> float | None:
    """When a process started, on the kernel's clock, in ticks; None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else float(fields[19])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not be in the password file
        return str(os.getuid())
