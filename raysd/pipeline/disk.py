"""What a stage is expected to write, and whether it will fit on the disk: asked before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from raysd.draft.shape import draft_shape
from raysd.errors import ArtifactError
from raysd.experiment import Experiment
from raysd.hidden_states.queue import ELEMENT_BYTES, state_bytes
from raysd.target.shape import TargetShape

FLOOR_BYTES = {"capture": 2**28, "train": 2**29, "quantize": 2**28, "sweep": 2**27, "report": 2**25}
"""What a stage needs beside its artifact: logs, checkpoints of a small draft, scratch files."""

PROMPT_TOKENS = 64
"""Assumed length of a prompt, for these estimates alone."""
REQUEST_BYTES = 200
"""Of one request in the tables of a sweep, and more for each token of its answer; the demo's 465 requests of at most 64 tokens took 230 kB."""
TOKEN_BYTES = 5
LOGS_BYTES = 2**17
"""Of one engine of a sweep."""
REPORT_BYTES = 2**20



def expected_bytes(stage: str, experiment: Experiment, conversations: int, target: TargetShape | None) -> int | None:
    """The size of a stage's artifact, roughly and rather too large; None if it depends on a target that is not on this machine.

    conversations: how many the capture answers.
    """
    sweep = experiment.sweep
    if stage == "sweep":
        slots = sum(concurrency for arm in sweep.arms for concurrency in sweep.concurrency_of(arm))
        slot_bytes = sum(sweep.requests_per_slot_of(workload) * (REQUEST_BYTES + TOKEN_BYTES * workload.osl) for workload in sweep.workloads)
        return slot_bytes * slots * len(sweep.k) * sweep.blocks + LOGS_BYTES * len(sweep.arms) * len(sweep.k)
    if stage == "report":
        return REPORT_BYTES
    if target is None:
        return None
    element_bytes = ELEMENT_BYTES[experiment.target.dtype]
    if stage == "capture":
        states = len(target.aux_layers(experiment.draft.aux_layers)) + 1  # and the last hidden state
        return conversations * (experiment.capture.max_tokens + PROMPT_TOKENS) * state_bytes(experiment, states, target.hidden_size)
    if experiment.draft.checkpoint is not None:  # quantize: at most what it starts from
        return sum(path.stat().st_size for path in experiment.draft.checkpoint.iterdir() if path.suffix in (".safetensors", ".bin"))
    shape = draft_shape(experiment.draft, target)
    wide = shape.high_precision_parameters()  # `fc` and the head stay in high precision by default
    return (wide + shape.layer_parameters()) * element_bytes if stage == "train" else wide * element_bytes + shape.layer_parameters()


def disk_need_bytes(stage: str, experiment: Experiment, conversations: int, target: TargetShape | None) -> int:
    """A rough need of one stage, meant to catch a disk that is far too small."""
    size_bytes = expected_bytes(stage, experiment, conversations, target) or 0
    if stage != "train":
        return FLOOR_BYTES[stage] + size_bytes
    element_bytes = ELEMENT_BYTES[experiment.target.dtype]
    return FLOOR_BYTES[stage] + size_bytes + size_bytes // element_bytes * training_bytes(experiment.train.served_checkpoints, element_bytes, experiment.train.workers)


def training_bytes(candidates: int, element_bytes: int, workers: int) -> int:
    """Of each weight while it is trained: two checkpoints and the one that is being written, with several workers also two on their way to it, each with the
    weight, two moments and the candidates in float32, and the candidates once more as they are served."""
    checkpoints = 3 if workers == 1 else 5
    return checkpoints * 4 * (3 + candidates) + candidates * element_bytes


def check_disk(folder: Path, need_bytes: int, doing: str) -> None:
    """Raises ArtifactError, naming the folder, if its disk has less free space than needed. The folder need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < need_bytes:
        raise ArtifactError(
            what=f"{doing} needs about {need_bytes / 1e9:.1f} GB of disk, {free_bytes / 1e9:.1f} GB are free",
            where=folder,
            fix="free disk space, or name a folder on a larger disk in `store:`",
        )
