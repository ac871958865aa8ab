"""A sweep's cells as InferenceX writes its own: the raw result of its benchmark client, and the `agg_` form made of it.

Of both forms only those keys are written that a sweep knows; an image, a precision or a recipe that nobody told is left out and never guessed. Rates of a
GPU are divided by the GPUs of an engine; where a CPU decodes, the machine stands in the GPU's place, and `hw` says so.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import statistics
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysd.errors import ArtifactError, MeasurementError
from raysd.hardware.catalogue import CPU
from raysd.load.percentiles import percentile
from raysd.report.results import CELL_COLUMNS, REQUEST_COLUMNS, Row, cell_key, table_rows
from raysd.report.sides import Side
from raysd.report.summaries import grouped

PERCENTILES = (50, 90, 95, 99)
ALL_TOGETHER = "agg_bmk.json"
"""One list of all `agg_` forms, as InferenceX collects them."""
WORKLOAD_CHARACTERS = 140
"""The most that a workload takes of a file's name: file systems allow 255 in all, an experiment has 64 at most, and what is left holds any arm, concurrency and block."""


def write_inferencex(side: Side, folder: Path) -> list[Path]:
    """Writes `NAME.json` and `agg_NAME.json` for every valid cell, and agg_bmk.json; returns their paths. Raises MeasurementError if no cell is valid,
    ArtifactError if the folder cannot be written."""
    cells = table_rows(side.folder / "cells", (*CELL_COLUMNS, "started_s"))
    requests = grouped(table_rows(side.folder / "requests", (*REQUEST_COLUMNS, "chunk_ms")), cell_key)
    valid = [cell for cell in cells if cell["valid"]]
    if not valid:
        raise MeasurementError(what="the sweep has no valid cell, so there is nothing to write for InferenceX", where=side.name, fix="look at the reasons in the report")
    written, together = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for cell in valid:
            raw = raw_result(side, cell, requests.get(cell_key(cell), []))
            together.append(agg_result(side, cell, raw))
            name = _name(side, cell)
            for prefix, document in (("", raw), ("agg_", together[-1])):
                written.append(_write(folder / f"{prefix}{name}.json", document))
        written.append(_write(folder / ALL_TOGETHER, together))
    except OSError as err:
        raise ArtifactError(what=f"the InferenceX files cannot be written: {err.strerror or err}", where=folder, fix="name a folder that can be written") from err
    return written


def raw_result(side: Side, cell: Row, requests: Sequence[Row]) -> dict[str, Any]:
    """One cell in the form of the benchmark client's result file (vLLM's `benchmark_serving`, from which InferenceX's descends)."""
    good = [request for request in requests if request["error"] is None]
    started = datetime.datetime.fromtimestamp(cell["started_s"], datetime.UTC)
    document: dict[str, Any] = {"backend": "vllm", "date": started.strftime("%Y%m%d-%H%M%S"), "benchmark_start_time_unix": cell["started_s"],
                                "benchmark_end_time_unix": cell["started_s"] + cell["elapsed_s"]}
    if "target" in side.conditions:
        document |= {"model_id": side.conditions["target"].shown, "tokenizer_id": side.conditions["target"].shown}
    completed = cell["requests"] - cell["failures"]
    document |= {
        "num_prompts": cell["requests"],
        "request_rate": "inf",
        "max_concurrency": cell["concurrency"],
        "duration": cell["elapsed_s"],
        "completed": completed,
        "total_input_tokens": cell["prompt_tokens"],
        "total_output_tokens": cell["output_tokens"],
        "request_throughput": completed / cell["elapsed_s"],
        "output_throughput": cell["output_tok_s"],
        "total_token_throughput": cell["total_tok_s"],
        "input_lens": [request["prompt_tokens"] for request in good],
        "output_lens": [request["output_tokens"] for request in good],
    }
    for name in ("ttft", "tpot", "e2el"):
        document |= _statistics(name, [request[f"{name}_ms"] for request in good if request[f"{name}_ms"] is not None])
    document |= _statistics("itl", [later - earlier for request in good for earlier, later in zip(request["chunk_ms"][:-1], request["chunk_ms"][1:], strict=True)])
    if cell["drafts"]:
        document |= {
            "spec_decode_num_drafts": cell["drafts"],
            "spec_decode_draft_tokens": cell["draft_tokens"],
            "spec_decode_accepted_tokens": cell["accepted"],
            "spec_decode_acceptance_rate": 100 * cell["accepted"] / cell["draft_tokens"],
            "spec_decode_acceptance_length": 1 + cell["accepted"] / cell["drafts"],
            "spec_decode_per_position_acceptance_rates": [accepted / cell["drafts"] for accepted in cell["per_position"]],
        }
    return document


def agg_result(side: Side, cell: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """The raw result as InferenceX's `process_result` sums it up: seconds instead of milliseconds, rates of a GPU, interactivity (tok/s of a user) for each TPOT."""
    conditions = {name: condition.shown for name, condition in side.conditions.items()}
    parallel = int(conditions["tensor_parallel"]) if "tensor_parallel" in conditions else None
    devices = 1 if conditions.get("hardware") == CPU else parallel
    document: dict[str, Any] = {}
    if "hardware" in conditions:
        document["hw"] = conditions["hardware"]
    document["conc"] = cell["concurrency"]
    if "target" in conditions:
        document["model"] = conditions["target"]
    document |= {"framework": "vllm", "spec_decoding": "draft_model" if cell["k"] is not None else "none", "disagg": False, "is_multinode": False}
    asked = side.workloads.get(cell["workload"], {}).get("isl")
    document |= ({"isl": asked} if asked is not None else {}) | {"osl": cell["osl"]}
    if parallel is not None:
        document["tp"] = parallel
    if devices:
        document |= {"tput_per_gpu": cell["total_tok_s"] / devices, "output_tput_per_gpu": cell["output_tok_s"] / devices,
                     "input_tput_per_gpu": cell["prompt_tokens"] / cell["elapsed_s"] / devices}
    for key, value in raw.items():
        if key.endswith("_ms"):
            document[key.removesuffix("_ms")] = value / 1000
            if key.endswith("_tpot_ms") and value:
                document[f"{key.removesuffix('_tpot_ms')}_intvty"] = 1000 / value
    return document


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {f"mean_{name}_ms": math.fsum(values) / len(values), f"median_{name}_ms": statistics.median(values), f"std_{name}_ms": statistics.pstdev(values)}
    return found | {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}


def _name(side: Side, cell: Row) -> str:
    """Each cell's own: whatever but letters, digits and `.-~` a workload is called by is percent-encoded, its `_` too, which stands between the parts. Of a long
    workload the beginning, and then digits that are the workload's own."""
    workload, arm = (urllib.parse.quote(cell[part], safe="").replace("_", "%5F") for part in ("workload", "arm"))
    if len(workload) > WORKLOAD_CHARACTERS:
        own = hashlib.sha256(cell["workload"].encode()).hexdigest()[:16]
        workload = f"{re.sub('%.?$', '', workload[: WORKLOAD_CHARACTERS - 17])}_{own}"  # half an escape is none
    drafting = f"_k{cell['k']}" if cell["k"] is not None else ""
    experiment = side.experiment.name if side.experiment else "sweep"
    return f"{experiment}_{workload}_{arm}{drafting}_conc{cell['concurrency']}_block{cell['block'] + 1}"


def _write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return path
