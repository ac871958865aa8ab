"""The `raysd` command: parse, call one function, print. Results go to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raysd import __version__
from raysd.arguments import Parser, positive
from raysd.errors import ArtifactError, DamagedError, ExperimentError, RaysdError

if TYPE_CHECKING:
    from raysd.artifacts import Store
    from raysd.checks.facts import Facts
    from raysd.experiment import Experiment
    from raysd.pipeline.plan import PlannedStage
    from raysd.pipeline.runner import Display, JobClient
    from raysd.report.sides import Side

LOG_POLL_S = 1.0
LOCAL_JOB_SERVER = "http://127.0.0.1:8265"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
STORE_HELP = "the artifacts' folder, or s3://BUCKET/PREFIX[?endpoint_url=URL&region=NAME&addressing_style=path]; default: the experiment's `store`"
GOES_ON = "; `raysd run` goes on from there"
EXIT_CODES = "exit codes: 0 done, 1 failed, 64 wrong configuration, 75 try again, 128 + N ended by signal N (130: Ctrl-C)"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    return _guarded(lambda: args.command(args), args.debug, args.if_stopped)


def run_here(arguments: list[str] | None = None) -> int:
    """`jobs/pipeline.py`: the whole chain from inside a Ray job, on the cluster that the job runs in."""
    parser = Parser(prog="jobs/pipeline.py", description="Runs a whole experiment from inside a Ray job, each stage as a job of its own.")
    parser.add_argument("--experiment", dest="spec", required=True, type=Path, help="the experiment file")
    parser.add_argument("--store", help=STORE_HELP)
    args = parser.parse_args(arguments, argparse.Namespace(address="auto", json=False))
    return _guarded(lambda: _run(args), debug=False, if_stopped=GOES_ON)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="raysd", description="Makes a target model decode faster with a trained draft, and measures that it does.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"raysd {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        made.set_defaults(command=command, if_stopped="")
        made.add_argument("--store", help=STORE_HELP)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    def of_experiment(made: argparse.ArgumentParser, required: bool = True) -> argparse.ArgumentParser:
        made.add_argument("spec", metavar="SPEC", type=Path, nargs=None if required else "?", help="the experiment file, for instance jobs/smollm2-cpu.yaml")
        return made

    def as_json(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.add_argument("--json", action="store_true", help="print JSON instead of text")
        return made

    run = as_json(of_experiment(verb("run", _run, "Runs the stages of an experiment that are not done yet, each as one Ray job.")))
    run.set_defaults(if_stopped=GOES_ON)
    run.add_argument("--address", help="job server of a running Ray cluster, http://HOST:8265; default: a local Ray for this run only")
    as_json(of_experiment(verb("plan", _plan, "Shows what `run` would do, and why; changes nothing.")))
    report = as_json(verb("report", _report, "Prints the path of the report of a finished run; or compares two finished sweeps, B against A, cell by cell."))
    report.add_argument("spec", metavar="SPEC", type=Path, help="the experiment file; or A: an experiment file, or the folder of a sweep's artifact or of its Parquet files")
    report.add_argument("other", metavar="B", type=Path, nargs="?", help="as A")
    report.add_argument("--output", metavar="FOLDER", type=Path, help="write the report's files, or the comparison, into this folder, too")
    report.add_argument("--across", metavar="CONDITION", action="append", default=[], help="a condition that A and B are meant to differ in, for instance vllm or hardware; may be repeated")
    report.add_argument("--inferencex", metavar="FOLDER", type=Path, help="write the sweep's cells into this folder as InferenceX has them, raw and agg_; SPEC may then be a sweep's folder")
    advice = as_json(verb("recommend", _recommend, "Reads a finished sweep and says how its winning arm is to be served: requests of a replica, replicas, delays, and how "
                          "many tokens are drafted at which batch size, each with the cells that it was taken from."))
    advice.add_argument("spec", metavar="SPEC", type=Path, help="the experiment file; or the folder of a sweep's artifact or of its Parquet files")
    advice.add_argument("--arm", choices=("none", "bf16", "fp8"), help="default: the one with the most output tok/s")
    advice.add_argument("--workload", metavar="NAME", help="default: the only one that the sweep has")
    advice.add_argument("--peak", type=positive, metavar="N", help="requests in flight at the highest load; decides max_replicas")
    advice.add_argument("--trough", type=positive, metavar="N", help="at the lowest load; decides min_replicas")
    advice.add_argument("--tpot-ms", type=float, metavar="MS", help="the slowest that tokens may follow each other, at the median; limits target_ongoing_requests")
    serve = of_experiment(verb("serve", _serve, "Serves an arm of an experiment with Ray Serve, on a Ray of its own until it is stopped, or on a running cluster."))
    serve.add_argument("--arm", choices=("none", "bf16", "fp8"), help="default: serve.arm of the experiment, else fp8, bf16 or none, the first that the sweep has")
    serve.add_argument("--dry-run", action="store_true", help="print the Serve config file, as `serve deploy` and a RayService take it, and deploy nothing")
    serve.add_argument("--address", help="dashboard of a running Ray cluster, http://HOST:8265; default: a local Ray, until Ctrl-C or SIGTERM")
    status = as_json(of_experiment(verb("status", _status, "Shows what is in a store, and who works on it."), required=False))
    status.add_argument("--all", action="store_true", help="show every artifact, not only the newest of each stage (--json always does)")
    logs = of_experiment(verb("logs", _logs, "Prints the log of a stage's job: the one written last, or that of the stage named."))
    logs.add_argument("stage", metavar="STAGE", nargs="?", help="capture, train, quantize, sweep or report")
    logs.add_argument("--attempt", type=positive, help="default: the newest")
    logs.add_argument("--follow", action="store_true", help="go on while the stage runs")
    of_experiment(verb("stop", _stop, "Stops whoever runs an experiment, and its stage that runs, wherever that is; with --store alone those of the whole store."), required=False)
    gc = as_json(verb("gc", _gc, "Shows what the store could do without, and with --delete deletes it. Kept is what each name stands for since its "
                                 "newest run, and all that somebody who runs makes or reads."))
    gc.add_argument("--older-than", default="30d", metavar="AGE", help="only what was not written for so long: 30d, 12h, 0s; default: %(default)s")
    gc.add_argument("--delete", action="store_true", help="delete it; without this, nothing is changed")
    _add_doctor(verbs)
    _add_bench(verbs)
    return parser


def _add_doctor(verbs: argparse._SubParsersAction) -> None:
    text = "Says what is wrong with an experiment before a GPU is touched: with its file, and with the machines. Exits 64 if anything is an error."
    made = verbs.add_parser("doctor", help=text, description=text, epilog=EXIT_CODES)
    made.set_defaults(command=_doctor, if_stopped="")
    made.add_argument("spec", metavar="SPEC", type=Path, nargs="?", help="the experiment file, for instance jobs/kimi-k2.5-mi355x.yaml")
    made.add_argument("--vllm", metavar="VERSION", help="check against this version of vLLM; default: hardware.vllm, and without it the installed one")
    made.add_argument("--node", action="store_true", help="look at the machine that this runs on, too; with SPEC for what it needs")
    made.add_argument("--cluster", action="store_true", help="look at every node of a Ray cluster, too, by a task on each")
    made.add_argument("--address", help=f"with --cluster: job server of the cluster, http://HOST:8265; default: {LOCAL_JOB_SERVER}")
    made.add_argument("--list", action="store_true", help="list all checks")
    made.add_argument("--json", action="store_true", help="print JSON instead of text")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_bench(verbs: argparse._SubParsersAction) -> None:
    text = "Puts a load on an OpenAI-compatible server and tells TTFT, TPOT, E2EL and tokens a second; --selftest: on a server whose pace is known."
    made = verbs.add_parser("bench", help=text, description=text, epilog=EXIT_CODES)
    made.set_defaults(command=_bench, if_stopped="; a bench has results only at its end, and these are lost")
    made.add_argument("url", metavar="URL", nargs="?", help="the server, for instance http://127.0.0.1:8000")
    made.add_argument("--selftest", action="store_true", help="show that the load generator recovers what a server of known pace did, and what a chunk costs it")
    made.add_argument("--model", help="default: the only one that the server has")
    made.add_argument("--prompts", metavar="PATH", help="a file or folder of prompts (JSONL, ShareGPT, SPEED-Bench, Parquet, CSV), or hf:ORG/NAME; default: random words")
    made.add_argument("--isl", type=positive, help="words of a random prompt; default: 256")
    made.add_argument("--osl", type=positive, default=128, help="longest answer in tokens; default: %(default)s")
    made.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="of the API; default: %(default)s")
    made.add_argument("--requests", type=positive, help="default: ten for each in flight, a hundred at a rate; of --prompts each once at most")
    made.add_argument("--concurrency", type=positive, help="requests in flight at any moment; default: 8, unless there is a --rate")
    made.add_argument("--rate", type=float, help="requests a second, whether or not earlier ones have been answered")
    made.add_argument("--poisson", action="store_true", help="at a rate: independent arrivals instead of even ones")
    made.add_argument("--ramp", type=float, default=0.0, metavar="S", help="seconds until the concurrency or the rate is reached; default: at once")
    made.add_argument("--shards", type=positive, default=1, help="processes that share the load (Ray actors); default: %(default)s")
    made.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    made.add_argument("--ignore-eos", action="store_true", help="every answer runs to --osl; for servers that know it (vLLM, SGLang)")
    made.add_argument("--seed", type=int, help="of random prompts, Poisson arrivals and sampling; default: 0")
    made.add_argument("--plain", action="store_true", help="send only what every OpenAI-compatible server knows; chunks then do not tell how many tokens they carry")
    made.add_argument("--request-limit-s", type=float, metavar="S", help="the longest that one request may take; default: 900")
    made.add_argument("--silence-limit-s", type=float, metavar="S", help="the longest that the server may send no byte of an answer; default: 300, or the request's limit where that is less")
    made.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    made.add_argument("--output", type=Path, metavar="FOLDER", help="where to write bench.json and requests.jsonl")
    made.add_argument("--json", action="store_true", help="print JSON instead of text")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _guarded(command: Callable[[], int], debug: bool, if_stopped: str) -> int:
    """A command's exit code; an error becomes one message, after its traceback if asked for. if_stopped: what to add if a signal ended it."""
    from raysd.signals import Terminated

    try:
        return command()
    except BaseException as err:
        notes = getattr(err, "__notes__", [])
        if debug:
            traceback.print_exc()
        if isinstance(err, Terminated):
            message, exit_code = f"stopped by {err}{if_stopped}", 128 + err.number
        elif isinstance(err, KeyboardInterrupt):
            message, exit_code = f"interrupted{if_stopped}", 130
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
    from raysd.pipeline.plan import plan
    from raysd.pipeline.runner import blocked_error, run_stages
    from raysd.pipeline.summary import render, summarize
    from raysd.signals import raise_when_terminated

    raise_when_terminated()
    started = time.monotonic()
    experiment, store, planned = _planned(args)
    with _naming(args):
        preflight.check_same_target([entry.stage for entry in planned], store)
        preflight.check_store(store, experiment, planned)
        preflight.check_prompts(experiment, planned)
        if args.address is None:
            preflight.check_local_resources(experiment, planned)
    with open_display(sys.stderr) as display:
        if blocked_error(planned, store) is None and _resolve(planned, store, display):
            planned = plan([entry.stage for entry in planned], store)  # `raysd gc` may have taken what nothing stood for until now
        outcome = run_stages(planned, store, _connect(args.address, experiment, store, display), display)
    report = outcome.stages[-1]
    if report.state == "cached":
        store.open(report.stage.key)  # what is handed out is looked at as a stage would: whole, and not only its size
    summary = summarize(experiment.name, outcome, time.monotonic() - started)
    print(json.dumps(summary, indent=1) if args.json else render(summary), flush=True)
    if report.record is not None and outcome.error is None and os.environ.get(STEP_SUMMARY):
        _tell_job(store.open(report.stage.key) / "summary.md")
    if outcome.error is not None:
        raise outcome.error
    return 0


def _resolve(planned: list[PlannedStage], store: Store, display: Display) -> bool:
    """Makes the experiment's name stand for this plan; whether it did not before. Whoever may only read a store can still have what is in it."""
    from raysd.pipeline.preflight import resolve

    try:
        return resolve([entry.stage for entry in planned], store)
    except ArtifactError as err:
        if any(entry.state == "run" for entry in planned):
            raise
        display.note(f"`raysd gc` is not told that this is what {planned[0].stage.experiment} stands for now: {err.what}")
        return False


def _plan(args: argparse.Namespace) -> int:
    from raysd.pipeline.plan import PLAN_HEADER, block
    from raysd.pipeline.preflight import artifact_bytes, check_same_target
    from raysd.pipeline.runner import blocked_error
    from raysd.pipeline.summary import table

    experiment, store, planned = _planned(args)
    refusal: RaysdError | None = blocked_error(planned, store)
    try:
        with _naming(args):
            check_same_target([entry.stage for entry in planned], store)
    except (ExperimentError, DamagedError) as err:
        refusal, planned = err, block(planned, f"{err.what}; {err.fix}")
    expected = artifact_bytes([entry.stage.name for entry in planned], experiment)
    told = [(entry, experiment.hardware.of_stage(entry.stage.name), expected[entry.stage.name]) for entry in planned]
    if args.json:
        print(json.dumps({"experiment": experiment.name, "stages": [entry.as_json(*facts) for entry, *facts in told]}, indent=1), flush=True)
    else:
        print("\n".join(table([PLAN_HEADER, *(entry.as_row(*facts) for entry, *facts in told)])), flush=True)
    if refusal is not None:
        raise refusal
    return 0


def _report(args: argparse.Namespace) -> int:
    from raysd.pipeline.summary import REPORT

    named = [path for path in (args.spec, args.other) if path is not None]
    if args.store is not None and all(path.is_dir() for path in named):
        raise ExperimentError(what="--store has no effect: no experiment file is named, but folders", where="--store", fix="remove it, or name an experiment file")
    if args.other is not None:
        return _compare(args)
    if args.across:
        raise ExperimentError(what="--across has no effect without a second sweep to compare with", where="--across", fix="name two sweeps, or remove it")
    shown: dict[str, object] = {}
    if not args.spec.is_dir():
        store, planned = _of_report(args)
        folder = store.open(planned.stage.key)
        shown |= {"report": str(folder / REPORT), **planned.record.metrics}
        if args.output is not None:
            _copy(folder, args.output)
        _tell_job(folder / "summary.md")
    elif args.inferencex is None:
        raise ExperimentError(what="a folder is named, and nothing to do with it", where=args.spec,
                              fix="name the experiment file, or a second sweep to compare with, or --inferencex FOLDER")
    elif args.output is not None:
        raise ExperimentError(what="--output has no effect: the report is not in a sweep's folder", where="--output", fix="name the experiment file, or remove it")
    if args.inferencex is not None:
        from raysd.report.inferencex import write_inferencex

        written = write_inferencex(_side(args, args.spec), args.inferencex)
        shown["inferencex"] = [str(path) for path in written]
    if args.json:
        print(json.dumps(shown, indent=1), flush=True)
    else:
        print("\n".join([*([str(shown["report"])] if "report" in shown else []), *shown.get("inferencex", [])[-1:]]), flush=True)
    return 0


def _of_report(args: argparse.Namespace) -> tuple[Store, PlannedStage]:
    """The finished report of an experiment. Raises if there is none."""
    from raysd.pipeline.runner import blocked_error

    _, store, planned = _planned(args)
    report = planned[-1]
    if report.state == "blocked":
        raise blocked_error(planned, store)
    if report.state == "run":
        raise _not_yet(args, store, report, "report")
    return store, report


def _not_yet(args: argparse.Namespace, store: Store, entry: PlannedStage, what: str) -> ArtifactError:
    return ArtifactError(what=f"there is no {what} of this experiment yet ({entry.why})", where=store.place(entry.stage.key),
                         fix=f"raysd run {args.spec}" + ("" if args.store is None else f" --store {args.store}"))


def _compare(args: argparse.Namespace) -> int:
    from raysd.pipeline.summary import table
    from raysd.report.compare import as_json, compare
    from raysd.report.comparison import build_comparison, left_out, text_tables, write_comparison
    from raysd.report.markdown import render_markdown, without_pictures
    from raysd.report.sides import MUST_AGREE

    if args.inferencex is not None:
        raise ExperimentError(what="--inferencex is about one sweep, and two are named", where="--inferencex", fix="name one sweep, or remove it")
    if unknown := [name for name in args.across if name not in MUST_AGREE]:
        raise ExperimentError(what=f"there is no condition {unknown[0]}", where="--across", fix=f"use one of: {', '.join(MUST_AGREE)}")
    compared = compare(_side(args, args.spec), _side(args, args.other), args.across)
    document = build_comparison(compared)
    if args.output is not None:
        write_comparison(compared, document, args.output)
    if args.json:
        print(json.dumps(as_json(compared), indent=1), flush=True)
    else:
        parts = [document.headline, *document.warnings, *("\n".join(table(rows)) for rows in text_tables(compared)), *left_out(compared)]
        print("\n\n".join([*parts, *([str(args.output / "comparison.html")] if args.output is not None else [])]), flush=True)
    _append(render_markdown(without_pictures(document)))
    return 0


def _side(args: argparse.Namespace, named: Path) -> Side:
    """A finished sweep: of an experiment file, or in a folder."""
    from raysd.pipeline.runner import blocked_error
    from raysd.report.sides import read_side

    if named.is_dir():
        return read_side(str(named), named)
    of_this = argparse.Namespace(**{**vars(args), "spec": named})
    _, store, planned = _planned(of_this)
    sweep = next(entry for entry in planned if entry.stage.name == "sweep")
    if sweep.state == "blocked":
        raise blocked_error(planned, store)
    if sweep.state == "run":
        raise _not_yet(of_this, store, sweep, "sweep")
    return read_side(str(named), store.open(sweep.stage.key))


def _recommend(args: argparse.Namespace) -> int:
    from raysd.deployment.ground import ground_of
    from raysd.deployment.recommend import Asked, lines, recommend

    if args.tpot_ms is not None and not args.tpot_ms > 0:
        raise ExperimentError(what=f"a TPOT of {args.tpot_ms} ms", where="--tpot-ms", fix="use more than 0")
    side = _side(args, args.spec)
    found = recommend(side.results.cells, Asked(args.arm, args.workload, args.peak, args.trough or 0, args.tpot_ms), ground_of(side))
    print(json.dumps(found.as_json(), indent=1) if args.json else "\n".join(lines(found)), flush=True)
    return 0


def _copy(folder: Path, into: Path) -> None:
    import shutil

    try:
        shutil.copytree(folder, into, dirs_exist_ok=True)
    except (OSError, shutil.Error) as err:
        raise ArtifactError(what=f"the report cannot be copied: {err}", where=into, fix="name a folder that can be written") from err


def _tell_job(summary: Path) -> None:
    """Puts a report's summary onto the page of the CI job that this is a part of, if it is one."""
    if summary.is_file():
        _append(summary.read_text(encoding="utf-8"))


def _append(markdown: str) -> None:
    from raysd.report.step_summary import append_step_summary

    try:
        append_step_summary(markdown, os.environ)
    except ArtifactError as err:  # what was asked for is done, and told on standard output
        print(f"note: {err}", file=sys.stderr)


def _status(args: argparse.Namespace) -> int:
    from raysd.pipeline.status import STATUS_HEADER, newest, statuses
    from raysd.pipeline.summary import table

    name, store = _store_of(args)
    skipped: list[ArtifactError] = []
    told = statuses(store, name, skipped)
    shown = told if args.all or args.json else newest(told)
    if args.json:
        print(json.dumps([status.as_json() for status in shown], indent=1), flush=True)
    elif shown:
        print("\n".join(table([STATUS_HEADER, *(status.as_row() for status in shown)])), flush=True)
    else:
        print(f"nothing is in {store.uri}" + (f" of {name}" if name else ""), file=sys.stderr)
    if len(shown) < len(told):
        print(f"and {len(told) - len(shown)} older: --all", file=sys.stderr)
    if skipped:
        raise skipped[0]
    return 0


def _logs(args: argparse.Namespace) -> int:
    from raysd.experiment import load_experiment
    from raysd.pipeline.preflight import stages_of
    from raysd.pipeline.stages import VERSIONS
    from raysd.pipeline.status import is_running, log_to_show

    if args.stage not in (None, *VERSIONS):
        raise ExperimentError(what=f"there is no stage {args.stage}", where="STAGE", fix=f"use one of: {', '.join(VERSIONS)}")
    _, store = _store_of(args)
    with _naming(args):
        stages = stages_of(load_experiment(args.spec))
    key, attempt = log_to_show(store, stages, args.stage, args.attempt)
    print(f"{store.place(key)}, attempt {attempt}", file=sys.stderr)
    shown = 0
    while True:
        running = args.follow and is_running(store, key)  # asked first: what is written before the end is then in the log that is read next
        text = store.read_log(key, attempt)
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if not running:
            return 0
        time.sleep(LOG_POLL_S)


def _stop(args: argparse.Namespace) -> int:
    from raysd.pipeline.status import stop

    name, store = _store_of(args)
    stopped = stop(store, name)
    for status in stopped:
        print(f"{status.key.experiment} {status.key.stage} {status.key.fingerprint[:8]}: stopped ({status.owner})")
    if not stopped:
        print(f"nothing runs in {store.uri}" + (f" of {name}" if name else ""), file=sys.stderr)
    return 0


def _gc(args: argparse.Namespace) -> int:
    from raysd.pipeline.garbage import delete_garbage, find_garbage, read_age_s
    from raysd.pipeline.summary import table

    older_than_s = read_age_s(args.older_than)
    args.spec = None
    _, store = _store_of(args)
    garbage = find_garbage(store, older_than_s)
    if args.delete:
        garbage = delete_garbage(store, garbage)
    if args.json:
        print(json.dumps(garbage.as_json(args.delete), indent=1))
        return 0
    for line in garbage.left:
        print(f"left: {line}", file=sys.stderr)
    if garbage.artifacts:
        rows = [[each.key.experiment, each.key.stage, each.key.fingerprint[:8], f"{each.size_bytes / 1e6:,.1f} MB",
                 f"{(garbage.now_s - each.modified_s) / 86400:.1f} days"] for each in garbage.artifacts]
        print("\n".join(table([["experiment", "stage", "fingerprint", "size", "not written for"], *rows])))
    for entry in (*garbage.leftovers, *garbage.uploads):
        print(f"unfinished: {store.home.place(entry.key)}")
    if not (garbage.artifacts or garbage.leftovers or garbage.uploads):
        print(f"nothing that was not written for {args.older_than} can go")
        return 0
    done = "deleted" if args.delete else "nothing is deleted without --delete"
    print(f"{_count(garbage.artifacts, 'artifact')} and {_count([*garbage.leftovers, *garbage.uploads], 'unfinished file')}, {garbage.size_bytes / 1e6:,.1f} MB: {done}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from raysd.deployment.config_file import config_text, serve_config
    from raysd.pipeline.display import open_display
    from raysd.pipeline.served import what_to_serve
    from raysd.signals import raise_when_terminated

    if args.dry_run and args.address is not None:
        raise ExperimentError(what="--address has no effect beside --dry-run, which deploys nothing", where="--address", fix="remove one of the two")
    raise_when_terminated()
    experiment, store, planned = _planned(args)
    with open_display(sys.stderr) as display:
        with _naming(args):
            served = what_to_serve(experiment, planned, store, args.arm, not args.dry_run and args.address is None, lambda doing, *_, **__: display.note(doing))
        for line in served.unchecked:
            display.note(f"not checked: {line}")
        config = serve_config(experiment, served.spec, len(os.sched_getaffinity(0)))
        if args.dry_run:
            print(config_text(experiment, config), end="", flush=True)
            return 0
        from raysd.backends.serve_cluster import serve_here, serve_on

        serve_on(args.address, experiment, config, display.note) if args.address else serve_here(experiment, config, display.note)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from raysd.checks.doctor import as_json, blocks, counted, heading
    from raysd.checks.findings import has_errors
    from raysd.checks.node_facts import look_at_this_node
    from raysd.checks.nodes import examine_nodes
    from raysd.checks.registry import all_checks, examine
    from raysd.pipeline.summary import table

    if args.list:
        if given := [name for name, value in (("SPEC", args.spec), ("--vllm", args.vllm), ("--node", args.node), ("--cluster", args.cluster), ("--address", args.address)) if value]:
            raise ExperimentError(what="it has no effect beside --list, which looks at nothing", where=given[0], fix="remove one of the two")
        checks = all_checks()
        print(json.dumps({"checks": [known.as_json() for known in checks]}, indent=1) if args.json
              else "\n".join(table([["code", "what it finds", "source"], *([known.code, known.title, known.source] for known in checks)])), flush=True)
        return 0
    if args.spec is None and not (args.node or args.cluster):
        raise ExperimentError(what="nothing is named to look at", where="SPEC", fix="name an experiment, or use --node, --cluster or --list")
    for name, needed, has in (("--vllm", "an experiment", args.spec), ("--address", "--cluster", args.cluster)):
        if getattr(args, name.strip("-")) is not None and not has:
            raise ExperimentError(what=f"it has no effect without {needed}", where=name, fix="remove it")
    facts = None if args.spec is None else _facts(args)
    findings, looked_at = ([], []) if facts is None else (examine(facts), [heading(facts)])
    nodes = [look_at_this_node()] if args.node else []
    if args.cluster:
        from raysd.backends.cluster_nodes import look_at_nodes

        nodes = [*nodes, *look_at_nodes(args.address or LOCAL_JOB_SERVER)]
    if nodes:
        findings, looked_at = [*findings, *examine_nodes(nodes, facts)], [*looked_at, f"nodes: {', '.join(node.host for node in nodes)}"]
    print(json.dumps(as_json(findings), indent=1) if args.json else "\n".join([*blocks(findings), f"{counted(findings)}  ({'; '.join(looked_at)})"]), flush=True)
    return ExperimentError.exit_code if has_errors(findings) else 0


def _facts(args: argparse.Namespace) -> Facts:
    """What the doctor looks at of an experiment."""
    from raysd.backends.vllm_probe import InstalledVllm, installed_version
    from raysd.checks.doctor import facts_of
    from raysd.experiment import load_experiment

    experiment = load_experiment(args.spec)
    with _naming(args):
        return facts_of(experiment, args.vllm, installed_version(), InstalledVllm())


def _bench(args: argparse.Namespace) -> int:
    from raysd.signals import raise_when_terminated

    raise_when_terminated()
    if args.selftest:
        return _selftest(args)
    from functools import partial

    from raysd.load.address import key_from, parse_address
    from raysd.load.arrivals import Load
    from raysd.load.bench import Asked, bench, bench_lines, check_output, write_bench
    from raysd.load.run import Limits, run_load
    from raysd.load.tally import TELL_EVERY_S, Tally, telling
    from raysd.pipeline.display import open_display

    if args.url is None:
        raise ExperimentError(what="no server is named", where="URL", fix="name one, or use --selftest")
    if args.prompts is not None and args.isl is not None:
        raise ExperimentError(what="it has no effect on prompts of one's own, which are as long as they are", where="--isl", fix="remove it, or --prompts")
    if args.seed is not None and args.prompts is not None and not args.poisson and args.temperature == 0:
        raise ExperimentError(what="it has no effect where nothing is random: prompts, arrivals and sampling are given", where="--seed", fix="remove it")
    limits = Limits(Limits.request_s if args.request_limit_s is None else args.request_limit_s, args.silence_limit_s)
    if not 0 <= args.temperature < float("inf"):
        raise ExperimentError(what=f"a temperature of {args.temperature}", where="--temperature", fix="use 0 or more")
    address = parse_address(args.url, None if args.api_key_env is None else key_from(os.environ, args.api_key_env))
    concurrency = 8 if args.concurrency is None and args.rate is None else args.concurrency
    load = Load(concurrency, args.rate, "poisson" if args.poisson else "constant", args.ramp, args.seed or 0)
    prompts = []
    if args.prompts is not None:
        from raysd.prompts.source import read_source

        prompts = [row.messages for row in read_source(Path(args.prompts), "--prompts")]
    asked = Asked(args.model, prompts, args.isl or Asked.isl, args.osl, args.endpoint, args.requests, args.temperature, args.ignore_eos, args.seed or 0, args.plain)
    tally = Tally()
    run = partial(run_load, tally=tally)
    if args.shards > 1:
        from raysd.backends.load_shards import run_shards

        run = partial(run_shards, args.shards, tally)
    if args.output is not None:
        check_output(args.output)
    with open_display(sys.stderr, refreshes_per_s=1 / TELL_EVERY_S) as display, telling(tally, display.stage_started("bench", 1, address.url)):
        told, rows = bench(address, asked, load, limits, run)
    try:
        if args.output is not None:
            write_bench(args.output, told, rows)
    finally:  # what was measured is told even if the disk has become full
        print(json.dumps(told, indent=1) if args.json else "\n".join(bench_lines(told)), flush=True)
    return 0 if told["valid"] else 1


def _selftest(args: argparse.Namespace) -> int:
    from raysd.load.selftest import CONCURRENCY, selftest, selftest_lines

    unasked = vars(_parser().parse_args(["bench"]))
    for name, value in vars(args).items():
        if name not in ("selftest", "concurrency", "json", "debug", "command") and value != unasked[name]:
            raise ExperimentError(what="it has no effect beside --selftest, which starts a server of its own", fix="remove one of the two",
                                  where=f"URL: {value}" if name == "url" else f"--{name.replace('_', '-')}")
    told = selftest(args.concurrency or CONCURRENCY)
    print(json.dumps(told, indent=1) if args.json else "\n".join(selftest_lines(told)), flush=True)
    return 0 if told["valid"] else 1


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _store_of(args: argparse.Namespace) -> tuple[str | None, Store]:
    """The name of the experiment that was given, if one was, and the store that is meant."""
    from raysd.backends.stores import open_store
    from raysd.experiment import load_experiment

    if args.spec is None and args.store is None:
        raise ExperimentError(what="no store is named", where="--store", fix="name the store with --store, or an experiment file that names one")
    experiment = None if args.spec is None else load_experiment(args.spec)
    store = open_store(experiment.store if args.store is None else args.store)
    if args.store is not None and not store.home.exists():
        raise ArtifactError(what="there is no store", where=f"--store: {store.uri}", fix="correct it; `raysd run` makes a new one")
    return None if experiment is None else experiment.name, store


def _planned(args: argparse.Namespace) -> tuple[Experiment, Store, list[PlannedStage]]:
    """The experiment, its store, and what is to become of each stage."""
    from raysd.backends.stores import open_store
    from raysd.experiment import load_experiment
    from raysd.pipeline.plan import plan
    from raysd.pipeline.preflight import chain_of, check_experiment

    experiment = load_experiment(args.spec)
    with _naming(args):
        chain = chain_of(experiment)
        check_experiment(chain.experiment)
        store = open_store(experiment.store if args.store is None else args.store)
        return chain.experiment, store, plan(chain.stages, store)


@contextmanager
def _naming(args: argparse.Namespace) -> Iterator[None]:
    """Puts the experiment file into an error that names only its field, unless the field was overruled by --store."""
    from raysd.pipeline.preflight import name_the_file

    try:
        yield
    except RaysdError as err:
        if getattr(args, "store", None) is not None and err.where.startswith("store: "):
            raise type(err)(what=err.what, where=f"--{err.where}", fix=err.fix) from err
        raise name_the_file(err, args.spec) from err


def _connect(
    address: str | None, experiment: Experiment, store: Store, display: Display
) -> Callable[[], AbstractContextManager[JobClient]]:
    """How the runner comes by a cluster: the one at an address, or a Ray of its own."""

    @contextmanager
    def connect() -> Iterator[JobClient]:
        from raysd.backends.ray_jobs import connect_jobs

        if address is not None:
            with connect_jobs(address, experiment, store.uri) as client:
                yield client
            return
        from raysd.backends.local_ray import local_ray

        display.note("starting a local Ray")
        with local_ray() as own_address, connect_jobs(own_address, experiment, store.uri) as client:
            yield client
            display.note("stopping the local Ray")

    return connect
