"""A training on several workers: a Ray Train run whose driver is the stage's job.

The stage keeps to itself what touches the store: its lease, its progress, its checkpoints and its curve. The workers reach it through one actor on the
stage's node, the post, which also runs Ray Train's trainer: they send what they have to tell, and their checkpoints in pieces of CHUNK_BYTES, so that
nobody needs room for one in Ray's object store. When workers start, at first or after a failure, the first of them opens a new group at the post, and
from then on no word of an earlier group counts; they go on from the newest checkpoint that the stage has kept.

On a stream the stage's process also deals: it has a thread that cuts the stream into steps and lays out the workers' shares at the post, words and
references to states, one step at a time; the next one when all workers have fetched the states of the last. As many workers as were asked for take part, and
none is started again, since what has been fetched from a stream does not come again: the next attempt of the stage goes on from the last checkpoint.

What the stage's process owns in Ray ends with it, however it ends.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from raysd.artifacts.stage import StageRun, Stored, no_progress
from raysd.backends.devices import TRAIN_WORKER_ENVIRONMENT
from raysd.backends.ray_driver import CHUNK_BYTES, connected, last_line
from raysd.backends.stores import open_store
from raysd.backends.stream_capture import check_in_memory
from raysd.draft.learn import learn, new_learner
from raysd.draft.source import CapturedSource, ReadAhead
from raysd.draft.streaming import Streamed
from raysd.draft.train import Deals
from raysd.draft.unfinished import Desk, Training, save
from raysd.draft.workers import Sharing, Together
from raysd.errors import ExperimentError, RaysdError, StageError, TryAgainError
from raysd.experiment import Experiment
from raysd.experiment.hardware import StageResources
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation
from raysd.target import resolve_target

POLL_S = 1.0
QUIET_S = 10.0
"""After so long without a word, the last one is told again: telling is what finds out that the lease is lost."""
START_TIMEOUT, START_TIMEOUT_S = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", 180
"""For workers to start, unless the variable says otherwise (`hardware.env`). Ray Train's own 60 s are short for nodes that have to read all of torch from a
large image. It is also what is lost when a node dies for good: right after it Ray Train still counts on it, and asks once more for as many workers."""
RESIZE_S = 300.0
"""Between two looks for room for more workers, after some have been lost: all of them then start again from the last checkpoint."""
COLLECTIVE_TIMEOUT_S = 7200
"""For all workers to meet. One fetches the captured states for its node, or hands a checkpoint over to a slow store, while the others wait; of a worker that
has died they hear from Ray."""
LET_GO_S = 10.0
INCOMING, NEWEST = "incoming.pt", "newest.pt"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Order:
    """What the workers are asked to do."""

    experiment: Experiment
    learn_from: Path | Stored | int
    """The captured states: a folder that all machines share, or where each opens its own. On a stream the number of conversations of the choose split, which
    are dealt first."""
    vocabulary: torch.Tensor
    """int64, ascending: the target tokens that the draft can propose."""
    post: Any
    """The handle of the Post."""


def learn_on_workers(run: StageRun, target: Path, vocabulary: torch.Tensor, desk: Desk, deals: Deals | None) -> Training:
    """Trains on `train.workers` workers and returns what came of it. To be called in the main thread. deals: of a stream; None: they learn from what is captured.

    Interrupted, the training goes on from its last checkpoint, which is at most `train.checkpoint_every_s` old: no worker is asked for another.
    Raises what a worker raised, if it is a RaysdError, and what the desk or the stream raises. Raises TryAgainError if workers died more often than
    `train.max_failures`, on a stream if one died, or if Ray itself failed; StageError if a worker failed otherwise.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    section, newest, folder = run.experiment.train, desk.newest(), run.work / "post"
    folder.mkdir()
    if newest is not None:
        training = Training(**newest["training"])
        if training.steps == section.steps and training.evaluated():  # an attempt before came further than this, and no worker is needed
            training.resumed_steps.append(training.steps)
            return training
        torch.save(newest, folder / NEWEST)
    with connected("the training", "train.workers", "run again: the training goes on from its last checkpoint"):
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # By the address Ray Train's own actors find this cluster, whatever else of Ray there is on the machine.
        environment = {"env_vars": {START_TIMEOUT: os.environ.get(START_TIMEOUT, str(START_TIMEOUT_S)), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
        # A node's worker reads from the post while others do and one waits for it, and on a stream each waits for its share.
        post = ray.remote(Post).options(num_cpus=0, max_concurrency=32 + section.workers, scheduling_strategy=here, runtime_env=environment).remote(folder)
        learn_from = deals.choose if deals is not None else run.elsewhere.get("capture") or run.inputs["capture"]
        order = Order(run.experiment, learn_from, vocabulary, post)
        desk.progress(f"waiting for {section.workers} workers")
        with _dealing(post, deals) as dealing:
            try:
                _attend(post, post.fit.remote(order, run.work / "ray"), desk, folder, partial(desk.progress, f"waiting for {section.workers} workers"), dealing)
            except BaseException:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(post.let_go.remote(), timeout=LET_GO_S)
                raise
    return Training(**desk.newest()["training"])


def worker_resources(resources: StageResources) -> dict[str, float]:
    """What each worker reserves, as Ray Train's `resources_per_worker`: what the stage asks for; a core if it asks for nothing."""
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes, **resources.custom}
    return {name: amount for name, amount in asked.items() if amount} or {"CPU": 1}


def worker_counts(section: TrainSection, streams: bool) -> int | tuple[int, int]:
    """How many workers there may be, as Ray Train's `num_workers`. Where each has all of the draft, as many as there is room for, up to `train.workers`: the
    sum over a step does not depend on it. Workers that share the draft because it is too large for one of them are all needed; so are those of a stream, whose
    shares are dealt beforehand."""
    return section.workers if section.parallel == "fsdp" or streams else (1, section.workers)


@contextlib.contextmanager
def _dealing(post: Any, deals: Deals | None) -> Iterator[Future[None]]:
    """A thread that deals meanwhile; its future tells what went wrong with it."""
    stop, pool = threading.Event(), ThreadPoolExecutor(1)
    dealing = pool.submit(_deal, post, iter(()) if deals is None else deals.shares, stop)
    try:
        yield dealing
    finally:
        stop.set()
        wait([dealing], 2 * POLL_S)  # longer only if it waits for an answer, and the engine's end ends that
        pool.shutdown(wait=False)


def _deal(post: Any, shares: Iterator[list[list[Streamed]]], stop: threading.Event) -> None:
    import ray

    # No variable holds what the workers have taken while the next is waited for: its place in the stream is free then.
    for number in itertools.count():
        deal = next(shares, None)
        if deal is None or stop.is_set():
            return
        ray.get(post.deal.remote(number, deal))
        while not ray.get(post.all_taken.remote()):
            if stop.is_set():
                return
        del deal


def _attend(post: Any, fitting: Any, desk: Desk, folder: Path, last: Callable[[], None], dealing: Future[None]) -> None:
    """Does what the workers ask of the stage, until the training has ended. Raises RaysdError if it or the dealing ended badly. last: tells the progress again."""
    import ray

    told_s, noted, ended = time.monotonic(), 0, False
    while not ended:
        ended = bool(ray.wait([fitting], timeout=0)[0])  # asked first: what was sent before the end is then among the messages
        for kind, content in ray.get(post.messages.remote()):
            if kind == "progress":
                last, told_s = partial(desk.progress, *content[0], **content[1]), time.monotonic()
                last()
            elif kind == "note" and content["step"] > noted:  # workers that start again tell all of the curve again
                noted = content["step"]
                desk.note(content)
            elif kind == "keep":
                desk.keep(torch.load(folder / INCOMING, map_location="cpu", mmap=True, weights_only=True))
                os.replace(folder / INCOMING, folder / NEWEST)
                ray.get(post.kept.remote())
            elif kind == "failed":
                raise content
        if dealing.done():
            dealing.result()
        if time.monotonic() - told_s > QUIET_S:
            told_s = time.monotonic()
            last()
    error = ray.get(fitting)
    if error is not None:
        raise error


class Post:
    """The actor between the workers and the stage. Its methods run in threads, and some wait for others."""

    def __init__(self, folder: Path) -> None:
        """folder: of the stage, on this node. A checkpoint that arrives becomes INCOMING; NEWEST is the one that the stage has kept last."""
        self._folder = folder
        self._changed = threading.Condition()
        self._messages: collections.deque[tuple[str, Any]] = collections.deque()
        self._group = 0
        self._incoming: BinaryIO | None = None
        self._keeping = False
        self._run_id: str | None = None
        self._dealt, self._shares = -1, {}
        """The number of the last deal, and the shares of it, by rank, that have not been taken."""

    def fit(self, order: Order, storage: Path) -> RaysdError | None:
        """Runs the training; returns why it failed, if it did. storage: a folder for Ray Train's own notes."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
        from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

        section, resources, streams = order.experiment.train, worker_resources(order.experiment.hardware.of_stage("train")), isinstance(order.learn_from, int)
        failures = 0 if streams else section.max_failures
        trainer = TorchTrainer(
            _work, train_loop_config={"order": order}, torch_config=TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
            scaling_config=ScalingConfig(num_workers=worker_counts(section, streams), use_gpu="GPU" in resources, resources_per_worker=resources,
                                         elastic_resize_monitor_interval_s=RESIZE_S),
            run_config=RunConfig(name="train", storage_path=str(storage), worker_runtime_env={"env_vars": TRAIN_WORKER_ENVIRONMENT},
                                 failure_config=FailureConfig(max_failures=failures, controller_failure_limit=failures)))
        self._run_id = trainer.train_run_context.run_id
        try:
            trainer.fit()
        except TrainingFailedError as err:
            failed = err.worker_failures if isinstance(err, WorkerGroupError) else {}
            if failed and all(isinstance(failure, UserExceptionWithTraceback) for failure in failed.values()):
                rank, failure = min(failed.items())
                return StageError(what=f"worker {rank} ended on an unexpected error: {last_line(failure)}", where="train.workers", fix="the log holds the traceback")
            often, where = ("one of them died beside a stream", "train.workers") if streams else (f"died more often than {failures} times", "train.max_failures")
            return TryAgainError(what=f"the workers could not start, or {often}: {last_line(err)}", where=where,
                                 fix="look at the nodes, and run again: the training goes on from its last checkpoint")
        return None

    def let_go(self) -> None:
        """Takes back what the trainer has asked the cluster for. Ray 2.60 holds it for three minutes after a trainer that was ended from outside, as it does
        after one that was killed, and until then the next one finds no room."""
        from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import TrainAutoscalingCoordinatorClient

        if self._run_id is not None:
            TrainAutoscalingCoordinatorClient(f"train-{self._run_id}").cancel_resource_request()

    def messages(self) -> list[tuple[str, Any]]:
        """What the workers have sent since the last call; waits up to POLL_S for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, POLL_S)
            found = list(self._messages)
            self._messages.clear()
            return found

    def kept(self) -> None:
        """Says that the stage has kept the checkpoint that arrived."""
        with self._changed:
            self._keeping = False
            self._changed.notify_all()

    def open_group(self) -> tuple[int, int]:
        """Makes way for workers that start: returns their group's number, and the bytes of the checkpoint that they go on from, 0 if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._keeping)  # by the stage, of the group before
            self._group += 1
            newest = self._folder / NEWEST
            return self._group, newest.stat().st_size if newest.exists() else 0

    def read(self, offset: int) -> bytes:
        """A piece of the newest checkpoint."""
        with (self._folder / NEWEST).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def tell(self, group: int, kind: str, content: Any) -> None:
        """Passes something on to the stage."""
        with self._changed:
            if group == self._group:
                self._send(kind, content)

    def write(self, group: int, piece: bytes, first: bool) -> None:
        """Takes a piece of a checkpoint."""
        with self._changed:
            self._check(group)
            if first:
                self._incoming = (self._folder / INCOMING).open("wb")
            self._incoming.write(piece)

    def keep(self, group: int) -> None:
        """Returns when the stage has kept the checkpoint that was written."""
        with self._changed:
            self._check(group)
            self._incoming.close()
            self._keeping = True
            self._send("keep", None)
            self._changed.wait_for(lambda: not self._keeping)

    def deal(self, number: int, shares: list[list[Streamed]]) -> None:
        """Lays out what each worker, by rank, takes next."""
        with self._changed:
            self._dealt, self._shares = number, dict(enumerate(shares))
            self._changed.notify_all()

    def all_taken(self) -> bool:
        """Whether all have taken what was laid out last; waits up to POLL_S for it."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._shares, POLL_S)

    def share(self, number: int, rank: int) -> list[Streamed]:
        """A worker's share of a deal; waits until it is laid out."""
        with self._changed:
            self._changed.wait_for(lambda: self._dealt == number)
            return self._shares[rank]

    def took(self, rank: int) -> None:
        """Says that a worker has fetched what lay out for it."""
        with self._changed:
            del self._shares[rank]
            self._changed.notify_all()

    def _send(self, kind: str, content: Any) -> None:
        self._messages.append((kind, content))
        self._changed.notify_all()

    def _check(self, group: int) -> None:
        if group != self._group:
            raise RuntimeError("other workers have taken this one's place")


class FarDesk:
    """A worker's Desk: what it reports to is at the post."""

    def __init__(self, post: Any, group: int, rank: int, newest: Path | None) -> None:
        """newest: the checkpoint to go on from, on this machine."""
        self._post, self._group, self._first, self._newest = post, group, rank == 0, newest

    def progress(self, *doing: Any, **figures: float) -> None:
        self._tell("progress", (doing, figures))

    def note(self, row: dict[str, Any]) -> None:
        self._tell("note", row)

    def keep(self, document: dict[str, Any]) -> None:
        import ray

        with _Pieces(self._post, self._group) as pieces:
            save(document, pieces)
        ray.get(self._post.keep.remote(self._group))

    def newest(self) -> dict[str, Any] | None:
        """To be called once, by all workers."""
        if self._newest is None:
            return None
        # Mapped, not read: all workers of a machine share its pages, and most of it, the candidates, nobody needs but the first.
        document = torch.load(self._newest, map_location="cpu", mmap=True, weights_only=True)
        torch.distributed.barrier()
        self._newest.unlink(missing_ok=True)  # what is mapped stays
        return document

    def _tell(self, kind: str, content: Any) -> None:
        if self._first:
            import ray

            ray.get(self._post.tell.remote(self._group, kind, content))  # one after the other: the post's threads keep no order


class _Pieces:
    """A file to write to, which sends what it gets to the post in pieces of CHUNK_BYTES."""

    def __init__(self, post: Any, group: int) -> None:
        self._post, self._group, self._buffer, self._sent = post, group, bytearray(), False

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._send()

    def write(self, content: Any) -> int:
        content = memoryview(content)
        for start in range(0, len(content), CHUNK_BYTES):
            self._buffer += content[start:start + CHUNK_BYTES]
            if len(self._buffer) >= CHUNK_BYTES:
                self._send()
        return len(content)

    def flush(self) -> None:
        pass

    def _send(self) -> None:
        import ray

        ray.get(self._post.write.remote(self._group, bytes(self._buffer), not self._sent))
        self._buffer.clear()
        self._sent = True


def _work(config: dict[str, Order]) -> None:
    """A worker: Ray Train calls it in each, with the process group set up."""
    import ray
    from ray import train

    order, context = config["order"], train.get_context()
    opened = [ray.get(order.post.open_group.remote()) if context.get_world_rank() == 0 else None]
    torch.distributed.broadcast_object_list(opened, 0)
    group, newest_bytes = opened[0]
    try:
        _learn(order, group, newest_bytes)
    except RaysdError as err:
        # It returns then, so that Ray Train does not take it for a worker that has died, to be started again: the stage ends the others.
        ray.get(order.post.tell.remote(group, "failed", err))


def _learn(order: Order, group: int, newest_bytes: int) -> None:
    from ray import train

    context, experiment, section = train.get_context(), order.experiment, order.experiment.train
    kind = Sharing if section.parallel == "fsdp" else Together
    workers = kind(train.torch.get_device(), context.get_local_world_size())
    target = _once_a_node(lambda: resolve_target(experiment.target, no_progress))
    with tempfile.TemporaryDirectory(prefix="raysd-checkpoint-") as scratch:
        newest = _once_a_node(lambda: _fetch_newest(order.post, newest_bytes, Path(scratch) / NEWEST)) if newest_bytes else None
        desk = FarDesk(order.post, group, workers.rank, newest)
        source: ReadAhead
        if isinstance(order.learn_from, int):
            _once_a_node(check_in_memory)
            source = DealtSource(order.post, workers.rank, section.steps)
            choose = [conversation for _ in range(order.learn_from) for conversation in source.take()]
        else:
            folder = _once_a_node(lambda: captured_folder(order.learn_from))
            choose = Captured(folder, "choose")
            source = CapturedSource(Captured(folder, "train", truncated=section.truncated == "keep"), section, workers.rank, workers.count)
        learner = new_learner(experiment, target, order.vocabulary, workers)
        with source:
            learn(section, learner, source, choose, workers, desk)


class DealtSource(ReadAhead):
    """Takes what the stage deals (a Source)."""

    def __init__(self, post: Any, rank: int, steps: int) -> None:
        super().__init__(steps)
        self._post, self._rank = post, rank
        self._deals = itertools.count()

    def take(self) -> list[Conversation]:
        """This worker's share of the next deal. Raises StageError for states that cannot be right."""
        import ray

        share = ray.get(self._post.share.remote(next(self._deals), self._rank))
        found = [each.whole() for each in share]
        del share  # it refers to the states' place in the stream
        ray.get(self._post.took.remote(self._rank))
        return found

    def _read(self, number: int) -> list[Conversation]:
        return self.take()


def captured_folder(capture: Path | Stored) -> Path:
    """The captured states on this node, fetched if need be. Raises ExperimentError if they are in a folder that this node does not share."""
    if isinstance(capture, Stored):
        return open_store(capture.store).open(capture.key)
    if not (capture / "index.parquet").is_file():
        raise ExperimentError(what=f"the node {platform.node()} does not see the captured states", where=capture,
                              fix="name a folder on a file system that all nodes share, or s3://BUCKET/PREFIX, in `store:`")
    return capture


def _once_a_node(do: Callable[[], Answer]) -> Answer:
    """What `do` returns to the one worker of this node that calls it. Raises, at every worker, the RaysdError that it raised at any."""
    from ray import train

    context, answer = train.get_context(), None
    if context.get_local_rank() == 0:
        try:
            answer = do()
        except RaysdError as err:
            answer = err
    answers: list[Any] = [None] * context.get_world_size()
    torch.distributed.all_gather_object(answers, (context.get_node_rank(), context.get_local_rank(), answer))
    for _, _, each in answers:
        if isinstance(each, RaysdError):
            raise each
    return next(each for node, local, each in answers if (node, local) == (context.get_node_rank(), 0))


def _fetch_newest(post: Any, size_bytes: int, path: Path) -> Path:
    import ray

    with path.open("wb") as file:
        while file.tell() < size_bytes:
            file.write(ray.get(post.read.remote(file.tell())))
    return path
