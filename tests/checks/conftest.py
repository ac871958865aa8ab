from __future__ import annotations

from pathlib import Path

import pytest

from raysd.target.shape import TargetShape
from tests.checks.finished_drafts import target_shape


@pytest.fixture
def target(tmp_path: Path) -> TargetShape:
    return target_shape(tmp_path / "target")
