"""Speeds that AMD published for a target, to stand beside measured ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "amd-eagle3-mi355x.yaml"


@dataclass(frozen=True)
class PublishedRates:
    """AMD's table for one target: output tokens per second of a GPU."""

    model: str
    setting: str
    """Hardware, tensor parallel and workload, in words."""
    concurrency: list[int]
    arms: dict[str, list[float]]
    """Arm to rates, one a concurrency; `none` is the baseline."""
    speedup: dict[str, list[float]]
    """Drafting arm to what it gains, as published."""


def published_rates(model: str) -> PublishedRates | None:
    """What AMD published for a target; None if it is not listed. model: as the experiment names it; only the last part of a path or id counts."""
    document = _table()
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1].lower()
    found = next((name for name in document["models"] if re.match(rf"{re.escape(name)}(?![.\d])", last)), None)
    if found is None:
        return None
    entry, hardware, workload = document["models"][found], document["hardware"], document["workload"]
    arms = {arm: values["values"] if isinstance(values, dict) else values for arm, values in entry["arms"].items()}
    setting = f"{hardware['gpu']}, tensor parallel {hardware['tensor_parallel']}, ISL {workload['isl']}, OSL {workload['osl']}, {workload['prompts']} prompts"
    return PublishedRates(found, setting, document["concurrency"], arms, {arm: values["speedup"] for arm, values in entry["arms"].items() if isinstance(values, dict)})


@cache
def _table() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))
