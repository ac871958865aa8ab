"""A training on Ray Train workers of several nodes: what it comes to, and what happens when a worker, a node or the stage dies in the middle."""

from __future__ import annotations

import json
import os
import pickle
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file

from raysd.artifacts import FolderHome, Store
from raysd.backends.ray_jobs import job_resources, resource_options
from raysd.backends.ray_training import (
    INCOMING,
    NEWEST,
    START_TIMEOUT,
    Post,
    captured_folder,
    learn_on_workers,
    worker_counts,
    worker_resources,
)
from raysd.backends.stores import open_store
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.train import train
from raysd.draft.unfinished import NAMES, StageDesk, Training
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.experiment.hardware import HardwareSection, StageResources
from raysd.experiment.target import TargetSection
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation, write_index, write_shard
from raysd.pipeline import job
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import chain_of, check_local_resources, stages_of
from tests.backends.training_driver import CAPTURE
from tests.ray_nodes import Job, Nodes, three_nodes
from tests.records import publish_files
from tests.stage_runs import attempt, piece
from tests.tiny_drafts import captured_from
from tests.tiny_models import tiny_llama

SETTINGS = {"steps": 20, "ttt_steps": 2, "conversations_per_step": 4, "evaluations": 2, "served_checkpoints": 1, "served_k": 2, "lr": 1e-3, "precision": "float32",
            "truncated": "keep", "threads": 1}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory):
    """Of its three nodes, `b` and `c` have room for a worker each."""
    with three_nodes(tmp_path_factory.mktemp("nodes") / "ray.log") as nodes:
        yield nodes


@pytest.fixture
def folder(experiment_document: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Makes the driver's folder, with some settings of `train` changed."""

    def make(name: str, **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        document = experiment_document | {"target": {"model": str(tmp_path / "tiny"), "max_model_len": 128}, "train": SETTINGS | changes,
                                          "draft": {"vocab_size": 64, "aux_layers": [1, 2, 3], "intermediate_size": 128},
                                          "prompts": {"path": str(tmp_path / "prompts.jsonl")}, "hardware": {"resources": {"train": {"cpus": 1, "custom": {"worker": 1}}}}}
        (tmp_path / name / "train.yaml").write_text(yaml.safe_dump(document))
        (tmp_path / name / "captures").symlink_to(tmp_path / "captures")
        return tmp_path / name

    tiny_llama(tmp_path / "tiny")
    shard, generator = tmp_path / "shard-00000.safetensors", torch.Generator().manual_seed(0)
    write_shard(shard, [Conversation(f"{split}{i}", "topic", split, torch.randint(3, 512, (24 + 3 * i,), generator=generator), 6, "length",
                                     torch.randn(23 + 3 * i, 4, 64, generator=generator).to(torch.bfloat16)) for split in ("train", "choose") for i in range(6)],
                captured_from(TargetSection(model=str(tmp_path / "tiny"), max_model_len=128), [1, 2, 3]))
    write_index(tmp_path)
    files = {path.name: path.read_bytes() for path in (shard, tmp_path / "index.parquet")}
    publish_files(Store(FolderHome(tmp_path / "captures")), CAPTURE, files)
    return make


class Driver(Job):
    """A job with the driver of a training."""

    def __init__(self, nodes: Nodes, folder: Path, environment: str = "") -> None:
        super().__init__(nodes, "tests.backends.training_driver", folder, environment)

    def workers(self) -> list[psutil.Process]:
        """The processes of Ray Train's workers, of all nodes."""
        return self.processes("TrainWorker")

    def keeps(self) -> bool:
        """Whether a checkpoint is kept, and a worker is there."""
        return any(piece(self.folder / "store", name).exists() for name in NAMES) and bool(self.workers())


def alone(folder: Path) -> dict[str, Any]:
    """The metrics of the same training in this process."""
    before = torch.get_num_threads()
    try:
        with attempt(folder / "store", load_experiment(folder / "train.yaml"), {"capture": Store(FolderHome(folder / "captures")).open(CAPTURE)}) as run:
            metrics = train(run, lambda draft, prompts, k: AcceptanceCounts(10, 20, 5, (4, 1)), learn_on_workers)
            for path in run.out.iterdir():
                path.rename(folder / path.name)
    finally:
        torch.set_num_threads(before)
    return metrics


def assert_same_training(one: Path, other: Path) -> None:
    mine, theirs = (load_file(folder / "draft" / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name].float(), theirs[name].float(), rtol=2e-2, atol=2e-3)  # they are kept in bf16
    mine, theirs = (pq.read_table(folder / "curve.parquet").to_pylist() for folder in (one, other))
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for row, same in zip(mine, theirs, strict=True):
        assert [row[name] for name in ("loss", "loss_1", "loss_2")] == pytest.approx([same[name] for name in ("loss", "loss_1", "loss_2")], rel=1e-3)


def test_workers_on_two_nodes_learn_what_one_learns(nodes, folder):
    with Driver(nodes, folder("two", workers=2)) as driver:
        result = driver.result()
    assert result["steps"] == 20 and result["resumed_steps"] == [], result
    one = folder("one", gradient_accumulation=2)
    metrics = alone(one)
    for name in ("tokens", "best_step", "conversations", "parameters"):
        assert result[name] == metrics[name], name
    assert_same_training(driver.folder, one)
    assert {row["workers"] for row in pq.read_table(driver.folder / "curve.parquet").to_pylist()} == {2}


@pytest.mark.slow
def test_workers_that_share_the_weights_learn_the_same(nodes, folder):
    with Driver(nodes, folder("shared", workers=2, parallel="fsdp")) as driver:
        assert driver.result()["steps"] == 20
    one = folder("one", gradient_accumulation=2)
    alone(one)
    assert_same_training(driver.folder, one)


LONG = {"steps": 300, "evaluations": 1, "checkpoint_every_s": 0.5}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_goes_on_from_the_last_checkpoint(nodes, folder):
    with Driver(nodes, folder("killed", workers=2, **LONG)) as driver:
        driver.wait(driver.keeps)
        before = driver.workers()
        before[-1].kill()
        driver.wait(lambda: len(driver.workers()) == 2 and not set(driver.workers()) & set(before))
        result = driver.result()
    assert result["steps"] == 300 and len(result["resumed_steps"]) == 1 and 0 < result["resumed_steps"][0] < 300, result
    with Driver(nodes, folder("left", workers=2, **LONG)) as left_alone:
        assert left_alone.result()["resumed_steps"] == []
    mine, theirs = (load_file(each.folder / "draft" / "model.safetensors") for each in (driver, left_alone))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_workers_that_die_more_often_than_allowed_end_the_stage_which_may_be_tried_again(nodes, folder):
    with Driver(nodes, folder("dying", workers=2, max_failures=0, **LONG)) as driver:
        driver.wait(driver.keeps)
        driver.workers()[-1].kill()
        result = driver.result()
    assert result["kind"] == "TryAgainError" and result["where"] == "train.max_failures", result


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_the_stage_and_the_next_attempt_goes_on(nodes, folder, number):
    place = folder("ended", workers=2, **LONG)
    with Driver(nodes, place) as driver:
        driver.wait(driver.keeps)
        os.kill(driver.pid(), number)
        driver.wait()
        driver.wait(lambda: driver.ended() and not driver.workers())
    assert not (place / "result.json").exists()
    with Driver(nodes, place) as driver:
        result = driver.result()
    assert result["steps"] == 300 and len(result["resumed_steps"]) == 1, result


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_the_stages_own_error_and_not_tried_again(nodes, folder):
    with Driver(nodes, folder("spoiled", workers=2, lr=1e38, checkpoint_every_s=0.01)) as driver:
        result = driver.result()
    assert result["kind"] == "StageError" and ("at step" in result["what"] or "weights have become NaN" in result["what"]) and result["where"] == "train.lr", result


@pytest.fixture
def stream_folder(experiment_document: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """As `folder`, for a training on a stream."""
    tiny_llama(tmp_path / "tiny", hidden=384)  # wide: states of less than 100 kB would not come to lie in the object store
    rows = [{"id": f"{split}{i}", "topic": f"{split}{i}", "split": split, "prompt": f"bado {split} {'fa ' * (i % 5)}{i}"}
            for split, count in (("train", 20), ("choose", 3), ("report", 1)) for i in range(count)]
    (tmp_path / "stream.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name: str, **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        train = {**SETTINGS, "truncated": "drop", **changes}
        resources = {"train": {"cpus": 1, "custom": {"worker": 1}}} if train.get("workers", 1) > 1 else {}
        document = experiment_document | {"target": {"model": str(tmp_path / "tiny"), "max_model_len": 128}, "train": train, "hardware": {"resources": resources},
                                          "draft": {"vocab_size": 64, "aux_layers": [1, 2, 3], "intermediate_size": 128}, "prompts": {"path": str(tmp_path / "stream.jsonl")},
                                          "capture": {"mode": "stream", "max_tokens": 32, "shard_conversations": 6, "queue_bytes": 2**23}}
        (tmp_path / name / "train.yaml").write_text(yaml.safe_dump(document))
        return tmp_path / name

    return make


@pytest.mark.slow
def test_workers_on_two_nodes_learn_from_a_stream_what_one_learns(nodes, stream_folder):
    with Driver(nodes, stream_folder("two", workers=2)) as driver:
        two = driver.result()
    assert two["steps"] == 20 and two["resumed_steps"] == [], two
    with Driver(nodes, stream_folder("one", gradient_accumulation=2)) as alone:
        one = alone.result()
    for name in ("tokens", "best_step", "conversations", "parameters", "dropped", "vocab_coverage_frac"):
        assert two[name] == one[name], name
    assert two["dropped"] > 0 and two["capture"]["layer_ids"] == [1, 2, 3, 4]
    assert_same_training(driver.folder, alone.folder)
    assert {row["workers"] for row in pq.read_table(driver.folder / "curve.parquet").to_pylist()} == {2}


@pytest.mark.slow
def test_a_worker_on_a_stream_that_is_killed_ends_the_attempt_and_the_next_goes_on(nodes, stream_folder):
    settings = {"workers": 2, "steps": 100, "evaluations": 1, "checkpoint_every_s": 1.0}
    with Driver(nodes, stream_folder("killed", **settings)) as driver:
        driver.wait(driver.keeps)
        driver.workers()[-1].kill()
        result = driver.result()
    assert result["kind"] == "TryAgainError" and result["where"] == "train.workers", result
    with Driver(nodes, driver.folder) as again:
        result = again.result()
    assert result["steps"] == 100 and len(result["resumed_steps"]) == 1 and 0 < result["resumed_steps"][0] < 100, result
    with Driver(nodes, stream_folder("left", **settings)) as left_alone:
        whole = left_alone.result()
    assert "pilled" not in left_alone.log()  # more states went by than the object stores hold
    assert whole["resumed_steps"] == [] and whole["dropped"] == result["dropped"] and whole["tokens"] == result["tokens"]
    mine, theirs = (load_file(each.folder / "draft" / "model.safetensors") for each in (driver, left_alone))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_a_node_that_is_gone_for_good_leaves_the_training_to_the_others(nodes, folder):
    """The last of this file: the node does not come back."""
    with Driver(nodes, folder("alone", workers=2, **LONG), environment=f"{START_TIMEOUT}=90") as driver:
        driver.wait(driver.keeps)
        raylet = psutil.Process(nodes.raylets["c"])
        on_node = [raylet, *raylet.children(recursive=True)]
        for process in on_node:
            process.kill()
        del nodes.raylets["c"]
        result = driver.result()
    assert result["steps"] == 300 and len(result["resumed_steps"]) == 1, result
    workers = [row["workers"] for row in pq.read_table(driver.folder / "curve.parquet").to_pylist()]
    assert workers[0] == 2 and workers[-1] == 1 and sorted(workers, reverse=True) == workers


def test_a_stage_with_a_store_in_s3_says_where_another_machine_opens_its_inputs(s3_place, write_experiment, tmp_path, monkeypatch):
    """The job of the stage train, with the stage's own function in the place of the training, and a node whose cache is empty."""
    spec, found = write_experiment(), []
    monkeypatch.setattr(job, "raise_when_terminated", lambda: None)  # the handlers belong to a process of its own
    for place in (s3_place.section.text(), str(tmp_path / "runs")):
        monkeypatch.setenv("RAYSD_CACHE", str(tmp_path / "one node"))
        chain = chain_of(load_experiment(spec))
        capture = next(stage for stage in chain.stages if stage.name == "capture")
        publish_files(open_store(place), capture.key, {"index.parquet": b"captured"}, identity=capture.identity)
        assert job.main("train", lambda: job.Edges({"train": lambda run: found.append(run) or {}}, open_store), ["--experiment", str(spec), "--store", place]) == 0
    in_s3, in_folder = found
    assert in_folder.elsewhere == {}
    monkeypatch.setenv("RAYSD_CACHE", str(tmp_path / "another node"))
    stored = pickle.loads(pickle.dumps(in_s3.elsewhere["capture"]))
    opened = captured_folder(stored)
    assert opened.is_relative_to(tmp_path / "another node") and (opened / "index.parquet").read_bytes() == b"captured"


def test_a_node_that_does_not_share_the_folder_store_is_named(tmp_path):
    (tmp_path / "index.parquet").touch()
    assert captured_folder(tmp_path) == tmp_path
    with pytest.raises(ExperimentError, match=f"the node {platform.node()} does not see") as caught:
        captured_folder(tmp_path / "elsewhere")
    assert caught.value.where == str(tmp_path / "elsewhere")


@pytest.fixture
def post(tmp_path: Path) -> Post:
    return Post(tmp_path)


def in_thread(do: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=do, args=arguments, daemon=True)
    thread.start()
    return thread


def test_a_checkpoint_is_kept_when_the_stage_says_so(post, tmp_path):
    assert post.open_group() == (1, 0)
    post.write(1, b"first ", True)
    post.write(1, b"half", False)
    keeping = in_thread(post.keep, 1)
    assert post.messages() == [("keep", None)] and keeping.is_alive()
    assert (tmp_path / INCOMING).read_bytes() == b"first half"
    os.replace(tmp_path / INCOMING, tmp_path / NEWEST)
    post.kept()
    keeping.join(10)
    assert not keeping.is_alive()
    assert post.open_group() == (2, 10) and post.read(6) == b"half" and post.read(10) == b""


def test_workers_that_others_have_replaced_are_not_heard(post, tmp_path):
    post.open_group()
    post.write(1, b"half of a checkpoint", True)
    assert post.open_group() == (2, 0)  # a half is no checkpoint
    for call in (lambda: post.write(1, b"the rest", False), lambda: post.keep(1)):
        with pytest.raises(RuntimeError, match="taken this one's place"):
            call()
    post.tell(1, "note", {"step": 10})
    post.tell(2, "note", {"step": 5})
    assert post.messages() == [("note", {"step": 5})]


def test_new_workers_wait_for_the_checkpoint_that_the_stage_is_keeping(post, tmp_path):
    post.open_group()
    post.write(1, b"checkpoint", True)
    in_thread(post.keep, 1)
    assert post.messages() == [("keep", None)]
    opened: list[tuple[int, int]] = []
    opening = in_thread(lambda: opened.append(post.open_group()))
    time.sleep(0.2)
    assert opening.is_alive()
    os.replace(tmp_path / INCOMING, tmp_path / NEWEST)
    post.kept()
    opening.join(10)
    assert opened == [(2, 10)]


def test_a_training_that_an_attempt_before_has_finished_needs_no_worker(folder):
    place = folder("two", workers=2)
    with attempt(place / "store", load_experiment(place / "train.yaml"), {"capture": place}) as run:
        StageDesk(run).keep({"written": 1, "training": vars(Training(steps=20, evaluations=[{"step": 20}], resumed_steps=[7]))})
        training = learn_on_workers(run, place, torch.arange(64), StageDesk(run), None)
    assert training.steps == 20 and training.resumed_steps == [7, 20] and not ray.is_initialized()


def test_each_worker_reserves_what_the_stage_asks_for():
    assert worker_resources(StageResources()) == {"CPU": 1}
    assert worker_resources(StageResources(gpus=1, custom={"rack": 0.5})) == {"GPU": 1, "rack": 0.5}
    assert worker_resources(StageResources(cpus=4, memory_bytes=2**30)) == {"CPU": 4, "memory": 2**30}


def test_the_job_of_a_shared_training_reserves_nothing_itself(folder):
    experiment = load_experiment(folder("two", workers=2) / "train.yaml")
    assert resource_options(job_resources(experiment, "train")) == {}
    experiment = load_experiment(folder("one") / "train.yaml")
    assert resource_options(job_resources(experiment, "train")) == {"entrypoint_num_cpus": 1, "entrypoint_resources": {"worker": 1}}


def test_more_workers_than_this_machine_has_cores_are_refused_on_a_local_ray(folder):
    experiment = load_experiment(folder("many", workers=4, steps=1) / "train.yaml")
    cores = len(os.sched_getaffinity(0))
    hardware = HardwareSection(resources={"train": StageResources(cpus=cores)})
    with pytest.raises(ExperimentError, match=f"4 workers ask for {cores} CPU cores each") as caught:
        check_local_resources(experiment.model_copy(update={"hardware": hardware}), plan(stages_of(experiment), Store(FolderHome(Path("nowhere")))))
    assert caught.value.where == "train.workers"


def test_as_many_workers_as_there_is_room_for_unless_they_share_the_draft():
    assert worker_counts(TrainSection(workers=4), streams=False) == (1, 4)
    assert worker_counts(TrainSection(workers=4, parallel="fsdp"), streams=False) == 4
    assert worker_counts(TrainSection(workers=4), streams=True) == 4
