"""The nodes of a sweep: this machine, or several of a Ray cluster with an actor on each that owns its engines.

Ray places one bundle of `hardware.resources.sweep` on each of `sweep.nodes` different nodes. They must be alike: a sweep tells how much one arm is faster
than another on a kind of machine, and a block on another kind would answer another question. With `sweep.client: other_node` each of them has a further node
that puts the load on it, of whatever kind; engines then listen on their node's own address, and ask for a key.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from raysd.artifacts.stage import StageRun, Stored, no_progress
from raysd.backends.load_shards import ShardActor, run_far
from raysd.backends.ray_driver import connected, received
from raysd.backends.stores import open_store
from raysd.backends.vllm_server import launch
from raysd.checks.draft_served import with_served_draft
from raysd.errors import ExperimentError, NodeLostError, RaysdError, TryAgainError
from raysd.experiment import Experiment
from raysd.experiment.hardware import StageResources
from raysd.hardware.catalogue import CPU
from raysd.load.run import run_load
from raysd.prompts.prompt_set import PromptSet
from raysd.sweep.bench import Answers, Bench, Node
from raysd.sweep.cells import Cell, Engine
from raysd.sweep.engine import Launch
from raysd.sweep.lossless import Comparison
from raysd.sweep.measure import Measured
from raysd.sweep.telemetry import devices_free

PLACE_TIMEOUT_S = 300
"""For Ray to find the nodes; an autoscaling cluster may have to start them first."""
STOP_S = 60
"""For the engines of a node to end; after it the actor is killed, and they end with it."""
LOG_BYTES = 2**22
"""Of the end of an engine's log that is brought from another node."""
ALIKE_MEMORY_FRAC = 0.05
"""By how much the memory of nodes that are alike may differ: what firmware keeps to itself."""


@contextlib.contextmanager
def open_nodes(run: StageRun, launch: Launch = launch) -> Iterator[Sequence[Node]]:
    """The nodes that a sweep asks for (OpenNodes)."""
    section = run.experiment.sweep
    if section.nodes > 1 or section.client == "other_node":
        with _far_nodes(run, launch) as nodes:
            yield nodes
        return
    run = with_served_draft(run)
    prompts = run.prompts.alone("report")
    with contextlib.closing(Bench(platform.node(), run.experiment, prompts, run.inputs, launch, psutil.virtual_memory().available, run.out / "logs",
                                  memory_of_engines(run.experiment))) as bench:
        yield [bench]


def memory_of_engines(experiment: Experiment) -> Callable[[], None]:
    """Waits until nobody holds the memory of the engines' devices; for nothing on a CPU, where it is free as soon as a process ends."""
    return (lambda: None) if experiment.hardware.name == CPU else partial(devices_free, os.environ)


@contextlib.contextmanager
def _far_nodes(run: StageRun, launch: Launch) -> Iterator[Sequence[Node]]:
    """Raises ExperimentError for nodes that are not alike; TryAgainError if there are not so many, or Ray fails."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    section, resources = run.experiment.sweep, run.experiment.hardware.of_stage("sweep")
    gpus = {"num_gpus": resources.gpus} if resources.gpus else {}  # the actor itself holds them: so Ray tells it which are its own
    with connected("the sweep", "sweep.nodes"):
        beside = section.nodes if section.client == "other_node" else 0
        group = placement_group([bundle(resources)] * section.nodes + [{"CPU": 1}] * beside, strategy="STRICT_SPREAD")
        far: list[FarNode] = []
        try:
            run.progress(f"waiting for {section.nodes + beside} nodes")
            if not group.wait(PLACE_TIMEOUT_S):
                raise TryAgainError(what=f"Ray found no {section.nodes + beside} different nodes with {bundle(resources)} free each in {PLACE_TIMEOUT_S} s",
                                    where="sweep.nodes", fix="look at `ray status`; ask for fewer nodes, or for less in hardware.resources.sweep")
            actors = [ray.remote(concurrency_groups={"control": 1})(NodeActor).options(
                num_cpus=0, max_restarts=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                # Ray would kill the actor's own children when it ends it, and those alone: the engines below them would stay. They end by themselves.
                runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}, **gpus).remote()
                for index in range(section.nodes)]
            clients = [ray.remote(ShardActor).options(num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, section.nodes + index)).remote() for index in range(beside)]
            machines = [_received(actor.machine.remote(), f"number {index + 1}") for index, actor in enumerate(actors)]
            check_alike(machines)
            inputs = {stage: run.elsewhere.get(stage, folder) for stage, folder in run.inputs.items()}
            prompts = run.prompts.alone("report")
            far = [FarNode(name, run.experiment, actor) for name, actor in zip(different([machine["host"] for machine in machines]), actors, strict=True)]
            opened = [(node, node.actor.open.remote(node.name, run.experiment, prompts, inputs, launch, client)) for node, client in itertools.zip_longest(far, clients)]
            for node, reference in opened:
                node.together = _received(reference, node.name)
            yield far
        finally:
            stopping = [(node, node.actor.stop.options(concurrency_group="control").remote()) for node in far]
            for node, reference in stopping:
                with contextlib.suppress(RaysdError):  # it has ended already, or ends with the connection
                    _received(reference, node.name, STOP_S)
            remove_placement_group(group)


def bundle(resources: StageResources) -> dict[str, float]:
    """What Ray reserves on each node; a core if nothing is asked for, since a bundle of nothing is none."""
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": float(resources.memory_bytes), **resources.custom}
    return {name: amount for name, amount in asked.items() if amount} or {"CPU": 1}


def check_alike(machines: Sequence[Mapping[str, Any]]) -> None:
    """Raises ExperimentError, naming two nodes and what differs, unless all have the same processors, as many of them, and as much memory."""
    first = machines[0]
    for other in machines[1:]:
        differ = [name for name in ("cpu_model", "cpu_cores", "gpus") if other[name] != first[name]]
        differ += ["memory_bytes"] if abs(other["memory_bytes"] / first["memory_bytes"] - 1) > ALIKE_MEMORY_FRAC else []
        if differ:
            words = "; ".join(f"{name}: {first[name]} and {other[name]}" for name in differ)
            raise ExperimentError(what=f"the nodes {first['host']} and {other['host']} are not alike ({words}): their blocks would answer different questions",
                                  where="sweep.nodes", fix="name a resource that only one kind of node has in hardware.resources.sweep.custom, or use sweep.nodes: 1")


def different(hosts: Sequence[str]) -> list[str]:
    """A name for each node: its host's, numbered where several are on one host."""
    seen: Counter[str] = Counter()
    names = []
    for host in hosts:
        seen[host] += 1
        names.append(host if hosts.count(host) == 1 else f"{host}.{seen[host]}")
    return names


class NodeActor:
    """Owns the engines of a node, in a process of its own there."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def machine(self) -> dict[str, Any]:
        """What must be alike on all nodes, and the host's name."""
        import ray

        from raysd.sweep.provenance import node_facts

        host = node_facts()["host"]
        gpus = [name for name in ray.get_runtime_context().get_assigned_resources() if name.startswith("accelerator_type:")]
        return {"host": host["name"], "cpu_model": host["cpu_model"], "cpu_cores": host["cpu_cores"], "memory_bytes": host["memory_bytes"], "gpus": gpus}

    def open(self, name: str, experiment: Experiment, prompts: PromptSet, inputs: Mapping[str, Path | Stored], launch: Launch, client: Any) -> bool:
        """Gets the drafts to this node, and decides how its engines are held; whether together. Nothing is started yet. client: the handle of a ShardActor that puts
        the load on them, on another node; None: this process does."""
        import ray

        put_load = run_load
        if client is not None:
            launch, put_load = partial(launch, host=ray.util.get_node_ip_address(), api_key=secrets.token_hex(16)), partial(run_far, client)
        scratch = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="raysd-sweep-")))
        folders = {stage: open_store(place.store).open(place.key) if isinstance(place, Stored) else place for stage, place in inputs.items()}
        (scratch / "work").mkdir()
        run = with_served_draft(StageRun(experiment, None, folders, None, scratch / "work", scratch / "out", no_progress))
        self._logs = scratch / "logs"
        self._bench = self._held.enter_context(contextlib.closing(
            Bench(name, run.experiment, prompts, folders, launch, psutil.virtual_memory().available, self._logs, memory_of_engines(run.experiment), put_load)))
        return self._bench.together

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the bench."""
        return getattr(self._bench, method)(*arguments)

    def logs(self) -> dict[str, bytes]:
        """The ends of the logs."""
        return {path.name: path.read_bytes()[-LOG_BYTES:] for path in sorted(self._logs.glob("*.log"))}

    def stop(self) -> None:
        """Ends the engines; a call that is at work fails."""
        self._held.close()


class FarNode:
    """The stage's end of a NodeActor (a Node)."""

    def __init__(self, name: str, experiment: Experiment, actor: Any) -> None:
        self.name, self.section, self.actor = name, experiment.sweep, actor
        self.together = False

    def to_start(self, engine: Engine) -> list[Engine]:
        return self._call("to_start", engine)

    def prepare(self, engine: Engine) -> bool:
        return self._call("prepare", engine)

    def measure(self, cell: Cell) -> Measured:
        return self._call("measure", cell)

    def answer(self, engine: Engine) -> Answers | None:
        return self._call("answer", engine)

    def compare(self, none: Answers, arm: Answers) -> list[Comparison]:
        return self._call("compare", none, arm)

    def facts(self) -> dict[str, Any]:
        return self._call("facts")

    def logs(self) -> dict[str, bytes]:
        try:
            return {f"{self.name}-{name}": log for name, log in _received(self.actor.logs.remote(), self.name, STOP_S).items()}
        except NodeLostError:
            return {}  # gone with the node

    def _call(self, method: str, *arguments: Any) -> Any:
        return _received(self.actor.call.remote(method, *arguments), self.name)



def _received(reference: Any, node: str, timeout_s: float | None = None) -> Any:
    return received(reference, f"the sweep on the node {node}", "sweep.nodes", NodeLostError, timeout_s)
