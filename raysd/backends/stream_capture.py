"""The engines of a stream: a Ray actor that owns them, and a queue in Ray's object store between it and the training.

The queue is bounded by what is asked for: every answer that is asked for, and has not been taken yet, may lie in the object store, and there are never
more of them than fit into `capture.queue_bytes` at their largest. The actor reads an engine's states from memory only for an answer that was asked for,
and asks the engines for the next group only when it has read all of the last one. So an engine waits when training does not follow, and what waits for
training is at most the queue and a group.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from raysd.artifacts.stage import no_progress
from raysd.backends.memory_folder import MEMORY, memory_folder
from raysd.backends.ray_driver import connected, last_line
from raysd.backends.vllm_capture import capture_engine
from raysd.draft.streaming import MostBytes
from raysd.errors import ExperimentError, RaysdError, StageError, TryAgainError
from raysd.experiment import Experiment
from raysd.experiment.hardware import StageResources
from raysd.hidden_states.capture import Answer, Request

Taken = tuple[int, list[int], str, np.ndarray]
"""An answer's index in its group, tokens, finish reason and states, as bytes [T, L, H * bytes of an element]: Ray hands arrays over without packing them."""

LARGEST_STORE_FRAC = 0.8
"""Of the object store, for the queue: what does not fit beside what else there is, Ray puts on a disk, whether or not spilling is off."""
STOP_S = 60
"""Longest wait for the engines to end; after it the actor is killed, and they end with it."""


@contextlib.contextmanager
def stream_engine(experiment: Experiment, layer_ids: list[int], most_bytes: MostBytes) -> Iterator[RayStream]:
    """The running engines of a stream (a StreamFactory); every process of them has ended on exit.

    The actor reserves what `hardware.resources.capture` says; without, it is on this process's node. Raises ExperimentError for a queue that is too small
    for one conversation, or too large for the object store; StageError for too little memory; EngineError if an engine does not start; TryAgainError if Ray
    fails.
    """
    import ray

    queue_bytes = experiment.capture.queue_bytes
    if most_bytes.conversation > queue_bytes:
        raise ExperimentError(what=f"the hidden states of one conversation take up to {most_bytes.conversation} bytes, the queue has {queue_bytes}",
                              where="capture.queue_bytes", fix=f"raise it to at least {most_bytes.conversation}, with an object store of more (ray start "
                              "--object-store-memory), or lower capture.max_tokens")
    with connected("the stream", "capture.mode: stream"):
        options = actor_options(experiment.hardware.of_stage("capture"), ray.get_runtime_context().get_node_id())
        actor = ray.remote(concurrency_groups={"control": 1})(CaptureActor).options(**options).remote()
        try:
            _received(actor.start.remote(experiment, layer_ids, most_bytes.group))
            yield RayStream(actor, experiment, queue_bytes // most_bytes.conversation)
        finally:
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

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._groups: deque[list[Request]] = deque()
        self._answers: Iterator[Answer] = iter(())

    def start(self, experiment: Experiment, layer_ids: list[int], group_bytes: int) -> None:
        """Returns when the engines are ready. Raises what `stream_engine` says of the node."""
        from raysd.target import resolve_target

        check_object_store(experiment.capture.queue_bytes)
        scratch = self._held.enter_context(memory_folder(group_bytes, "capture.shard_conversations"))
        target = resolve_target(experiment.target, no_progress)
        self._engine = self._held.enter_context(capture_engine(experiment, target, layer_ids, scratch))

    def ask(self, group: list[Request]) -> None:
        """Puts a group behind those that have been asked."""
        self._groups.append(group)

    def take(self) -> Taken:
        """The next answer of the groups that have been asked; waits until it is there. A group is begun when the one before has been taken."""
        while True:
            answer = next(self._answers, None)
            if answer is not None:
                return answer.index, answer.token_ids, answer.finish_reason, answer.states_TLH.contiguous().view(torch.uint8).numpy()
            self._answers = self._engine.answers([self._groups.popleft()])

    def stop(self) -> None:
        """Ends the engines; a `take` that waits fails."""
        self._held.close()


class RayStream:
    """The driver's end of the queue (a StreamEngine)."""

    def __init__(self, actor: Any, experiment: Experiment, slots: int) -> None:
        """slots: how many answers may be in the object store."""
        self._actor, self._dtype, self._slots = actor, getattr(torch, experiment.target.dtype), slots

    def answers(self, groups: Iterable[Sequence[Request]]) -> Iterator[Answer]:
        asked: deque[tuple[int, Any]] = deque()  # how many requests there were before the answer's group, and the answer
        before = 0
        for group in groups:
            self._actor.ask.remote(list(group))
            for _ in group:
                asked.append((before, self._actor.take.remote()))
                if len(asked) == self._slots:
                    yield self._taken(*asked.popleft())
            before += len(group)
        while asked:
            yield self._taken(*asked.popleft())

    def _taken(self, before: int, reference: Any) -> Answer:
        index, token_ids, finish_reason, states = _received(reference)
        # A copy: while the array lives, so does its place in the object store.
        return Answer(before + index, token_ids, finish_reason, torch.from_numpy(states.copy()).view(self._dtype))


def check_object_store(queue_bytes: int) -> None:
    """Raises ExperimentError or StageError unless this node's object store is clearly larger than the queue, and in memory."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    store_bytes = int(node["Resources"]["object_store_memory"])
    if queue_bytes > LARGEST_STORE_FRAC * store_bytes:
        raise ExperimentError(what=f"a queue of {queue_bytes} bytes is too much of Ray's object store on its node, which has {store_bytes}", where="capture.queue_bytes",
                              fix=f"use at most {int(LARGEST_STORE_FRAC * store_bytes)}, or start Ray with a larger --object-store-memory")
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
    """What the actor's call gave or raised. Raises TryAgainError if the actor has ended."""
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as err:
        raise err.cause if isinstance(err.cause, RaysdError) else StageError(what=f"the capture actor failed: {err.cause!r}", where="capture.mode: stream",
                                                                             fix="its lines are in the job's log") from err
    except ray.exceptions.RayError as err:
        raise TryAgainError(what=f"the capture actor ended: {last_line(err)}", where="capture.mode: stream",
                            fix="run again to go on from the last checkpoint; if it happens again, look at the memory of its node") from err
