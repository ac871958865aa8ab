"""The command as a user calls it: a process of its own, its exit code, and what it prints where."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raysd
from raysd import cli
from raysd.artifacts import ArtifactKey, FolderHome
from raysd.backends.stores import open_store
from raysd.cli import main
from raysd.errors import ArtifactError, StageError
from raysd.experiment import load_experiment
from raysd.pipeline.preflight import resolve, stages_of
from raysd.signals import Terminated
from tests.records import publish_files, publish_stage
from tests.report.conftest import Demo

HEAVY = ("torch", "ray", "vllm", "transformers", "quark", "pydantic", "numpy", "pyarrow", "rich")


def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "raysd", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120)


def loaded_after(statement: str, *arguments: object) -> set[str]:
    """Libraries that a process has imported after a statement."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    return {name.split(".")[0] for name in line.split()[1:]}


def test_help_and_version_load_nothing_heavy():
    loaded = loaded_after("from raysd.cli import main; main(['--help'])")
    assert "raysd" in loaded and loaded.isdisjoint(HEAVY)
    assert call("--help").returncode == 0
    assert call("--version").stdout == f"raysd {raysd.__version__}\n"


def test_plan_loads_neither_torch_nor_ray_nor_vllm(write_experiment: Callable[..., Path]):
    loaded = loaded_after("from raysd.cli import main; main(['plan', sys.argv[1]])", write_experiment())
    assert "pydantic" in loaded and loaded.isdisjoint({"torch", "ray", "vllm", "transformers", "quark", "numpy", "pyarrow", "boto3", "botocore"})


def test_plan_prints_a_table_or_json_and_writes_nothing(write_experiment: Callable[..., Path], tmp_path: Path):
    spec = write_experiment()
    shown = call("plan", spec)
    assert shown.returncode == 0 and shown.stderr == ""
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["stage", "capture", "train", "quantize", "sweep", "report"]
    document = json.loads(call("plan", spec, "--json").stdout)
    assert document["experiment"] == "tiny"
    assert [(entry["stage"], entry["state"]) for entry in document["stages"]] == [
        (name, "run") for name in ("capture", "train", "quantize", "sweep", "report")
    ]
    assert all(entry.keys() == {"stage", "fingerprint", "state", "why", "inputs", "resources", "expected_bytes"} for entry in document["stages"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [[], ["serve"], ["run"], ["plan", "a.yaml", "b.yaml"], ["run", "a.yaml", "--fast"]])
def test_wrong_usage_exits_64_with_one_message(arguments: list[str]):
    done = call(*arguments)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith("usage: raysd") and "error: " in done.stderr and "Traceback" not in done.stderr


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown key", {"train": {"learning_rate": 1}}, "train.learning_rate", "unknown key"),
    ("unknown arm", {"sweep": {"arms": ["none", "int4"]}}, "sweep.arms", "int4"),
    ("absent prompts", {"prompts": {"path": "absent.jsonl"}}, "prompts", "absent.jsonl"),
    ("empty prompts", {"prompts": {"path": "empty.jsonl"}}, "prompts", "empty.jsonl"),
    ("absent target", {"target": {"model": "./absent"}}, "target.model", "absent"),
    ("an attention that the target has no sizes for", {"draft": {"attention": "latent"}}, "draft.attention", "set it to grouped"),
    ("fewer prompts than a step takes", {"train": {"conversations_per_step": 5}}, "train.conversations_per_step", "use at most 4"),
    ("absent draft", {"capture": None, "train": None, "draft": {"checkpoint": "./absent"}}, "draft.checkpoint", "absent"),
]
BAD_FOR_RUN = [
    ("a context that the target has no positions for", {"target": {"model": "./target", "max_model_len": 4096}}, "target.max_model_len", "512"),
    ("devices that cannot share the heads", {"target": {"model": "./target", "tensor_parallel": 3, "max_model_len": 512}}, "target.tensor_parallel", "4 attention heads"),
    ("unknown hardware", {"hardware": {"name": "mi999x"}}, "hardware.name", "mi355x"),
    ("a layer that does not exist", {"draft": {"aux_layers": [1, 99]}}, "draft.aux_layers", "99"),
    ("too many GPUs", {"hardware": {"name": "mi355x", "resources": {"train": {"gpus": 16}}}}, "hardware.resources.train.gpus", "16 GPUs"),
    ("a draft of another target", {"capture": None, "train": None, "draft": {"checkpoint": "./draft"}}, "draft.checkpoint", "width 128"),
]


@pytest.mark.parametrize(
    ("verb", "changes", "field", "words"),
    [(verb, *case[1:]) for case in BAD for verb in ("plan", "run")] + [("run", *case[1:]) for case in BAD_FOR_RUN],
    ids=[f"{verb} {case[0]}" for case in BAD for verb in ("plan", "run")] + [f"run {case[0]}" for case in BAD_FOR_RUN],
)
def test_bad_input_exits_64_and_names_file_and_field(
    write_experiment: Callable[..., Path], tmp_path: Path, verb: str, changes: dict[str, Any], field: str, words: str
):
    (tmp_path / "empty.jsonl").touch()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "vocab_size": 256}))
    (draft / "model.safetensors").write_bytes(b"weights")
    spec = write_experiment(**changes)
    done = call(verb, spec)
    assert done.returncode == 64, done.stderr
    assert str(spec) in done.stderr and field in done.stderr and words in done.stderr and "fix:" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_missing_file_exits_64():
    done = call("run", "absent.yaml")
    assert done.returncode == 64 and "absent.yaml" in done.stderr and "Traceback" not in done.stderr


def test_debug_shows_the_traceback(write_experiment: Callable[..., Path]):
    done = call("plan", write_experiment(target={"model": "./absent"}), "--debug")
    assert done.returncode == 64 and "Traceback" in done.stderr and "fix:" in done.stderr


def test_an_address_where_nothing_answers_exits_1_rather_than_wait(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("run", write_experiment(), "--address", "http://127.0.0.1:9", "--json")
    assert done.returncode == 1 and "127.0.0.1:9" in done.stderr and "--address" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list((tmp_path / "runs").rglob("record.json"))


def test_a_disk_that_is_too_small_exits_1_before_anything_starts(write_experiment: Callable[..., Path], tmp_path: Path):
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 10**13}))
    done = call("run", write_experiment(capture={"max_tokens": 10**12}, target={"model": "./target", "max_model_len": 10**13}))
    assert done.returncode == 1 and "GB are free" in done.stderr and "store" in done.stderr and "Traceback" not in done.stderr


def test_a_store_that_cannot_be_written_exits_1(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("run", write_experiment(store="/proc/raysd"))
    assert done.returncode == 1 and "/proc/raysd" in done.stderr and "Traceback" not in done.stderr


def test_a_store_below_a_file_exits_64(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("run", write_experiment(store="prompts.jsonl/below"))
    assert done.returncode == 64 and f"below a file, {tmp_path / 'prompts.jsonl'}" in done.stderr and "Traceback" not in done.stderr


def test_what_is_wrong_with_an_arguments_store_is_not_said_of_the_experiment_file(filled: Path, tmp_path: Path):
    for verb in ("run", "plan"):
        done = call(verb, filled, "--store", filled)
        assert done.returncode == 64 and f"where: --store: {filled}" in done.stderr


def test_a_report_that_is_not_there_yet_says_how_to_get_it(write_experiment: Callable[..., Path]):
    spec = write_experiment()
    done = call("report", spec)
    assert done.returncode == 1 and f"raysd run {spec}" in done.stderr and done.stdout == ""


@pytest.fixture
def filled(write_experiment: Callable[..., Path], tmp_path: Path) -> Path:
    """An experiment of sweep and report; the sweep is done, and the report's attempt failed and left a log."""
    spec = write_experiment(capture=None, train=None, quantize=None, sweep={"arms": ["none"]})
    store = open_store(str(tmp_path / "runs"))
    sweep, report = stages = stages_of(load_experiment(spec))
    resolve(stages, store)
    publish_stage(store, sweep)
    with store.log(report.key, 1) as log:
        log.write("the first attempt")
    with pytest.raises(StageError), store.work_on(report.key, {}):
        raise StageError(what="no cell is valid", where="report", fix="look at the sweep")
    with store.log(report.key, 2) as log:
        log.write("the second attempt")
    return spec


def test_status_prints_a_table_or_json(filled: Path, tmp_path: Path):
    entries = json.loads(call("status", "--store", tmp_path / "runs", "--json").stdout)
    assert [(entry["experiment"], entry["stage"], entry["state"]) for entry in entries] == [("tiny", "sweep", "done"), ("tiny", "report", "failed")]
    assert all(entry.keys() >= {"experiment", "stage", "state", "fingerprint", "started", "owner"} and "@" in entry["owner"] for entry in entries)
    shown = call("status", filled)
    assert shown.returncode == 0 and "no cell is valid" in shown.stdout and len(shown.stdout.splitlines()) == 3
    (tmp_path / "empty").mkdir()
    empty = call("status", "--store", tmp_path / "empty")
    assert (empty.returncode, empty.stdout) == (0, "") and "nothing is in" in empty.stderr


@pytest.mark.parametrize("verb", ["status", "stop", "gc", "logs"])
def test_a_mistyped_store_is_no_empty_one(filled: Path, tmp_path: Path, verb: str):
    done = call(verb, *([filled] if verb == "logs" else []), "--store", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (1, "") and "there is no store" in done.stderr and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("store", ["", "  ", "~nosuchuser-0f3a/runs"])
def test_a_store_text_that_names_nothing_is_refused_by_every_verb(filled: Path, store: str):
    for verb in ("run", "plan", "report", "status", "logs", "stop", "gc"):
        done = call(verb, *([] if verb == "gc" else [filled]), "--store", store)
        assert done.returncode == 64 and "--store" in done.stderr and "Traceback" not in done.stderr


def test_logs_prints_the_newest_or_the_one_asked_for(filled: Path):
    assert call("logs", filled).stdout == "the second attempt\n"
    assert call("logs", filled, "report", "--attempt", "1").stdout == "the first attempt\n"
    none = call("logs", filled, "sweep")
    assert none.returncode == 1 and "no log of the stage sweep" in none.stderr and none.stdout == ""
    assert call("logs", filled, "serve").returncode == 64


def test_stop_with_nothing_to_stop_says_so(filled: Path, tmp_path: Path):
    done = call("stop", filled)
    assert done.returncode == 0 and "nothing runs" in done.stderr
    assert call("stop").returncode == 64 and call("status").returncode == 64 and call("gc").returncode == 64


def test_gc_is_dry_until_told(filled: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    publish_files(open_store(str(runs)), ArtifactKey("tiny", "train", "a" * 32), {})
    before = sorted(path for path in runs.rglob("*"))
    dry = call("gc", "--store", runs, "--older-than", "0s")
    assert dry.returncode == 0 and "--delete" in dry.stdout and "1 artifact and 0 unfinished files" in dry.stdout and sorted(runs.rglob("*")) == before
    assert json.loads(call("gc", "--store", runs, "--json").stdout)["artifacts"] == []
    deleted = json.loads(call("gc", "--store", runs, "--older-than", "0s", "--delete", "--json").stdout)
    assert deleted["deleted"] and [entry["stage"] for entry in deleted["artifacts"]] == ["train"]
    assert not list(runs.glob("tiny/train/*")) and len(list(runs.glob("tiny/sweep/*/record.json"))) == 1 and list(runs.glob("tiny/report/*"))
    assert call("gc", "--store", runs, "--older-than", "soon").returncode == 64


@pytest.fixture
def finished(filled: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An experiment whose artifacts all exist, and the file of its report."""
    store = open_store(str(tmp_path / "runs"))
    report = stages_of(load_experiment(filled))[-1]
    record = publish_files(store, report.key, {"report.html": b"<html>"}, identity=report.identity)
    return filled, store.folder(report.key) / record.folder / "report.html"


def test_a_run_that_finds_all_hands_out_a_report_that_is_whole(finished: tuple[Path, Path]):
    spec, report = finished
    done = call("run", spec)
    assert done.returncode == 0 and f"report: {report}" in done.stdout and call("report", spec).stdout == f"{report}\n"
    report.write_bytes(b"<htmX>")
    for verb in ("run", "report"):
        done = call(verb, spec)
        assert done.returncode == 1 and "SHA-256" in done.stderr and str(report) in done.stderr and done.stdout == ""


def test_what_a_record_that_is_damaged_blocks_fails_in_plan_too(finished: tuple[Path, Path]):
    spec, report = finished
    (report.parent.parent / "record.json").write_text("{")
    for verb in ("plan", "report", "run"):
        done = call(verb, spec)
        assert done.returncode == 1 and "the stage report cannot run: the record is damaged" in done.stderr and "delete" in done.stderr
    assert "blocked" in call("plan", spec).stdout


def test_a_damaged_note_of_what_a_name_stands_for_is_named_and_plan_still_shows_the_plan(finished: tuple[Path, Path], tmp_path: Path):
    spec, _ = finished
    (tmp_path / "runs" / "tiny" / "experiment.json").write_text("{")
    for verb in ("plan", "run"):
        done = call(verb, spec)
        assert done.returncode == 1 and "experiment.json" in done.stderr and "what the name stands for is damaged" in done.stderr
    assert call("plan", spec).stdout.count("cached") == 2


def test_a_run_that_finds_all_needs_no_right_to_write(finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec, _ = finished
    (tmp_path / "runs" / "tiny" / "experiment.json").unlink()
    monkeypatch.setattr(FolderHome, "create", refused)
    monkeypatch.setattr("raysd.signals.raise_when_terminated", lambda: None)  # the handlers belong to a process of its own
    assert main(["run", str(spec)]) == 0


def refused(*_: object) -> bool:
    raise ArtifactError(what="the store cannot be written: Read-only file system", where="store", fix="make it writable")


def test_another_target_under_the_name_exits_64_and_plan_says_so(filled: Path, tmp_path: Path):
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    before = sorted(path for path in (tmp_path / "runs").rglob("*"))
    for verb in ("plan", "run"):
        done = call(verb, filled)
        assert done.returncode == 64 and "another target" in done.stderr and "take a new name" in done.stderr and str(filled) in done.stderr
    planned = call("plan", filled)
    assert planned.stdout.count("blocked") == 2 and planned.stdout.count("another target") == 1 and "take a new name" in planned.stdout
    assert sorted((tmp_path / "runs").rglob("*")) == before


@pytest.mark.parametrize("store", ["gs://bucket/x", "s3://b", "s3://bucket/x?secret=y"])
def test_a_store_that_is_none_exits_64(filled: Path, store: str):
    for arguments in (("run", filled), ("plan", filled), ("status",), ("gc",)):
        done = call(*arguments, "--store", store)
        assert done.returncode == 64 and "--store" in done.stderr and "Traceback" not in done.stderr


def test_a_store_that_is_a_file_exits_64(filled: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    done = call("run", filled, "--store", tmp_path / "file")
    assert done.returncode == 64 and str(tmp_path / "file") in done.stderr


@pytest.fixture
def sweeps(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of two sweeps; the second is 1.2 times as fast."""
    with contextlib.ExitStack() as held:
        return Demo(tmp_path / "a", held).sweep().parent, Demo(tmp_path / "b", held, speed=1.2).sweep().parent


def test_report_compares_two_sweeps(sweeps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    done = call("report", *sweeps, "--json", "--output", tmp_path / "out")
    assert done.returncode == 0 and done.stderr == ""
    document = json.loads(done.stdout)
    assert document["verdicts"] == {"faster": 10, "slower": 0, "tie": 0, "not_tested": 0} and document["conditions"]["differing"] == {}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.html", "comparison.json", "comparison.md", "comparison.png"]
    summary, whole = (tmp_path / "step.md").read_text(), (tmp_path / "out" / "comparison.md").read_text()
    assert "| report | BF16 draft | 3 | 4 |" in summary and "comparison.png" in whole and "comparison.png" not in summary
    shown = call("report", *sweeps)
    assert shown.returncode == 0 and "B is faster at 10" in shown.stdout and "report    bf16  3  4" in shown.stdout
    assert (tmp_path / "step.md").read_text().count("# Two sweeps compared") == 2


def test_a_summary_that_cannot_be_written_costs_no_result(sweeps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "absent" / "step.md"))
    done = call("report", *sweeps)
    assert done.returncode == 0 and "B is faster at 10" in done.stdout and "GITHUB_STEP_SUMMARY" in done.stderr and "Traceback" not in done.stderr


def test_report_writes_a_sweeps_cells_as_inferencex_has_them(sweeps: tuple[Path, Path], tmp_path: Path):
    done = call("report", sweeps[0], "--inferencex", tmp_path / "ix")
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'ix' / 'agg_bmk.json'}\n" and len(list((tmp_path / "ix").glob("agg_smollm2*.json"))) == 30
    assert len(json.loads(call("report", sweeps[0], "--inferencex", tmp_path / "ix", "--json").stdout)["inferencex"]) == 61


@pytest.mark.parametrize(("arguments", "words"), [
    (["A"], "nothing to do with it"), (["A", "--across", "vllm"], "without a second sweep"), (["A", "B", "--across", "weather"], "target, hardware, vllm"),
    (["A", "B", "--inferencex", "x"], "about one sweep"), (["A", "B", "--store", "x"], "--store has no effect"), (["A", "--inferencex", "x", "--output", "y"], "--output has no effect"),
    (["A", "nowhere.yaml"], "nowhere.yaml"), (["A", "."], "no sweep in this folder")])
def test_what_report_cannot_do_with_its_arguments_exits_64(sweeps: tuple[Path, Path], tmp_path: Path, arguments: list[str], words: str):
    done = call("report", *({"A": str(sweeps[0]), "B": str(sweeps[1])}.get(each, each) for each in arguments), cwd=tmp_path)
    assert done.returncode == 64 and words in done.stderr and "Traceback" not in done.stderr and done.stdout == "" and not (tmp_path / "x").exists()


def test_sweeps_of_another_vllm_are_compared_when_asked(sweeps: tuple[Path, Path], tmp_path: Path):
    with contextlib.ExitStack() as held:
        other = Demo(tmp_path / "c", held, vllm="0.33.0").sweep()
    refused = call("report", sweeps[0], other)
    assert refused.returncode == 64 and "vllm: 0.32.0 and 0.33.0" in refused.stderr and "--across vllm" in refused.stderr
    done = call("report", sweeps[0], other, "--across", "vllm")
    assert done.returncode == 0 and "The two differ in vllm: 0.32.0 in A, 0.33.0 in B." in done.stdout


def test_an_experiment_file_stands_for_its_finished_sweep(write_experiment: Callable[..., Path], sweeps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = write_experiment(capture=None, train=None, quantize=None, sweep={"arms": ["none"]})
    store = open_store(str(tmp_path / "runs"))
    sweep, report = stages_of(load_experiment(spec))
    unfinished = call("report", spec, sweeps[0])
    assert unfinished.returncode == 1 and "there is no sweep of this experiment yet" in unfinished.stderr and f"raysd run {spec}" in unfinished.stderr
    (files,) = sweeps[0].glob("files-*")
    publish_files(store, sweep.key, {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}, identity=sweep.identity)
    done = call("report", spec, sweeps[1], "--json", "--across", "target", "--across", "prompts")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["a"] == str(spec) and json.loads(done.stdout)["verdicts"]["faster"] == 10
    publish_files(store, report.key, {"report.html": b"<html>", "summary.md": b"# tiny"}, identity=report.identity, metrics={"headline": "It wins."})
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    done = call("report", spec, "--json", "--output", tmp_path / "copy")
    assert done.returncode == 0 and json.loads(done.stdout)["headline"] == "It wins." and json.loads(done.stdout)["report"].endswith("report.html")
    assert (tmp_path / "copy" / "summary.md").read_bytes() == b"# tiny" and (tmp_path / "step.md").read_text() == "# tiny\n\n"
    assert call("run", spec).returncode == 0 and (tmp_path / "step.md").read_text() == "# tiny\n\n# tiny\n\n"


@pytest.mark.parametrize(("error", "exit_code", "says"), [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(15), 143, "stopped by SIGTERM")])
@pytest.mark.parametrize(("verb", "goes_on"), [(["run", "x.yaml"], True), (["plan", "x.yaml"], False), (["gc", "--store", "x"], False), (["bench", "x"], False)])
def test_only_a_run_that_was_ended_says_that_it_goes_on(verb, goes_on, error, exit_code, says, monkeypatch, capsys):
    def ended(args):
        raise error

    monkeypatch.setattr(cli, f"_{verb[0]}", ended)
    assert main(verb) == exit_code
    told = capsys.readouterr().err
    assert says in told and ("raysd run" in told) == goes_on


PUBLISHED = Path(__file__).parent / "checks" / "published"


def test_doctor_says_in_seconds_what_is_wrong_and_imports_nothing_heavy_for_it():
    spec = PUBLISHED / "inferencex-1116.yaml"
    done = call("doctor", spec)
    assert done.returncode == 64 and done.stderr == ""
    assert done.stdout.startswith("error   k-not-verified  sweep.k\n") and "1 error" in done.stdout.splitlines()[-1] and "fix:" in done.stdout
    told = call("doctor", spec, "--json")
    findings = json.loads(told.stdout)["findings"]
    assert told.returncode == 64 and {"k-not-verified", "draft-backend-unset"} <= {finding["code"] for finding in findings}
    assert all(list(finding) == ["code", "severity", "field", "message", "fix", "source"] for finding in findings)
    loaded = loaded_after("from raysd.cli import main; main(['doctor', sys.argv[1]])", spec)
    assert "pydantic" in loaded and loaded.isdisjoint({"torch", "ray", "vllm", "transformers", "quark", "pyarrow"})


def test_doctor_exits_0_without_an_error_and_takes_the_version_that_is_asked_about(write_experiment: Callable[..., Path]):
    done = call("doctor", write_experiment(), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["findings"] == []
    older = json.loads(call("doctor", PUBLISHED / "inferencex-1116.yaml", "--vllm", "0.19.1", "--json").stdout)
    assert "kv-block-clash" in {finding["code"] for finding in older["findings"]}


def test_doctor_lists_its_checks():
    checks = json.loads(call("doctor", "--list", "--json").stdout)["checks"]
    assert len(checks) >= 30 and all(each["code"] and each["title"] and each["source"].startswith("https://") for each in checks)
    assert {each["code"] for each in checks} <= {line.split()[0] for line in call("doctor", "--list").stdout.splitlines()}


def test_doctor_looks_at_the_machine_that_it_runs_on():
    done = call("doctor", "--node", "--json")
    assert done.returncode in (0, 64) and "findings" in json.loads(done.stdout)
    wanted = call("doctor", PUBLISHED / "inferencex-1234.yaml", "--node")
    assert "nodes: " in wanted.stdout.splitlines()[-1]


@pytest.mark.parametrize(("arguments", "field"), [
    (["doctor"], "SPEC"), (["doctor", "absent.yaml"], "absent.yaml"), (["doctor", "--node", "--vllm", "0.24.0"], "--vllm"), (["doctor", "--node", "--address", "http://h:8265"], "--address"),
    (["doctor", "--list", "--node"], "--node"), (["doctor", PUBLISHED / "inferencex-1116.yaml", "--vllm", "newest"], "--vllm")])
def test_doctor_refuses_what_has_no_effect(arguments: list[Any], field: str):
    done = call(*arguments)
    assert done.returncode == 64 and f"where: {field}" in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_a_version_that_is_none_is_refused_in_the_file(write_experiment: Callable[..., Path]):
    done = call("doctor", write_experiment(hardware={"name": "cpu", "vllm": "nightly-fb1ac806"}))
    assert done.returncode == 64 and "hardware.vllm" in done.stderr and "0.24.0" in done.stderr
