import time
from dataclasses import replace

import pytest

from raysd.draft.acceptance import AcceptanceCounts
from raysd.experiment.engine import EngineSettings
from raysd.experiment.sweep import Acceptance, SweepSection
from raysd.load.requests import Request
from raysd.sweep import tables
from raysd.sweep.cells import Cell
from raysd.sweep.engine import EngineSpec
from raysd.sweep.measure import Counted, engine_reasons, measure_cell, nothing_seen
from raysd.sweep.telemetry import COLUMNS
from tests.mock_engines import launch

NONE = Cell("none", "report", 4, 2, None, 0, 2)
DRAFTING = replace(NONE, arm="bf16", k=3)
NO_DRAFTS, DRAFTS = (Counted(counts, 0, 0, False) for counts in (AcceptanceCounts(0, 0, 0, ()), AcceptanceCounts(2, 6, 1, (1, 0, 0))))


def measured_on_a_mock(cell, sweep, tmp_path, seen=nothing_seen):
    """The cell, on a mock engine of its own with a draft."""
    server = launch(EngineSpec(tmp_path, tmp_path, 2, "bfloat16", 1, 256, None, False, "mi355x", EngineSettings()), tmp_path / "mock.log")
    try:
        while not server.is_ready():
            time.sleep(0.05)
        requests = [Request(f"p{index}", (1, 2, index), cell.osl, 0.0, True) for index in range(cell.requests)]
        return measure_cell(cell, requests, server, "here", sweep, seen)
    finally:
        server.stop()


def test_a_clean_cell_is_valid():
    assert engine_reasons(NONE, NO_DRAFTS) == engine_reasons(DRAFTING, DRAFTS) == []


@pytest.mark.parametrize(("cell", "counted", "says"), [
    (NONE, replace(NO_DRAFTS, prefix_hit_tokens=48), "48 prompt tokens came from the engine's prefix cache"),
    (NONE, replace(NO_DRAFTS, restarted=True), "started anew"),
    (DRAFTING, NO_DRAFTS, "counted no draft"),
    (NONE, DRAFTS, "the baseline counted 2 drafts")])
def test_what_must_not_be_used_says_why(cell, counted, says):
    [reason] = engine_reasons(cell, counted)
    assert says in reason


def test_a_cells_energy_is_that_of_its_devices_while_requests_were_in_flight(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    asked = []

    def seen(start_s: float, end_s: float) -> list[dict]:
        """Two devices at 300 W and 100 W, a third one that is somebody else's."""
        asked.append((start_s, end_s))
        return [dict.fromkeys(COLUMNS) | {"t_s": at_s, "source": "nvidia-smi", "device": device, "power_w": power_w}
                for at_s in (start_s - 0.5, end_s + 0.5) for device, power_w in (("0", 300.0), ("1", 100.0), ("2", 700.0))]

    sweep = SweepSection(k=[2], acceptance=Acceptance(rates=[0.8, 0.5]))
    measured = measured_on_a_mock(replace(DRAFTING, k=2, osl=8, requests=4), sweep, tmp_path, seen)
    [(start_s, end_s)] = asked
    assert measured.row["energy_j"] == pytest.approx(400 * (end_s - start_s)) and abs(time.time() - end_s) < 60
    assert end_s - start_s == pytest.approx(measured.row["elapsed_s"], rel=0.01)
    assert measured.row["started_s"] == round(start_s, 3), "when its load began, and not when it was written down"
    assert measured.row["acceptance"] == "synthetic"
    assert len(measured.telemetry) == 6 and all(set(row) == set(tables.TELEMETRY) and row["node"] == "here" for row in measured.telemetry)


@pytest.mark.parametrize(("limits", "says"), [({"request_limit_s": 0.2}, "within 0.2 s"), ({"silence_limit_s": 1e-5}, "nothing was heard for 1e-05 s")])
def test_a_cell_gives_its_requests_up_when_the_sweep_says(limits, says, tmp_path):
    measured = measured_on_a_mock(replace(DRAFTING, k=2, osl=200, requests=1, concurrency=1), SweepSection(k=[2], **limits), tmp_path)
    assert not measured.valid and says in measured.row["invalid_reasons"][0]
