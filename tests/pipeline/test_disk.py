"""A disk that is too small is told before the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.errors import ArtifactError
from raysd.experiment import load_experiment
from raysd.pipeline.disk import FLOOR_BYTES, PROMPT_TOKENS, check_disk, disk_need_bytes


def test_capture_grows_with_tokens_layers_and_width(write_experiment: Callable[..., Path]):
    experiment = load_experiment(write_experiment(capture={"max_tokens": 100}, draft={"aux_layers": [1, 2]}))
    need = disk_need_bytes("capture", experiment, conversations=10, hidden_size=64)
    assert need == FLOOR_BYTES["capture"] + 10 * (100 + PROMPT_TOKENS) * 3 * 64 * 2
    assert disk_need_bytes("capture", experiment, 10, None) == FLOOR_BYTES["capture"]
    assert disk_need_bytes("report", experiment, 10, 64) == FLOOR_BYTES["report"]


def test_a_disk_that_is_too_small_is_named(tmp_path: Path):
    folder = tmp_path / "not" / "there" / "yet"
    check_disk(folder, 1, "a test")
    with pytest.raises(ArtifactError, match="GB are free") as caught:
        check_disk(folder, 10**18, "the stage capture")
    assert caught.value.where == str(folder) and "store" in caught.value.fix
