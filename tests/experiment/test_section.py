"""What of a section counts for a fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from raysd.experiment.section import Placement, Section


class Inner(Section):
    width: int = 2
    threads: Placement[int] = 4


class Outer(Section):
    inner: Inner = Inner()
    many: list[Inner] = [Inner()]
    folder: Placement[Path | None] = None
    lr: float = 1


def test_only_values_that_change_the_result_count():
    assert Outer(folder=Path("/somewhere")).result_values() == {"inner": {"width": 2}, "many": [{"width": 2}], "lr": 1.0}


def test_a_path_that_would_enter_a_fingerprint_is_a_mistake():
    class Careless(Section):
        folder: Path = Path("/somewhere")

    with pytest.raises(TypeError, match="Placement"):
        Careless().result_values()


def test_a_section_cannot_be_changed_or_extended():
    with pytest.raises(ValidationError):
        Outer().lr = 2.0
    with pytest.raises(ValidationError):
        Outer(rate=2)
