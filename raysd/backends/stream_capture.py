"""The engines of a stream: a Ray actor that owns them, and a queue in Ray's object store between it and the training.

The queue is bounded by what is asked for: every answer that is asked for, and whose states have not been taken yet, may lie in the object store, and there
are never more of them than fit into `capture.queue_bytes` at their largest. The actor reads an engine's states from memory only for an answer that was asked
for, and asks the engines for the next group only when it has read all of the last one. So an engine waits when training does not follow, and what waits for
training is at most the queue and a group.

An answer comes in two objects, its words and its states. The stage's process, which asks for them, owns both. One worker is that process; of several each
fetches the states of its share from the node of the actor, and their place is free when the stage's process has been told, and lets go of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raysd.artifacts.stage import no_progress
from raysd.backends.memory_folder import MEMORY, memory_folder
from raysd.backends.ray_driver import CHUNK_BYTES, connected, received
from raysd.backends.vllm_capture import capture_engine
from raysd.draft.streaming import Arrival
from raysd.errors import ExperimentError, RaysdError, StageError, TryAgainError
from raysd.experiment import Experiment
from raysd.experiment.hardware import StageResources
from raysd.hidden_states.capture import Answer, EngineFactory, Request
from raysd.hidden_states.queue import MostBytes

Words = tuple[int, list[int], str]
"""An answer's index in its group, tokens and finish reason."""

LARGEST_STORE_FRAC = 0.8
"""Of the object store, for the queue: what does not fit beside what else there is, Ray puts on a disk, whether or not spilling is off."""
CHECKPOINT_BYTES = 2 * CHUNK_BYTES
"""What several workers put beside the queue: pieces of their checkpoints on the way to the stage. It must not get Ray to spill either,
which it does, where that is on, when the store is at LARGEST_STORE_FRAC."""
CLOSED_POLL_S = 1.0
"""How soon a thread that waits for an answer finds out that the stream is closed."""
STOP_S = 60
"""Longest wait for the engines to end; after it the actor is killed, and they end with it."""


@contextlib.contextmanager
def stream_engine(experiment: Experiment, layer_ids: list[int], most_bytes: MostBytes, engine_factory: EngineFactory = capture_engine) -> Iterator[RayStream]:
    """The running engines of a stream (a StreamFactory); every process of them has ended on exit.

    The actor reserves what `hardware.resources.capture` says; without, it is on this process's node. Raises ExperimentError for a queue that is too large for the
    object store; StageError for too little memory, and for an object store that is not in memory; EngineError if an engine does not start; TryAgainError if Ray fails.
    """
    import ray

    spare_bytes = 0 if experiment.train.workers == 1 else CHECKPOINT_BYTES + most_bytes.conversation
    with connected("the stream", "capture.mode: stream"):
        options = actor_options(experiment.hardware.of_stage("capture"), ray.get_runtime_context().get_node_id())
        actor = ray.remote(concurrency_groups={"control": 1})(CaptureActor).options(**options).remote(engine_factory)
        stream = RayStream(actor, experiment, experiment.capture.queue_bytes // most_bytes.conversation)
        try:
            if experiment.train.workers > 1:
                check_in_memory()  # the choose split passes through this node's store, too
            _received(actor.start.remote(experiment, layer_ids, most_bytes.group, spare_bytes))
            yield stream
        finally:
            stream.close()
            with contextlib.suppress(RaysdError):  # it has ended already, or ends with the connection
                _received(actor.stop.options(concurrency_group="control").remote(), STOP_S)


def actor_options(resources: StageResources, here: str) -> dict[str, Any]:
    """What `hardware.resources.capture` asks for, as Ray takes it of an actor; nothing asked is a place on the node `here`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "memory": resources.memory_bytes, "resources": dict(resources.custom)}
    options = {name: value for name, value in asked.items() if value}
    placed = {} if options else {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    # Ray would kill the actor's own children when it ends it, and those alone: the engines below them would stay. They end by themselves.
    return {"num_cpus": 0, "max_restarts": 0, **options, **placed, "runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}}


class CaptureActor:
    """Owns the engines, in a process of its own on the node where they run. Its calls come one after the other, but for `stop`."""

    def __init__(self, engine_factory: EngineFactory) -> None:
        self._engine_factory, self._held = engine_factory, contextlib.ExitStack()
        self._groups: deque[list[Request]] = deque()
        self._answers: Iterator[Answer] = iter(())

    def start(self, experiment: Experiment, layer_ids: list[int], group_bytes: int, spare_bytes: int) -> None:
        """Returns when the engines are ready. Raises what `stream_engine` says of the node."""
        from raysd.target import resolve_target

        check_object_store(experiment.capture.queue_bytes, spare_bytes)
        scratch = self._held.enter_context(memory_folder(group_bytes, "capture.shard_conversations"))
        target = resolve_target(experiment.target, no_progress)
        self._engine = self._held.enter_context(self._engine_factory(experiment, target, layer_ids, scratch))

    def ask(self, group: list[Request]) -> None:
        """Puts a group behind those that have been asked."""
        self._groups.append(group)

    def take(self) -> tuple[Words, np.ndarray]:
        """The next answer of the groups that have been asked; waits until it is there. A group is begun when the one before has been taken.

        The states are bytes [T, L, H * bytes of an element]: Ray hands arrays over without packing them.
        """
        while True:
            answer = next(self._answers, None)
            if answer is not None:
                return (answer.index, answer.token_ids, answer.finish_reason), answer.states_TLH.contiguous().view(torch.uint8).numpy()
            self._answers = self._engine.answers([self._groups.popleft()])

    def stop(self) -> None:
        """Ends the engines; a `take` that waits fails."""
        self._held.close()


class RayStream:
    """The driver's end of the queue (a StreamEngine)."""

    def __init__(self, actor: Any, experiment: Experiment, slots: int) -> None:
        """slots: how many answers may be in the object store."""
        self._actor, self._dtype, self._slots = actor, getattr(torch, experiment.target.dtype), slots
        self._waiting, self._closed = threading.Lock(), threading.Event()
        self._arrived: weakref.WeakSet[StatesInStore] = weakref.WeakSet()
        """Of what was handed over or put, what this process still holds."""

    def answers(self, groups: Iterable[Sequence[Request]]) -> Iterator[Arrival]:
        asked: deque[tuple[int, Any, Any]] = deque()  # how many requests there were before the answer's group, and the answer
        before = 0
        for group in groups:
            self._actor.ask.remote(list(group))
            for _ in group:
                asked.append((before, *self._actor.take.options(num_returns=2).remote()))
                while asked and len(asked) + len(self._arrived) >= self._slots:
                    yield self._arrival(*asked.popleft())
            before += len(group)
        while asked:
            yield self._arrival(*asked.popleft())

    def close(self) -> None:
        """Ends whoever waits for an answer, in whichever thread: when this returns nobody does, and Ray's connection can be taken down."""
        self._closed.set()
        with self._waiting:
            pass

    def put(self, states_TLH: torch.Tensor) -> StatesInStore:
        import ray

        return self._states(ray.put(states_TLH.contiguous().view(torch.uint8).numpy()))

    def _arrival(self, before: int, words: Any, reference: Any) -> Arrival:
        import ray

        with self._waiting:
            while not self._closed.is_set() and not ray.wait([words], timeout=CLOSED_POLL_S)[0]:
                pass
            if self._closed.is_set():
                raise TryAgainError(what="the stream is closed", where="capture.mode: stream", fix="run again to go on from the last checkpoint")
            index, token_ids, finish_reason = _received(words)
        return Arrival(before + index, token_ids, finish_reason, self._states(reference))

    def _states(self, reference: Any) -> StatesInStore:
        states = StatesInStore(reference, self._dtype)
        self._arrived.add(states)
        return states


@dataclass(eq=False)
class StatesInStore:
    """An answer's states in Ray's object store (States): any process of the job may be given them."""

    reference: Any
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        # A copy: while the array lives, so does its place in the object store.
        return torch.from_numpy(_received(self.reference).copy()).view(self.dtype)


def check_object_store(queue_bytes: int, spare_bytes: int) -> None:
    """Raises ExperimentError or StageError unless this node's object store is clearly larger than the queue and what is to lie beside it, and in memory."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    store_bytes = int(node["Resources"]["object_store_memory"])
    largest_bytes = int(LARGEST_STORE_FRAC * store_bytes) - spare_bytes
    if queue_bytes > largest_bytes:
        raise ExperimentError(what=f"a queue of {queue_bytes} bytes is too much of Ray's object store on its node, which has {store_bytes}", where="capture.queue_bytes",
                              fix=f"use at most {max(0, largest_bytes)}, or a cluster whose object store is larger (ray start --object-store-memory); the local Ray's is not")
    check_in_memory()


def check_in_memory() -> None:
    """Raises StageError if this node's object store lies on a disk, where no hidden states are to go."""
    if plasma_folder() != str(MEMORY):
        raise StageError(what=f"Ray's object store lies in {plasma_folder()}, since {MEMORY} is too small for it", where="capture.mode: stream",
                         fix="give the container more shared memory (docker run --shm-size), or use capture.mode: disk")


def plasma_folder() -> str:
    """The folder that this node's object store lies in."""
    import ray

    ray.get(ray.put(np.zeros(2**20, dtype=np.uint8)))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next(os.path.dirname(line.split()[5]) for line in maps if "plasma" in line)


def _received(reference: Any, timeout_s: float | None = None) -> Any:
    return received(reference, "the capture", "capture.mode: stream", timeout_s=timeout_s)
