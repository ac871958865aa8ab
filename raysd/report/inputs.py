"""What a report is made of, read from the artifacts of the stages before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts.record import Record, read_record
from raysd.errors import ArtifactError
from raysd.experiment import Experiment
from raysd.sweep.tables import read_rows

Row = dict[str, Any]

STAGES = ("capture", "train", "quantize", "sweep")
"""The stages that a report tells of, in the order they ran."""

CELL_COLUMNS = (
    "arm",
    "workload",
    "osl",
    "concurrency",
    "k",
    "block",
    "valid",
    "invalid_reasons",
    "output_tok_s",
    "window_output_tok_s",
    "ttft_ms_p50",
    "tpot_ms_p50",
    "e2el_ms_p50",
    "drafts",
    "accepted",
    "requests",
    "failures",
    "output_tokens",
    "prompt_tokens",
    "elapsed_s",
)
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
    curve: list[Row]
    """Training: one row per logged step; empty without training."""
    evaluations: list[Row]
    """Training: one row per evaluated step and position of the draft; empty without training."""

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
    cells = _rows(folders["sweep"] / "cells", CELL_COLUMNS)
    if not cells:
        raise ArtifactError(
            what="the sweep holds no cell", where=folders["sweep"] / "cells", fix="delete the sweep's artifact to run it again"
        )
    for cell in cells:
        reasons = cell["invalid_reasons"] or []
        cell["invalid_reasons"] = [reasons] if isinstance(reasons, str) else list(reasons)
    train = folders.get("train")
    return Inputs(
        experiment=experiment,
        records=records,
        cells=cells,
        curve=_rows(train / "curve.parquet", CURVE_COLUMNS) if train else [],
        evaluations=_rows(train / "evaluations.parquet", EVALUATION_COLUMNS) if train else [],
    )


def _rows(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """The named columns of a table, one dict a row; other columns are left alone."""
    import pyarrow  # late: `raysd plan` works without Arrow

    fix = f"delete {path.parent} to run its stage again"
    try:
        return read_rows(path, columns)
    except FileNotFoundError as err:
        raise ArtifactError(what="a table of the artifact is missing", where=path, fix=fix) from err
    except pyarrow.ArrowInvalid as err:
        raise ArtifactError(what=f"a table of the artifact is not Parquet: {err}", where=path, fix=fix) from err
    except KeyError as err:
        raise ArtifactError(what=f"the table lacks the columns {', '.join(err.args)}", where=path, fix=fix) from err
