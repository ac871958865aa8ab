"""A disk that is too small is told before the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import draft_shape
from raysd.errors import ArtifactError
from raysd.experiment import load_experiment
from raysd.pipeline.disk import FLOOR_BYTES, PROMPT_TOKENS, check_disk, disk_need_bytes, expected_bytes
from raysd.target.shape import read_shape


def test_capture_grows_with_tokens_layers_and_width(write_experiment: Callable[..., Path], tmp_path: Path):
    experiment = load_experiment(write_experiment(capture={"max_tokens": 100}, draft={"aux_layers": [1, 2]}))
    target = read_shape(tmp_path / "target")
    size = 10 * (100 + PROMPT_TOKENS) * 3 * 64 * 2
    assert expected_bytes("capture", experiment, conversations=10, target=target) == size
    assert disk_need_bytes("capture", experiment, 10, target) == FLOOR_BYTES["capture"] + size
    assert expected_bytes("capture", experiment, 10, None) is None
    assert disk_need_bytes("capture", experiment, 10, None) == FLOOR_BYTES["capture"]


def test_a_draft_is_as_large_as_it_will_be(write_experiment: Callable[..., Path], tmp_path: Path):
    import torch

    experiment = load_experiment(write_experiment(draft={"vocab_size": 64}))
    target = read_shape(tmp_path / "target")
    draft = Eagle3Draft(draft_shape(experiment.draft, target), torch.zeros(256, 64), torch.arange(64))
    wide = sum(p.numel() for p in draft.parameters() if p.dim() > 1)
    assert expected_bytes("train", experiment, 10, target) == 2 * wide
    assert disk_need_bytes("train", experiment, 10, target) == FLOOR_BYTES["train"] + 2 * wide + (60 + 2 * 2) * wide
    assert wide < expected_bytes("quantize", experiment, 10, target) < 2 * wide


def test_a_disk_that_is_too_small_is_named(tmp_path: Path):
    folder = tmp_path / "not" / "there" / "yet"
    check_disk(folder, 1, "a test")
    with pytest.raises(ArtifactError, match="GB are free") as caught:
        check_disk(folder, 10**18, "the stage capture")
    assert caught.value.where == str(folder) and "store" in caught.value.fix
