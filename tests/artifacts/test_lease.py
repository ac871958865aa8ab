"""Leases, in a folder and on a real S3 server alike: one works, a dead one is followed, and a zombie changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts import Store
from raysd.artifacts.home import Home
from raysd.artifacts.lease import (
    STALE_S,
    HeldLease,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    Process,
    ask_to_stop,
    hold_lease,
    lease_key,
    newest_lease,
)
from raysd.artifacts.store import Work
from raysd.errors import ArtifactError, StageError, TryAgainError
from tests.artifacts.test_store import FILES, KEY, contents, publish, record_of
from tests.records import write_files

PREFIX = KEY.prefix


class Later:
    """A home some time later: time is the one thing that a test cannot wait for."""

    def __init__(self, home: Home, later_s: float) -> None:
        self._home, self._later_s = home, later_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, name)

    def now_s(self) -> float:
        return self._home.now_s() + self._later_s


def hold(home: Home, **changes: Any):
    return hold_lease(home, PREFIX, KEY.experiment, KEY.stage, KEY.fingerprint, {}, **changes)


def write_lease(home: Home, **changes: Any) -> Lease:
    """The lease of an owner that still runs on another machine, as far as anybody knows."""
    with hold(home) as held:
        lease = held.lease
    lease = lease.model_copy(update={"state": "held", "process": Process(host="elsewhere", boot="another", pid=1, started=1.0), **changes})
    home.put(lease_key(PREFIX, lease.number), lease.model_dump_json().encode())
    return lease


def beat(held: HeldLease, until: Callable[[], bool], patience_s: float = 10) -> None:
    until_s = time.monotonic() + patience_s
    while not until():
        assert time.monotonic() < until_s
        time.sleep(0.02)


OWNER = """
import sys, time
from raysd.artifacts.lease import hold_lease
from raysd.backends.stores import open_store
from raysd.signals import raise_when_terminated
raise_when_terminated()
with hold_lease(open_store(sys.argv[1]).home, sys.argv[2], "tiny", "train", "a" * 32, {}, beat_s=0.2):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def owner(home: Home, tmp_path: Path):
    """A process that holds the lease."""
    environment = {**os.environ, "RAYSD_CACHE": str(tmp_path / "owner")}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, home.uri, PREFIX], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout.readline() == "held\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_second_one_is_told_who_holds_it(home: Home, new_home: Callable[[], Home]):
    assert newest_lease(home, PREFIX) is None
    with hold(home, job="raysd-train-1") as held:
        seen = newest_lease(new_home(), PREFIX)
        assert (seen.state(), seen.lease) == ("running", held.lease)
        assert seen.lease.owner.endswith(f":{os.getpid()}") and seen.lease.job == "raysd-train-1" and seen.lease.number == 1
        with pytest.raises(LeaseHeldError) as caught, hold(new_home()):
            pass
        assert held.lease.owner in caught.value.what and caught.value.exit_code == 75
        held.check_now()
    assert newest_lease(home, PREFIX).state() == "released"
    with hold(home) as held:
        assert held.lease.number == 2


def test_beats_tell_what_the_owner_does(home: Home):
    with hold(home, beat_s=0.05) as held:
        held.doing = "step 3"
        beat(held, lambda: newest_lease(home, PREFIX).lease.doing == "step 3")
        assert newest_lease(home, PREFIX).lease.beats >= 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ArtifactError(what="the disk is full", where="here", fix="free space"), "ArtifactError"),
        (KeyboardInterrupt(), "TryAgainError"),
        (ZeroDivisionError("by zero"), "StageError"),
    ],
    ids=["told", "interrupted", "a bug"],
)
def test_a_failed_attempt_says_why_and_another_may_begin(home: Home, error: BaseException, kind: str):
    with pytest.raises(type(error)), hold(home):
        raise error
    seen = newest_lease(home, PREFIX)
    assert seen.state() == "failed" and seen.lease.error["kind"] == kind
    with hold(home) as held:
        assert held.lease.number == 2


def test_the_lease_of_a_killed_process_is_free_at_once(home: Home, owner: subprocess.Popen[str]):
    with pytest.raises(LeaseHeldError), hold(home):
        pass
    owner.kill()
    owner.wait(10)
    assert newest_lease(home, PREFIX).state() == "stale"
    with hold(home) as held:
        assert held.lease.number == 2


def test_a_request_to_stop_ends_the_owner(home: Home, owner: subprocess.Popen[str]):
    ask_to_stop(home, PREFIX, newest_lease(home, PREFIX).lease)
    _, stderr = owner.communicate(timeout=20)
    assert owner.returncode != 0 and "ended with `raysd stop`" in stderr
    seen = newest_lease(home, PREFIX)
    assert seen.state() == "failed" and seen.lease.error["kind"] == StageError.__name__
    with hold(home) as held:  # the request was for the owner before
        held.check_now()


@pytest.mark.parametrize("off_h", [-1, 0, 1])
def test_an_owner_elsewhere_is_followed_when_it_is_stale_whatever_its_clock_says(home: Home, off_h: int):
    started = datetime.now(UTC) + timedelta(hours=off_h)
    write_lease(home, started=started.isoformat(timespec="seconds"))
    for early in (home, Later(home, STALE_S - 10)):
        with pytest.raises(LeaseHeldError), hold(early, clock=lambda: started):
            pass
    late = Later(home, STALE_S + 2)
    assert newest_lease(late, PREFIX).state() == "stale"
    with hold(late, clock=lambda: started) as held:
        assert held.lease.number == 2 and held.lease.started == started.isoformat(timespec="seconds")
        with pytest.raises(LeaseHeldError), hold(home):
            pass


def test_a_process_of_this_machine_is_told_from_one_that_got_its_number_later():
    this = Process.this()
    assert not this.has_ended()
    assert this.model_copy(update={"started": this.started + 1}).has_ended()
    assert not this.model_copy(update={"boot": "another", "started": 1.0}).has_ended()


def test_a_zombie_neither_beats_nor_publishes(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    winner = Store(Later(new_home(), STALE_S + 2))
    lease = write_lease(store.home)
    zombie = HeldLease(store.home, PREFIX, lease, beat_s=0.05)  # not started: it hangs
    its = Work(store, KEY, zombie)
    out = write_files(tmp_path / "out", {"draft.bin": b"zombie!", "more.bin": b"x"})
    with winner.work_on(KEY, {}) as work:
        assert work.held.lease.number == 2
        zombie.start()  # it wakes up
        beat(zombie, lambda: not zombie._thread.is_alive())
        for refused in (zombie.check, zombie.check_now, lambda: its.publish(out, record_of(out, its))):
            with pytest.raises(LeaseLostError) as caught:
                refused()
            assert isinstance(caught.value, TryAgainError)
        zombie.let_go(None)
        assert newest_lease(store.home, PREFIX).lease == work.held.lease
        mine = write_files(work.clear(), FILES)
        work.publish(mine, record_of(mine, work))
    sleeper = Work(store, KEY, HeldLease(store.home, PREFIX, lease))  # it has seen nothing yet
    with pytest.raises(LeaseLostError):
        sleeper.publish(out, record_of(out, sleeper))
    assert contents(Store(new_home()).open(KEY)) == FILES


class Hanging:
    """A home whose owner hangs within one call, until somebody else has done something."""

    def __init__(self, home: Home, call: str, meanwhile: Callable[[], None]) -> None:
        self._home, self._call, self._meanwhile = home, call, meanwhile

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._home, name)
        if name != self._call or self._meanwhile is None:
            return found

        def late(*arguments: Any) -> Any:
            meanwhile, self._meanwhile = self._meanwhile, None
            if meanwhile is not None:
                meanwhile()
            return found(*arguments)

        return late


@pytest.mark.parametrize("call", ["put_file", "create", "list", "delete"])
def test_an_owner_that_hangs_while_it_publishes_spoils_nothing_of_its_successor(store: Store, new_home: Callable[[], Home], tmp_path: Path, call: str):
    lease, made = write_lease(store.home), []

    def meanwhile() -> None:
        winner = Store(Later(new_home(), STALE_S + 2))
        with winner.work_on(KEY, {}) as work:
            mine = write_files(work.clear(), FILES)
            made.append(record_of(mine, work))
            work.publish(mine, made[0])

    hanging = Hanging(store.home, call, meanwhile)
    zombie = Work(Store(hanging), KEY, HeldLease(hanging, PREFIX, lease))
    out = write_files(tmp_path / "out", {"draft.bin": b"zombie!", "a-further.bin": b"x"})
    if call == "delete":  # of pieces; publishing deletes nothing before its record is there
        with pytest.raises(LeaseLostError):
            zombie.pieces.keep("shard-1", out / "draft.bin")
            zombie.held.check_now()
    else:
        with pytest.raises(LeaseLostError):
            zombie.publish(out, record_of(out, zombie))
    for seen in (store, Store(new_home())):
        assert seen.record(KEY) == made[0] and contents(seen.open(KEY)) == FILES


def test_an_owner_that_hangs_while_it_keeps_a_piece_spoils_none_of_its_successor(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    lease, found = write_lease(store.home), []

    def meanwhile() -> None:
        with pytest.raises(KeyboardInterrupt), Store(Later(new_home(), STALE_S + 2)).work_on(KEY, {}) as work:
            work.pieces.keep("checkpoint", write_files(tmp_path / "mine", {"c": b"step 20"}) / "c")
            raise KeyboardInterrupt

    for call in ("put_file", "put"):
        hanging = Hanging(store.home, call, meanwhile if call == "put_file" else lambda: None)
        Work(Store(hanging), KEY, HeldLease(hanging, PREFIX, lease)).pieces.keep("checkpoint", write_files(tmp_path / call, {"c": b"step 10"}) / "c")
        with Store(Later(new_home(), STALE_S + 2)).work_on(KEY, {}) as work:
            found.append(work.pieces.find("checkpoint").read_bytes())
    assert found == [b"step 20", b"step 20"]


def test_a_zombie_that_saw_nothing_yet_meets_the_record(store: Store, new_home: Callable[[], Home]):
    record = publish(store)
    with pytest.raises(LeaseLostError, match="published"), store.work_on(KEY, {}) as work:
        work.publish(store.folder(KEY), record.model_copy(update={"files": {}}))
    assert contents(Store(new_home()).open(KEY)) == FILES


def test_an_owner_whose_files_its_successor_cleared_away_has_lost_the_lease_and_met_nothing_unexpected(store: Store, new_home: Callable[[], Home]):
    with pytest.raises(LeaseLostError), store.work_on(KEY, {}) as work:
        out = work.clear()
        with Store(Later(new_home(), STALE_S + 2)).work_on(KEY, {}):
            shutil.rmtree(work.scratch)
        (out / "draft.bin").write_bytes(b"into a folder that is gone")
    assert newest_lease(store.home, PREFIX).lease.number == 2


def test_what_went_wrong_while_it_was_stopped_is_told_with_the_stop(home: Home):
    with pytest.raises(StageError, match="raysd stop") as caught, hold(home) as held:
        held.asked_to_stop = True
        error = KeyboardInterrupt()
        error.add_note("the job may still run")
        raise error
    assert caught.value.__notes__ == ["the job may still run"]


def test_an_error_of_an_owner_that_still_has_its_lease_stays_that_error(store: Store):
    with pytest.raises(FileNotFoundError), store.work_on(KEY, {}):
        Path("/no/such/file").read_bytes()
    assert newest_lease(store.home, PREFIX).lease.error["kind"] == StageError.__name__


NAMELESS_FAILURE = re.compile(rb'"error": \{[^}]*\}', re.DOTALL)


@pytest.mark.parametrize("damage", ["empty", "cut", "failed without a reason", "nested", "of another number"])
def test_a_lease_that_cannot_be_read_is_somebodys_until_it_is_stale(home: Home, damage: str):
    with pytest.raises(StageError), hold(home):
        raise StageError(what="x", where="y", fix="z")
    good = home.get(lease_key(PREFIX, 1))
    broken = {"empty": b"", "cut": good[:40], "failed without a reason": NAMELESS_FAILURE.sub(b'"error": null', good), "nested": b"[" * 100_000,
              "of another number": good.replace(b'"number": 1', b'"number": 7')}[damage]
    assert broken != good
    home.put(lease_key(PREFIX, 1), broken)
    seen = newest_lease(home, PREFIX)
    assert (seen.state(), seen.lease.number, seen.lease.stage) == ("running", 1, KEY.stage)
    with pytest.raises(LeaseHeldError, match="somebody"), hold(home):
        pass
    late = Later(home, STALE_S + 2)
    assert newest_lease(late, PREFIX).state() == "stale"
    with hold(late) as held:
        assert held.lease.number == 2


def test_a_lease_of_a_time_to_come_is_no_eternal_one(home: Home):
    write_lease(home)
    assert newest_lease(home, PREFIX).state() == "running"
    early = Later(home, -STALE_S - 2)  # its clock was set back since
    assert newest_lease(early, PREFIX).state() == "stale"
    with hold(early) as held:
        assert held.lease.number == 2
