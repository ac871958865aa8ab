"""What a report is made of, read from the artifacts of the stages before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts.record import Record, read_record
from raysd.errors import ArtifactError
from raysd.experiment import Experiment
from raysd.hardware.catalogue import CPU
from raysd.report.results import Row, read_results, table_rows

STAGES = ("capture", "train", "quantize", "sweep")
"""The stages that a report tells of, in the order they ran."""

CURVE_COLUMNS = ("step", "elapsed_s", "loss", "simulated_acceptance_length")
EVALUATION_COLUMNS = ("step", "position", "accuracy", "replay_acceptance_length")


@dataclass(frozen=True)
class Inputs:
    """The measured data of one experiment."""

    experiment: Experiment
    records: Mapping[str, Record]
    """Stage name to record; a stage that was not run is absent."""
    cells: list[Row]
    """One row per cell of the sweep; `invalid_reasons` is a list."""
    requests: list[Row]
    """One row per request of a valid cell."""
    curve: list[Row]
    """Training: one row per logged step; empty without training."""
    evaluations: list[Row]
    """Training: one row per evaluated step and position of the draft; empty without training."""

    @property
    def workloads(self) -> list[str]:
        """In the order of the experiment; of what was measured only."""
        measured = {cell["workload"] for cell in self.cells}
        return [workload.name for workload in self.experiment.sweep.workloads if workload.name in measured]

    @property
    def devices(self) -> int:
        """What an engine's rates are divided by: its GPUs; a machine whose CPU decodes is one."""
        return 1 if self.experiment.hardware.name == CPU else self.experiment.target.tensor_parallel

    @property
    def per_device(self) -> str:
        return "machine" if self.experiment.hardware.name == CPU else "GPU"

    @property
    def sweep_metrics(self) -> dict[str, Any]:
        return self.records["sweep"].metrics

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """The checkpoints that training served, the newest last: `step`, `replay` and `served` counts; none without training."""
        return self.records["train"].metrics["candidates"] if "train" in self.records else []

    @property
    def capture_metrics(self) -> dict[str, Any]:
        """Of the capture stage, or of the capture that was a part of training (`capture.mode: stream`); empty without either."""
        if "capture" in self.records:
            return self.records["capture"].metrics
        return self.records["train"].metrics.get("capture", {}) if "train" in self.records else {}

    @property
    def arms(self) -> list[str]:
        """The arms that ran, in the experiment's order."""
        ran = {cell["arm"] for cell in self.cells}
        return [arm for arm in self.experiment.sweep.arms if arm in ran]


def read_inputs(experiment: Experiment, folders: Mapping[str, Path]) -> Inputs:
    """Reads the artifacts. Raises ArtifactError for an absent sweep, record, table or column, and for a sweep without a cell."""
    if "sweep" not in folders:
        raise ArtifactError(
            what=f"there is no sweep among the inputs ({', '.join(folders) or 'none'})", where="report", fix="run the stage sweep first"
        )
    records = {}
    for stage in (stage for stage in STAGES if stage in folders):
        record = read_record(folders[stage])
        if record is None:
            raise ArtifactError(what=f"the {stage} artifact has no record", where=folders[stage], fix=f"run the stage {stage} first")
        records[stage] = record
    results = read_results(folders["sweep"])
    train = folders.get("train")
    return Inputs(
        experiment=experiment,
        records=records,
        cells=results.cells,
        requests=results.requests,
        curve=table_rows(train / "curve.parquet", CURVE_COLUMNS) if train else [],
        evaluations=table_rows(train / "evaluations.parquet", EVALUATION_COLUMNS) if train else [],
    )
