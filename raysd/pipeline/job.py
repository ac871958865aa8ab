"""One stage inside one Ray job: opens its inputs, runs its function, publishes what came out. `jobs/*.py` call `main`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import raysd
from raysd.arguments import Parser, positive
from raysd.artifacts import Record, Store, describe_files
from raysd.artifacts.lease import Clock, HeldLease, utc_now
from raysd.artifacts.stage import Kept, Progress, StageFunction, StageRun, Stored
from raysd.errors import ArtifactError, ExperimentError, RaysdError, StageError
from raysd.experiment import load_experiment
from raysd.hardware.host import host_facts, package_versions
from raysd.pipeline.disk import check_disk
from raysd.pipeline.display import describe
from raysd.pipeline.events import EventProgress, write_error
from raysd.pipeline.preflight import Chain, chain_of, check_same_target, need_bytes, resolve
from raysd.pipeline.stages import Stage
from raysd.signals import Terminated, raise_when_terminated, whole

StageFunctions = Mapping[str, StageFunction]


@dataclass(frozen=True)
class Edges:
    """What a job needs of the outside: `raysd.backends.stages.edges`."""

    functions: StageFunctions
    """Stage name to its function."""
    open_store: Callable[[str], Store]
    """The store of a `--store` text."""


def main(stage: str, edges: Callable[[], Edges], arguments: list[str] | None = None, clock: Clock = utc_now) -> int:
    """Runs one stage; returns the exit code: 0 done or there already, 1 failed, 64 wrong configuration, 75 try again, 130 Ctrl-C.

    edges: called once the experiment has been read.
    """
    parser = Parser(
        prog=f"jobs/{stage}.py", description=f"Runs the stage {stage} of an experiment and publishes its artifact."
    )
    parser.add_argument("--experiment", required=True, type=Path, help="the experiment file")
    parser.add_argument("--store", help="the artifacts' folder or s3://BUCKET/PREFIX; default: the experiment's `store`")
    parser.add_argument("--attempt", type=positive, help="for a runner: the number of this attempt; default: how often the stage was begun")
    args = parser.parse_args(arguments)
    raise_when_terminated()
    lift_thread_limit(os.environ)
    try:
        chain = chain_of(load_experiment(args.experiment))
        wanted, outside = _stage_named(stage, chain.stages, args.experiment), edges()
        store = outside.open_store(chain.experiment.store if args.store is None else args.store)
        if args.attempt is not None:
            check_shared(store, wanted, args.attempt)
        elif submission_id(os.environ):
            check_outlasts(store)
        made = run_stage(wanted, chain, store, outside.functions[stage], args.attempt, clock)
        print(f"{stage} is done: {made}" if made else f"{stage} is there already: nothing to do", flush=True)
        return 0
    except RaysdError as err:
        return _told(err)
    except Terminated as err:
        return _told(
            StageError(what=f"the stage was stopped by {err}", where=f"stage {stage}", fix="run again to go on from its unfinished work")
        )
    except KeyboardInterrupt:
        print("interrupted; run again to go on from its unfinished work", file=sys.stderr, flush=True)
        return 130
    except Exception as err:
        traceback.print_exc()
        last = " ".join(traceback.format_exception_only(err)[-1].split())
        if "No space left on device" in last:
            return _told(
                ArtifactError(
                    what=f"the disk is full: {last}", where=f"stage {stage}", fix="free disk space, or name another folder in `store:`"
                )
            )
        return _told(
            StageError(
                what=f"the stage {stage} ended on an unexpected error: {last}", where=f"stage {stage}", fix="its log holds the traceback"
            )
        )


def run_stage(stage: Stage, chain: Chain, store: Store, function: StageFunction, attempt: int | None, clock: Clock = utc_now) -> str | None:
    """Runs a stage of a chain and publishes its artifact; returns its place, or None if it was there already.

    Raises what the function raises; LeaseHeldError if somebody else works on it, ArtifactError for an input that is absent or damaged and for a disk
    that is too small, ExperimentError if the experiment's name stands for another target, or if the target or a finished draft was changed meanwhile.
    """
    experiment = chain.experiment
    if store.record(stage.key) is not None:
        return None
    if attempt is None:
        resolve(chain.stages, store, clock)  # by hand; otherwise its runner has done so
    else:
        check_same_target(chain.stages, store)
    with store.work_on(stage.key, stage.identity["inputs"], submission_id(os.environ), clock) as work:
        if store.record(stage.key) is not None:
            return None  # published between the question and the lease
        progress = _progress_of(work.held)
        progress("checking the inputs")
        inputs = {key.stage: store.open(key, progress) for key in stage.input_keys()}
        out = work.clear()
        check_disk(work.scratch, need_bytes([stage.name], experiment), f"the stage {stage.name}")
        progress("starting")
        started, begun = clock(), time.monotonic()
        metrics = function(StageRun(experiment=experiment, prompts=chain.prompts, inputs=inputs, pieces=_TruePieces(work.pieces, chain), work=work.scratch,
                                    out=out, progress=progress, whole=whole,
                                    elsewhere={key.stage: Stored(store.uri, key) for key in stage.input_keys()} if store.home.remote else {}))
        elapsed_s = time.monotonic() - begun
        chain.check_unchanged()
        progress("publishing")
        record = Record(
            experiment=experiment.name,
            stage=stage.name,
            fingerprint=stage.fingerprint,
            identity=stage.identity,
            section=experiment.model_dump(mode="json"),
            code_version=raysd.__version__,
            packages=package_versions(),
            host=host_facts(),
            metrics=metrics,
            started=started.isoformat(timespec="seconds"),
            ended=clock().isoformat(timespec="seconds"),
            elapsed_s=round(elapsed_s, 3),
            attempt=work.held.lease.number if attempt is None else attempt,
            folder=work.folder,
            files=describe_files(out),
        )
        work.publish(out, record, progress)
        return store.place(stage.key)


class _TruePieces:
    """Pieces that are kept only while the stage reads what its fingerprint says: an attempt that is killed, whenever that is, leaves none that is made
    of anything else."""

    def __init__(self, pieces: Kept, chain: Chain) -> None:
        self._pieces, self._chain = pieces, chain

    def keep(self, name: str, path: Path) -> Path:
        self._chain.check_unchanged()
        return self._pieces.keep(name, path)

    def find(self, name: str) -> Path | None:
        return self._pieces.find(name)


def check_shared(store: Store, stage: Stage, attempt: int) -> None:
    """Raises ExperimentError if this node does not see the log that the runner keeps of this very attempt: then the store is a folder that the two do
    not share, and the artifact would be where nobody looks for it."""
    if attempt not in store.logs(stage.key):
        raise ExperimentError(
            what=f"the node {platform.node()} does not see the log that the runner keeps of {stage.name} {stage.fingerprint[:12]} in the store",
            where=f"store: {store.uri}",
            fix="name a folder on a file system that this machine and all nodes share, or s3://BUCKET/PREFIX; if the prompts, the target or the draft were "
            "changed since the run began, run again; by hand, leave --attempt out",
        )


def check_outlasts(store: Store) -> None:
    """Raises ExperimentError if the store is a folder within the job's working directory, of which Ray makes a copy for each job and deletes it after."""
    if not store.home.remote and store.home.local().is_relative_to(Path.cwd().resolve()):
        raise ExperimentError(
            what="the store lies within the job's working directory, which Ray deletes after the job",
            where=f"store: {store.uri}",
            fix="name a folder that all nodes share, by its absolute path, or s3://BUCKET/PREFIX, with --store",
        )


def submission_id(environment: Mapping[str, str]) -> str:
    """The id of the Ray job that this process is the driver of; empty outside of one."""
    job = json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return job.get("metadata", {}).get("job_submission_id", "")


def _progress_of(held: HeldLease) -> Progress:
    """Tells the runner and the lease what the stage does, and ends the stage if the lease is lost."""
    tell = EventProgress()

    def progress(doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
        held.check()
        held.doing = describe(doing, done, total, unit, figures)
        tell(doing, done, total, unit, **figures)

    return progress


def lift_thread_limit(environment: MutableMapping[str, str]) -> None:
    """Takes out OMP_NUM_THREADS=1 in a Ray job, unless the job's runtime environment asks for it.

    Ray sets it for every process that reserves no CPU core, as a job's does by default, and torch would then train on a single core.
    """
    job = environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if job is not None and environment.get("OMP_NUM_THREADS") == "1":
        asked = json.loads(job).get("runtime_env", {}).get("env_vars", {})
        if "OMP_NUM_THREADS" not in asked:
            del environment["OMP_NUM_THREADS"]


def _told(error: RaysdError) -> int:
    write_error(error, sys.stdout)
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _stage_named(name: str, stages: list[Stage], experiment: Path) -> Stage:
    for stage in stages:
        if stage.name == name:
            return stage
    raise ExperimentError(
        what=f"the experiment has no stage {name}",
        where=experiment,
        fix=f"add the section `{name}:`, or run one of: {', '.join(stage.name for stage in stages)}",
    )
