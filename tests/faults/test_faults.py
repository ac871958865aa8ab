"""Six faults of the campaign, each of another kind; `make faults` does them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.__main__ import suffer
from tests.faults.bench import Bench, Fault
from tests.faults.ground import Reference

SIX = ["kill_train", "kill_capture_engine", "truncated_checkpoint", "flipped_record", "s3_503", "s3_lost"]


@pytest.fixture(scope="module")
def bench(first_run: tuple[Path, dict], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    spec = first_run[0]
    with Bench(Reference(spec, spec.parent / "runs"), tmp_path_factory.mktemp("faults")) as bench:
        yield bench


@pytest.mark.parametrize("kind", SIX)
def test_a_run_recovers_from(kind, bench, tmp_path):
    with Fault(bench, kind, seed=1, folder=tmp_path / "fault") as fault:
        suffer(fault)
