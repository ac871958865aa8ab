"""The kinds of faults: each takes a Fault, does to raysd what its name says at a moment that its seed picks, and returns where it did so.

A kind checks what must be true meanwhile; what must be true afterwards, tests/faults/verify.py says.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from raysd.artifacts.lease import STALE_S, lease_key
from raysd.artifacts.record import NAME
from raysd.experiment import load_experiment
from raysd.pipeline.preflight import resolve, stages_of
from tests.faults.bench import Fault, busy_workers, wait_for_jobs
from tests.faults.ground import Attempt, Ground, NotRecovered
from tests.faults.verify import missing
from tests.records import publish_stage

MOMENTS = {
    "capture": [("starting vLLM", 1), ("kept hf_relative_error", 1), *(("kept shard", times) for times in range(1, 7))],
    "train": [("reading the captured states", 1), *(("kept checkpoint", times) for times in range(1, 5)), ("starting vLLM with the draft", 1),
              ("counting the draft's acceptance", 1)],
    "quantize": [("quantizing to", 1), ("auditing", 1), ("starting vLLM with the draft", 1), ("counting the draft's acceptance", 1)],
    "sweep": [("starting 2 engines", 1), ("kept answers", 1), *(("kept cells", times) for times in range(1, 6))],
    "report": [("starting", 1)],
}
"""Stage to lines, and how often they have been written by then, after which it may be hit."""
PAUSE_S = 0.5
"""The longest time between such a line and the fault."""
SKEW_S = 3600.0
ENGINE_END_S = 5.0
"""For an engine to be gone after the stage that started it."""


def kill_job(fault: Fault, stage: str) -> Ground:
    """kill -9 of a stage's own process; with one CPU worker, that is also the training worker and the job's driver."""
    ground = fault.ground(stage)
    attempt = ground.start()
    _wait_for_moment(fault, attempt, stage)
    attempt.kill()
    return ground


def kill_engine(fault: Fault, stage: str) -> Ground:
    """kill -9 of a vLLM engine's process; the stage must notice, and end by itself, but for a sweep, which starts it again and goes on."""
    ground = fault.ground(stage)
    attempt = ground.start()
    part, moments = {
        "capture": ("raysd.backends.capture_worker", [("starting vLLM", 1), ("kept shard", 1), ("kept shard", 3)]),
        "train": ("VLLM::EngineCore", [("starting vLLM with the draft", 1), ("counting the draft's acceptance", 1)]),
        "sweep": ("VLLM::EngineCore", [("starting 2 engines", 1), ("kept cells", 2), ("kept cells", 4)]),
    }[stage]
    line, times = fault.dice.choice(moments)
    attempt.wait_for(line, times)
    engines = attempt.wait_until(f"a process {part}", lambda: attempt.find(part))
    victim = fault.dice.choice(sorted(engines, key=lambda process: process.pid))
    fault.hit = f"{part} of {stage} after `{line}` x {times}"
    victim.kill()
    code = attempt.wait()
    _expect(code == 0 if stage == "sweep" else code != 0 or (line, times) == moments[-1], f"the stage ended well without its engine: {attempt.tail()}")  # by then all may have been said
    return ground


def kill_runner(fault: Fault) -> Ground:
    """kill -9 of `raysd run`: alone, so that its Ray and the job have to notice, or with every process of its Ray."""
    ground, stage = fault.ground_of_runs("train"), "train"
    attempt = ground.start()
    times = fault.dice.randint(1, 3)
    ground.wait_for_kept(attempt, stage, "checkpoint", times)
    with_ray = fault.dice.random() < 0.5
    fault.hit = f"raysd run, {'with its Ray' if with_ray else 'alone'}, after {times} checkpoints"
    started = attempt.descendants()
    attempt.kill()
    for process in started if with_ray else []:
        _kill(process)
    return ground


def kill_driver(fault: Fault) -> Ground:
    """kill -9 of the job's driver in a cluster; the runner must try again by itself."""
    ground, attempt, driver = _train_on_nodes(fault)
    fault.hit = "the train job's driver on a cluster of three nodes"
    driver.kill()
    _expect(attempt.wait() == 0, f"the runner did not try again: {attempt.tail()}")
    return ground


def kill_raylet(fault: Fault) -> Ground:
    """kill -9 of the raylet of the node that a stage runs on; the runner must have it done by another node."""
    ground, attempt, driver = _train_on_nodes(fault)
    nodes = fault.bench.nodes
    above = {process.pid for process in driver.parents()}
    name = next(name for name, raylet in nodes.raylets.items() if raylet in above)
    fault.hit = f"the raylet of node {name}, with the train job on it"
    try:
        os.kill(nodes.raylets[name], signal.SIGKILL)
        _expect(attempt.wait() == 0, f"the runner did not go on with another node: {attempt.tail()}")
    finally:
        nodes.add(name)
    return ground


def stop(fault: Fault) -> Ground:
    """`raysd stop`: SIGTERM to the stage's process, which ends its engines and keeps its work."""
    stage = fault.dice.choice(["capture", "train"])
    ground = fault.ground(stage)
    attempt = ground.start()
    _wait_for_moment(fault, attempt, stage)
    stopped = ground.raysd("stop")
    _expect(stopped.process.returncode == 0, f"raysd stop failed: {stopped.tail()}")
    code = attempt.wait(30)
    _expect(code != 0 or not missing(ground, stage), "it was stopped, and said that it had ended well")
    return ground


def stop_waiting(fault: Fault) -> Ground:
    """`raysd stop` while the job waits for a node, or was submitted a moment ago: nobody holds the stage's lease yet."""
    pending, nodes = fault.seed % 2 == 0, fault.bench.nodes
    stage = "report" if pending else "train"
    ground = fault.ground_on_nodes(stage)
    fault.hit = f"{stage}, whose job {'waits for a node' if pending else 'was submitted a moment ago'}"
    with busy_workers(nodes) if pending else contextlib.nullcontext():
        before = {job["submission_id"] for job in nodes.jobs()}
        attempt = ground.start()
        (job,) = attempt.wait_until("its job", lambda: {job["submission_id"] for job in nodes.jobs()} - before)
        stopped = ground.raysd("stop")
        _expect(stopped.process.returncode == 0 and "stopped (" in stopped.text(), f"raysd stop did not stop it: {stopped.tail()}")
        _expect(attempt.wait(30) != 0, f"it was stopped, and ended well: {attempt.tail()}")
        _expect(not ground.home.list("tiny/run/"), "the run's lease is left behind")
    # Ray keeps a request to stop for a job that waits, and ends it when it would begin.
    wait_for_jobs(nodes, {job}, "STOPPED", "FAILED", "SUCCEEDED")
    _expect(missing(ground, stage), "the job that was stopped has done its work")
    return ground


def spoil_lease(fault: Fault) -> Ground:
    """A lease that nobody can read and nobody holds: a run waits until it must be stale, and goes on."""
    ground = fault.ground_on_nodes("report")
    key = lease_key(ground.prefix("report"), 1)
    good = ground.home.get(lease_key(ground.prefix("capture"), 1))
    spoiled = fault.dice.choice([b"", bytes(len(good)), good[:fault.dice.randrange(1, len(good))]])
    ground.home.put(key, spoiled)
    _age_lease(ground, "report", STALE_S / 2)  # the rest is waited for
    fault.hit = f"the lease of report, {len(spoiled)} bytes: {spoiled[:20]!r}"
    attempt = ground.start()
    _expect(attempt.wait() == 0, f"the run did not go on: {attempt.tail()}")
    _expect("following" in attempt.text(), f"it did not wait for who may have held the lease: {attempt.tail()}")
    _expect(ground.leases("report") == [1, 2], f"leases {ground.leases('report')}")
    return ground


def collect_garbage(fault: Fault) -> Ground:
    """`raysd gc --delete --older-than 0s` in the middle of a run of older artifacts than those that the name stood for last."""
    ground = fault.ground_on_nodes("train")
    other = [stage for stage in stages_of(load_experiment(fault.bench.reference.at_faults("other", train={"lr": 1e-3}))) if stage.name != "capture"]
    for stage in other:
        publish_stage(ground.store, stage)
    resolve(other, ground.store)
    attempt = ground.start()
    if fault.seed % 2 == 0:
        attempt.wait_until("its job's log", lambda: ground.store.logs(ground.stages["train"].key))
        fault.hit = "when the train job is submitted"
    else:
        times = fault.dice.randint(1, 3)
        ground.wait_for_kept(attempt, "train", "checkpoint", times)
        fault.hit = f"train after {times} checkpoints"
    collected = ground.start(command=["-m", "raysd", "gc", "--store", ground.store_text, "--older-than", "0s", "--delete"])
    _expect(collected.wait() == 0, f"raysd gc failed: {collected.tail()}")
    left = [stage.name for stage in other if ground.home.list(stage.key.prefix)]
    _expect(not left, f"nobody needs it, and it is left: {', '.join(left)}")
    _expect(attempt.wait() == 0, f"the run did not end well: {attempt.tail()}")
    return ground


def s3(fault: Fault, what: tuple[str, ...], stage: str) -> Ground:
    """A server of S3 that fails some requests for a while: a share of them, or every one."""
    ground, proxy = fault.ground_on_s3(stage)
    skipped, length, share = fault.dice.randint(0, 25), fault.dice.randint(5, 40), fault.dice.choice([0.3, 0.6, 1.0])
    seen = 0

    def plan(method: str, path: str) -> str | None:
        nonlocal seen
        seen += 1
        return fault.dice.choice(what) if skipped < seen <= skipped + length and fault.dice.random() < share else None

    proxy.plan = plan
    attempt = ground.start()
    code = attempt.wait()
    _expect(code in (0, 75), f"exit code {code}: {attempt.tail()}")
    proxy.plan = None
    done = ", ".join(f"{n} x {name}" for name, n in proxy.done.items() if name != "ok")
    fault.hit = f"{done or 'nothing'} of {sum(proxy.done.values())} requests of {stage} (exit code {code})"
    return ground


def fill_disk(fault: Fault, stage: str) -> Ground:
    """The store's disk is full from some moment on, until somebody makes room."""
    ground, leave = fault.ground_on_small_disk(stage)
    attempt = ground.start()
    line, times = {"capture": ("kept shard", fault.dice.randint(1, 3)), "train": ("kept checkpoint", fault.dice.randint(1, 3)), "report": ("starting", 1)}[stage]
    attempt.wait_for(line, times)
    free_bytes = fault.dice.randrange(0, 1 << 14)
    fault.hit = f"the disk of {stage} full but for {free_bytes} bytes after `{line}` x {times}"
    leave(free_bytes)
    code = attempt.wait()
    leave(None)
    _expect(code != 0, f"it ended well on a full disk: {attempt.tail()}")
    _expect(re.search("disk is full|No space left|cannot be written", attempt.text()) is not None, f"the error does not tell of the disk: {attempt.tail()}")
    return ground


def damage_piece(fault: Fault, stage: str, flip: bool) -> Ground:
    """A piece of unfinished work is cut short, or has a byte that flipped; it must be made again, and no other."""
    ground = fault.ground(stage)
    attempt = ground.start()
    part = {"capture": "kept shard", "train": "kept checkpoint", "sweep": "kept cells"}[stage]
    times = fault.dice.randint(2, 4)
    attempt.wait_for(part, times)
    attempt.kill()
    wanted = part.removeprefix("kept ")
    piece, key = fault.dice.choice(sorted((name, key) for name, key in ground.whole_pieces(stage).items() if name.startswith(wanted)))
    fault.hit = f"{stage}: {piece}, {_damage(fault, ground.home.local(key), flip)}"
    ground.damaged.add(piece)
    ground.finish()
    _expect(f"damaged: {piece}" in ground.attempts[-1].text(), "the damage was not told")
    return ground


def damage_artifact(fault: Fault, stage: str, flip: bool, record: bool = False) -> Ground:
    """A file of a finished artifact, or its record, is cut short or has a bit that flipped: whoever reads it must refuse it and name the file."""
    reader = {"train": "quantize", "report": None}[stage]
    ground = fault.ground(*filter(None, [reader]))
    key = ground.stages[stage].key
    made = ground.store.record(key)
    name = NAME if record else fault.dice.choice(sorted(name for name, entry in made.files.items() if entry.size_bytes))
    fault.hit = f"{stage}: {name}, {_damage(fault, ground.store.folder(key) / ('' if record else made.folder) / name, flip)}"
    attempt = ground.start(reader) if reader else ground.raysd("report")
    _expect(attempt.wait() != 0, f"a damaged {name} was read as if it were good: {attempt.tail()}")
    _expect(name in attempt.text(), f"the error does not name {name}: {attempt.tail()}")
    _expect(reader is None or missing(ground, reader), "there is a result of damaged input")
    told = re.search(r"delete (/\S+)", attempt.text())
    _expect(told is None or Path(told[1].rstrip(";,.")) == ground.store.folder(key), f"the error tells to {told and told[0]}")
    shutil.rmtree(ground.store.folder(key))
    ground.names.insert(0, stage)
    return ground


def skew_clock(fault: Fault) -> Ground:
    """One of two machines has a clock that is an hour off: the second must not take the living first one for stale."""
    ground = fault.ground("train")
    skew_s = fault.dice.choice([-SKEW_S, SKEW_S])
    arguments = ["--experiment", str(ground.spec), "--store", ground.store_text]
    skewed = ["-m", "tests.faults.skewed_job", str(skew_s), "train", *arguments]
    first_is_skewed = fault.dice.random() < 0.5
    first = ground.start(command=skewed if first_is_skewed else None)
    first.wait_until("its lease", lambda: ground.leases("train"))
    second = ground.start(command=None if first_is_skewed else skewed)
    fault.hit = f"the {'first' if first_is_skewed else 'second'} of two has a clock {skew_s / 3600:+g} h off"
    _expect(second.wait() == 75, f"the second did not say to try again: {second.tail()}")
    _expect(first.wait() == 0, f"the first did not end well: {first.tail()}")
    _expect(ground.leases("train") == [1], f"leases {ground.leases('train')}: the living owner was taken over")
    return ground


def pause_owner(fault: Fault) -> Ground:
    """An owner that is stopped for so long that its lease goes stale; when it wakes, somebody else has the stage, and it must not publish."""
    ground = fault.ground("train")
    first = ground.start()
    _wait_for_moment(fault, first, "train", last="kept checkpoint")
    os.kill(first.process.pid, signal.SIGSTOP)
    _age_lease(ground, "train", 2 * STALE_S)
    second = ground.start()
    early = fault.dice.random() < 0.5
    if early:
        second.wait_for("training", 1)
        os.kill(first.process.pid, signal.SIGCONT)
    _expect(second.wait() == 0, f"the second did not end well: {second.tail()}")
    published = _artifact(ground, "train")
    os.kill(first.process.pid, signal.SIGCONT)
    fault.hit += f", woken {'while the second works' if early else 'when the second has ended'}"
    _expect_a_follower(first)
    _expect(_artifact(ground, "train") == published, "the first wrote into the artifact of the second")
    _expect(ground.leases("train") == [1, 2], f"leases {ground.leases('train')}")
    return ground


def hang_publishing(fault: Fault) -> Ground:
    """An owner that hangs between two files that it publishes, or right before its record, until somebody else has made and published the artifact."""
    ground, file = fault.ground("train"), r".*/files-[0-9a-f]{12}/.*"
    first = _hanging(fault, ground, "train", *[("put_file", file, fault.dice.randint(1, 4)), ("create", r".*/record\.json", 1)][fault.seed % 2])
    second = ground.start()
    _expect(second.wait() == 0, f"the second did not end well: {second.tail()}")
    published = _artifact(ground, "train")
    os.kill(first.process.pid, signal.SIGCONT)
    _expect_a_follower(first)
    _expect(_artifact(ground, "train") == published, "the first wrote into the artifact of the second")
    return ground


def hang_keeping(fault: Fault) -> Ground:
    """An owner that hangs before it has moved a checkpoint, or before it has written its checksum, until somebody else has kept later ones."""
    ground, times = fault.ground("train"), fault.dice.randint(1, 3)
    checkpoint = r".*/work/(.*/)?checkpoint[^/]*"
    first = _hanging(fault, ground, "train", *[("put", rf"{checkpoint}\.sum", times), ("put_file", checkpoint, times)][fault.seed % 2])
    second = ground.start()
    second.wait_for("kept checkpoint", 3)  # there are two names: each has been kept once by now, at least
    os.kill(first.process.pid, signal.SIGCONT)
    _expect_a_follower(first)
    second.kill()
    keys = {entry.key for entry in ground.home.list(f"{ground.prefix('train')}work/")}
    spoiled = [key for key in keys if f"{key}.sum" in keys and not ground.is_whole(key)]
    _expect(not spoiled, f"the first spoiled what the second kept: {', '.join(spoiled)}")
    return ground


def clear_scratch(fault: Fault) -> Ground:
    """An owner that hangs before it keeps a shard, until its successor has cleared its folder with that shard in it."""
    ground = fault.ground("capture")
    first = _hanging(fault, ground, "capture", "put_file", r".*/work/.*shard[^/]*", fault.dice.randint(1, 4))
    engines = first.find("raysd.backends.capture_worker")
    second = ground.start()
    second.wait_until("the first's folder is gone", lambda: not ground.home.local(f"{ground.prefix('capture')}work/attempt-1").exists())
    os.kill(first.process.pid, signal.SIGCONT)
    _expect_a_follower(first)
    _, left = psutil.wait_procs(engines, ENGINE_END_S)
    _expect(engines and not any(_is_alive(engine) for engine in left), f"the first left engines, or had none: {engines}")
    _expect(second.wait() == 0, f"the second did not end well: {second.tail()}")
    return ground


def run_twice(fault: Fault) -> Ground:
    """Two scripts, or two `raysd run` on one cluster, begun at once: one works; the other follows, or says to try again."""
    runs = fault.dice.random() < 0.5
    ground = fault.ground_on_nodes("report") if runs else fault.ground("train")
    first = ground.start()
    time.sleep(fault.dice.uniform(0, 1.0))
    second = ground.start()
    codes = sorted([first.wait(), second.wait()])
    fault.hit = f"{'two `raysd run` of report on one cluster' if runs else 'two scripts of train'} (exit codes {codes})"
    _expect(codes == [0, 0] if runs else codes in ([0, 75], [0, 0]), f"exit codes {codes}: {first.tail()} || {second.tail()}")
    stage = ground.names[0]
    _expect(ground.leases(stage) == [1], f"leases {ground.leases(stage)}: two worked on it")
    return ground


KINDS: dict[str, Callable[[Fault], Ground]] = {
    **{f"kill_{stage}": partial(kill_job, stage=stage) for stage in ("capture", "train", "quantize", "sweep", "report")},
    **{f"kill_{stage}_engine": partial(kill_engine, stage=stage) for stage in ("capture", "train", "sweep")},
    "kill_runner": kill_runner,
    "kill_driver": kill_driver,
    "kill_raylet": kill_raylet,
    "stop": stop,
    "stop_waiting": stop_waiting,
    **{f"s3_{what}": partial(s3, what=(what,), stage="report") for what in ("500", "503", "slow", "reset", "lost", "cut")},
    "s3_train": partial(s3, what=("500", "503", "slow", "reset", "lost", "cut"), stage="train"),
    **{f"disk_full_{stage}": partial(fill_disk, stage=stage) for stage in ("capture", "train", "report")},
    "truncated_shard": partial(damage_piece, stage="capture", flip=False),
    "flipped_shard": partial(damage_piece, stage="capture", flip=True),
    "truncated_checkpoint": partial(damage_piece, stage="train", flip=False),
    "flipped_checkpoint": partial(damage_piece, stage="train", flip=True),
    "truncated_draft": partial(damage_artifact, stage="train", flip=False),
    "flipped_draft": partial(damage_artifact, stage="train", flip=True),
    "truncated_report": partial(damage_artifact, stage="report", flip=False),
    "flipped_report": partial(damage_artifact, stage="report", flip=True),
    "flipped_record": partial(damage_artifact, stage="report", flip=True, record=True),
    "clock": skew_clock,
    "paused_owner": pause_owner,
    "hung_publishing": hang_publishing,
    "hung_keeping": hang_keeping,
    "cleared_scratch": clear_scratch,
    "spoiled_lease": spoil_lease,
    "gc_meanwhile": collect_garbage,
    "two_at_once": run_twice,
}
"""Name to what happens."""


def _wait_for_moment(fault: Fault, attempt: Attempt, stage: str, last: str = "") -> None:
    line, times = fault.dice.choice([moment for moment in MOMENTS[stage] if moment[0].startswith(last)])
    pause_s = fault.dice.uniform(0, PAUSE_S)
    attempt.wait_for(line, times)
    time.sleep(pause_s)
    fault.hit = f"{stage} {pause_s:.2f} s after `{line}` x {times}"


def _train_on_nodes(fault: Fault) -> tuple[Ground, Attempt, psutil.Process]:
    """A run of train on the cluster, after some checkpoints; the job's driver."""
    ground = fault.ground_on_nodes("train")
    attempt = ground.start()
    ground.wait_for_kept(attempt, "train", "checkpoint", fault.dice.randint(1, 3))
    return ground, attempt, psutil.Process(ground.store.lease(ground.stages["train"].key).lease.process.pid)


def _hanging(fault: Fault, ground: Ground, stage: str, method: str, pattern: str, times: int) -> Attempt:
    """An attempt that hangs before a call of its home's, as tests/faults/hanging_job.py says, and has not been heard of for longer than STALE_S."""
    fault.hit = f"{stage} before `{method}` of {pattern} x {times}"
    arguments = ["--experiment", str(ground.spec), "--store", ground.store_text]
    attempt = ground.start(command=["-m", "tests.faults.hanging_job", method, pattern, str(times), stage, *arguments])
    attempt.wait_until("it hangs", lambda: psutil.Process(attempt.process.pid).status() == psutil.STATUS_STOPPED)
    _age_lease(ground, stage, 2 * STALE_S)
    return attempt


def _age_lease(ground: Ground, stage: str, age_s: float) -> None:
    """Makes the first lease of a stage look as if it had been written so long ago: waiting would cost as much time."""
    written_s = time.time() - age_s
    os.utime(ground.home.local(lease_key(ground.prefix(stage), 1)), (written_s, written_s))


def _artifact(ground: Ground, stage: str) -> dict[str, tuple[float, bytes | None]]:
    """All files of an artifact but logs and leases, and when each was written."""
    prefix = ground.prefix(stage)
    return {entry.key: (entry.modified_s, ground.home.get(entry.key)) for entry in ground.home.list(prefix)
            if not entry.key.removeprefix(prefix).startswith(("lease-", "job-"))}


def _expect_a_follower(attempt: Attempt) -> None:
    """An attempt that has lost its lease ends and says so; `raysd run` then follows the other."""
    code = attempt.wait()
    _expect(code == 75 and "ended on an unexpected error" not in attempt.text(), f"it did not end as a follower, but with exit code {code}: {attempt.tail()}")


def _damage(fault: Fault, path: Path, flip: bool) -> str:
    content = bytearray(path.read_bytes())
    place = fault.dice.randrange(len(content))
    if flip:
        content[place] ^= 1 << fault.dice.randrange(8)
        path.write_bytes(content)
        return f"a bit of byte {place} flipped"
    path.write_bytes(content[:place])
    return f"cut to {place} of {len(content)} bytes"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _expect(promise: bool, otherwise: str) -> None:
    if not promise:
        raise NotRecovered(otherwise)


