"""What a finished sweep tells beside its cells: how long its engines took to start, and how many of them the machines hold."""

from __future__ import annotations

import json
from pathlib import Path

from raysd.deployment.recommend import Ground
from raysd.errors import ArtifactError
from raysd.experiment import Experiment
from raysd.hardware.catalogue import CPU, find_machine
from raysd.report.sides import Side


def ground_of(side: Side) -> Ground:
    """Of a sweep as it is named on the command line. Raises ArtifactError for a provenance.json that does not parse."""
    start_s = engine_start_s(side.folder / "provenance.json")
    if side.experiment is None:
        return Ground(engine_start_s=start_s)
    return Ground(side.experiment.sweep.engine.max_num_seqs, start_s, fitting_replicas(side.experiment), side.pilot)


def engine_start_s(provenance: Path) -> float | None:
    """How long the slowest of the sweep's engines took to start; None if it does not tell."""
    if not provenance.is_file():
        return None
    try:
        nodes = json.loads(provenance.read_text(encoding="utf-8"))["nodes"]
        starts = [engine["start_s"] for facts in nodes.values() for engine in facts.get("engines", {}).values()]
        return max((float(start) for start in starts if start is not None), default=None)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ArtifactError(what="what the sweep tells of its nodes does not parse", where=provenance, fix="remove it; how long an engine takes to start is then unknown") from err


def fitting_replicas(experiment: Experiment) -> int | None:
    """How many engines the nodes of the sweep hold at once; None: the catalogue does not say how many GPUs a node has."""
    machine, nodes = find_machine(experiment.hardware.name), experiment.sweep.nodes
    if machine.name == CPU:
        return nodes
    return None if machine.gpus_per_node is None else nodes * (machine.gpus_per_node // experiment.target.tensor_parallel)
