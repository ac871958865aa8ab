"""The `raysd` command: parse, call one function, print. Results go to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from raysd import __version__
from raysd.errors import ArtifactError, ExperimentError, RaysdError

if TYPE_CHECKING:
    from raysd.artifacts import LocalStore
    from raysd.experiment import Experiment
    from raysd.pipeline.plan import PlannedStage
    from raysd.pipeline.runner import Display, JobClient

USAGE_EXIT = 64
EXIT_CODES = "exit codes: 0 done, 1 failed, 64 wrong configuration, 75 try again"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    return _guarded(lambda: args.command(args), args.debug)


def run_here(arguments: list[str] | None = None) -> int:
    """`jobs/pipeline.py`: the whole chain from inside a Ray job, on the cluster that the job runs in."""
    parser = _Parser(prog="jobs/pipeline.py", description="Runs a whole experiment from inside a Ray job, each stage as a job of its own.")
    parser.add_argument("--experiment", dest="spec", required=True, type=Path, help="the experiment file")
    parser.add_argument("--store", type=Path, help="folder of the artifacts; default: the experiment's `store`")
    args = parser.parse_args(arguments, argparse.Namespace(address="auto", json=False))
    return _guarded(lambda: _run(args), debug=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="raysd", description="Makes a target model decode faster with a trained draft, and measures that it does.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"raysd {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        made.set_defaults(command=command)
        made.add_argument("spec", metavar="SPEC", type=Path, help="the experiment file, for instance jobs/smollm2-cpu.yaml")
        made.add_argument("--store", type=Path, help="folder of the artifacts; default: the experiment's `store`")
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    run = verb("run", _run, "Runs the stages of an experiment that are not done yet, each as one Ray job.")
    run.add_argument("--address", help="job server of a running Ray cluster, http://HOST:8265; default: a local Ray for this run only")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan = verb("plan", _plan, "Shows what `run` would do, and why; changes nothing.")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verb("report", _report, "Prints the path of the report of a finished run.")
    return parser


def _guarded(command: Callable[[], int], debug: bool) -> int:
    """A command's exit code; an error becomes one message, after its traceback if asked for."""
    from raysd.pipeline.signals import Terminated

    try:
        return command()
    except BaseException as err:
        notes = getattr(err, "__notes__", [])
        if debug:
            traceback.print_exc()
        if isinstance(err, Terminated):
            message, exit_code = f"stopped by {err}; `raysd run` goes on from the finished stages", 128 + err.number
        elif isinstance(err, KeyboardInterrupt):
            message, exit_code = "interrupted; `raysd run` goes on from the finished stages", 130
        elif isinstance(err, RaysdError):
            message, exit_code = f"error: {err}", err.exit_code
        elif isinstance(err, BrokenPipeError):
            return 1  # whoever read the output has gone: there is nobody to tell
        elif isinstance(err, Exception):
            message = f"error: unexpected {type(err).__name__}: {err}\n  fix:   run it again with --debug and report the traceback"
            exit_code = 1
        else:
            raise
    print("\n  note:  ".join([message, *notes]), file=sys.stderr)
    return exit_code


def _run(args: argparse.Namespace) -> int:
    from raysd.pipeline import preflight
    from raysd.pipeline.display import open_display
    from raysd.pipeline.runner import run_stages
    from raysd.pipeline.signals import raise_when_terminated
    from raysd.pipeline.summary import render, summarize

    raise_when_terminated()
    started = time.monotonic()
    experiment, store, planned = _planned(args)
    preflight.check_store(store, experiment, planned)
    with _naming(args.spec):
        preflight.check_prompts(experiment, planned)
        if args.address is None:
            preflight.check_local_resources(experiment, planned)
    with open_display(sys.stderr) as display:
        outcome = run_stages(planned, store, _connect(args.address, experiment, store, display), display)
    summary = summarize(experiment.name, outcome, store, time.monotonic() - started)
    print(json.dumps(summary, indent=1) if args.json else render(summary), flush=True)
    if outcome.error is not None:
        raise outcome.error
    return 0


def _plan(args: argparse.Namespace) -> int:
    from raysd.pipeline.summary import table

    experiment, _, planned = _planned(args)
    if args.json:
        print(json.dumps({"experiment": experiment.name, "stages": [entry.as_json() for entry in planned]}, indent=1))
    else:
        print("\n".join(table([[entry.stage.name, entry.stage.fingerprint[:8], entry.state, entry.why] for entry in planned])))
    return 0


def _report(args: argparse.Namespace) -> int:
    from raysd.pipeline.summary import REPORT

    _, store, planned = _planned(args)
    report = planned[-1]
    if report.state != "cached":
        raise ArtifactError(
            what=f"there is no report of this experiment yet ({report.why})",
            where=store.folder(report.stage.key),
            fix=f"raysd run {args.spec}",
        )
    print(store.open(report.stage.key) / REPORT)
    return 0


def _planned(args: argparse.Namespace) -> tuple[Experiment, LocalStore, list[PlannedStage]]:
    """The experiment, its store, and what is to become of each stage."""
    from raysd.artifacts import LocalStore
    from raysd.experiment import load_experiment
    from raysd.pipeline.plan import plan
    from raysd.pipeline.preflight import check_experiment, stages_of

    experiment = load_experiment(args.spec)
    with _naming(args.spec):
        stages = stages_of(experiment)
        check_experiment(experiment)
    if args.store is not None and ":/" in str(args.store):
        raise ExperimentError(what=f"{args.store} is not a folder", where="--store", fix="name a folder that all nodes share; this version keeps artifacts in folders")
    store = LocalStore(args.store.resolve() if args.store else Path(experiment.store))
    return experiment, store, plan(stages, store)


@contextmanager
def _naming(spec: Path) -> Iterator[None]:
    """Puts the experiment file into an error that names only its field."""
    from raysd.pipeline.preflight import name_the_file

    try:
        yield
    except RaysdError as err:
        raise name_the_file(err, spec) from err


def _connect(
    address: str | None, experiment: Experiment, store: LocalStore, display: Display
) -> Callable[[], AbstractContextManager[JobClient]]:
    """How the runner comes by a cluster: the one at an address, or a Ray of its own."""

    @contextmanager
    def connect() -> Iterator[JobClient]:
        from raysd.backends.ray_jobs import connect_jobs

        if address is not None:
            with connect_jobs(address, experiment, store.root) as client:
                yield client
            return
        from raysd.backends.local_ray import local_ray

        display.note("starting a local Ray")
        with local_ray() as own_address, connect_jobs(own_address, experiment, store.root) as client:
            yield client
            display.note("stopping the local Ray")

    return connect
