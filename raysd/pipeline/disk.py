"""Whether a stage's files will fit on the disk, asked before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from raysd.errors import ArtifactError
from raysd.experiment import Experiment

FLOOR_BYTES = {"capture": 2**28, "train": 2**29, "quantize": 2**28, "sweep": 2**27, "report": 2**25}
"""What a stage needs on top of what grows with the target: logs, tables, a small draft and its checkpoints."""

PROMPT_TOKENS = 64
"""Assumed length of a prompt, for this estimate alone."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def disk_need_bytes(stage: str, experiment: Experiment, conversations: int, hidden_size: int | None) -> int:
    """A rough need of one stage, meant to catch a disk that is far too small.

    conversations: how many the capture answers. hidden_size: the target's; None while the target is not on this machine.
    """
    if stage != "capture" or hidden_size is None or experiment.capture is None:
        return FLOOR_BYTES[stage]
    states = len(experiment.draft.aux_layers or [0, 0, 0]) + 1  # the aux layers and the last hidden state
    token_bytes = states * hidden_size * ELEMENT_BYTES[experiment.target.dtype]
    return FLOOR_BYTES[stage] + conversations * (experiment.capture.max_tokens + PROMPT_TOKENS) * token_bytes


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
