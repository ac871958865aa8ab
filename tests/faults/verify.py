"""What must be true after a fault and the runs that followed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from raysd.artifacts import FolderHome, Record, Store, difference
from raysd.artifacts.record import NAME
from raysd.errors import ArtifactError
from raysd.hidden_states.shards import Captured
from raysd.pipeline.summary import REPORT
from tests.faults.ground import Ground, NotRecovered


def verify(ground: Ground) -> None:
    """Raises NotRecovered unless every artifact is good, equal to the reference's, and was made without doing finished work again."""
    reference = Store(FolderHome(ground.reference.store))
    for stage in ground.stages.values():
        key = stage.key
        try:
            ours, theirs = ground.store.open(key), reference.open(key)
        except ArtifactError as err:
            raise NotRecovered(f"{stage.name}: {err.what}: {err.where}") from err
        if stage.name not in ground.names:
            _check(ground.home.get(key.prefix + NAME) == reference.home.get(key.prefix + NAME), f"{stage.name}: touched, though it was there")
            continue
        record, expected = ground.store.record(key), reference.record(key)
        changed = difference(result_of(stage.name, theirs, expected), result_of(stage.name, ours, record))
        _check(not changed, f"{stage.name}: another result than the reference's: {changed[:3]}; metrics {record.metrics}, there {expected.metrics}")
        _check(not ground.home.list(f"{key.prefix}work/"), f"{stage.name}: unfinished work is left beside the artifact")
        _check(ground.store.lease(key).state() == "released", f"{stage.name}: its lease is {ground.store.lease(key).state()}")
        _check_nothing_twice(ground, stage.name, record)


def result_of(stage: str, folder: Path, record: Record) -> dict[str, Any]:
    """What two runs of a stage have in common: files bit by bit, conversations, cells that are valid, or names of files."""
    if stage in ("train", "quantize"):
        return {name: entry.sha256 for name, entry in record.files.items() if name.startswith("draft/")}
    if stage == "capture":
        return {each.prompt_id: (split, each.prompt_tokens, each.finish_reason, each.token_ids.tolist())
                for split in ("train", "choose") for each in Captured(folder, split)}
    if stage == "sweep":
        rows = pq.read_table(folder / "cells").to_pylist()
        return {"cells": sorted((row["block"], row["workload"], row["concurrency"], row["arm"], row["k"] or 0, row["valid"]) for row in rows)}
    return {"files": sorted(record.files), "report": REPORT in record.files}


def _check_nothing_twice(ground: Ground, stage: str, record: Record) -> None:
    # A checkpoint replaces the one before on purpose: what counts is that training goes on where the newest whole one left it. So do the facts of nodes.
    kept = ground.kept(stage)
    twice = [name for name, times in kept.items() if not name.startswith(("checkpoint", "nodes")) and times > 1 + (name in ground.damaged)]
    _check(not twice, f"{stage}: done twice: {', '.join(twice)}")
    _check(all(kept[name] > 1 or name.startswith(("checkpoint", "nodes")) for name in ground.damaged), f"{stage}: damaged, and not made again")
    if stage == "train":
        _check(all(steps in record.metrics["resumed_steps"] for steps in ground.resumes),
               f"train: checkpoints held {ground.resumes} steps, it went on at {record.metrics['resumed_steps']}")


def _check(promise: bool, otherwise: str) -> None:
    if not promise:
        raise NotRecovered(otherwise)


def missing(ground: Ground, stage: str) -> bool:
    """Whether nothing has been published of a stage."""
    return ground.home.get(f"{ground.prefix(stage)}{NAME}") is None
