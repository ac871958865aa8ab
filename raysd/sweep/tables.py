"""The tables of a sweep: columns, types and units, and how they are written as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysd.sweep import telemetry

SCHEMA_VERSION = 3
"""Raised whenever a column changes its name or meaning."""

CELLS = {"arm": "string", "workload": "string", "isl": "double", "osl": "int32", "concurrency": "int32", "k": "int32", "block": "int32", "node": "string",
         "valid": "bool", "invalid_reasons": "list<string>", "output_tok_s": "double", "total_tok_s": "double", "window_output_tok_s": "double",
         **{f"{name}_p{rank}": "double" for name in ("ttft_ms", "tpot_ms", "e2el_ms") for rank in (50, 90, 99)},
         "step_ms_p50": "double", "step_ms_p99": "double", "connect_ms_p50": "double", "drafts": "int64", "draft_tokens": "int64", "accepted": "int64",
         "acceptance_length": "double", "per_position": "list<int64>", "requests": "int32", "failures": "int32", "output_tokens": "int64",
         "prompt_tokens": "int64", "elapsed_s": "double", "window_s": "double", "achieved_concurrency": "double", "client_cpu_frac": "double", "loop_lag_ms_p99": "double",
         "dispatch_delay_ms_p99": "double", "acceptance": "string", "energy_j": "double", "preemptions": "int32", "started_s": "double",
         "schema_version": "int32"}
"""One row a cell. isl: prompt tokens on average, as counted; osl: as asked for; k: null for `none`; per_position: accepted tokens, first to k-th;
node: where it was measured; started_s: when its first request was sent, in seconds since 1970; acceptance: `real` or `synthetic`; energy_j: of the engine's devices, from the first request's
start to the last one's end; null where no tool tells their power."""

REQUESTS = {"arm": "string", "workload": "string", "concurrency": "int32", "k": "int32", "block": "int32", "node": "string", "prompt_id": "string", "category": "string", "error": "string",
            "finish_reason": "string", "prompt_tokens": "int32", "output_tokens": "int32", "drafts": "int32", "accepted": "int32", "per_position": "list<int32>", "intended_ms": "double", "dispatched_ms": "double", "ended_ms": "double",
            "ttft_ms": "double", "tpot_ms": "double", "e2el_ms": "double", "chunk_ms": "list<double>", "chunk_tokens": "list<int32>"}
"""One row a request. drafts, accepted, per_position: where the server tells them of each request; intended_ms, dispatched_ms, ended_ms, chunk_ms: since the cell's first request was sent."""

TELEMETRY = {"arm": "string", "workload": "string", "concurrency": "int32", "k": "int32", "block": "int32", "node": "string", **telemetry.COLUMNS}
"""What was seen of host and devices while each cell was measured, about once a second; columns as telemetry.py has them."""

ANSWERS = {"arm": "string", "k": "int32", "prompt_id": "string", "token_ids": "list<int32>", "finish_reason": "string"}
"""The greedy answer of each engine to each prompt of the report split."""

LOSSLESS = {"arm": "string", "k": "int32", "prompt_id": "string", "verdict": "string", "position": "int32", "token_none": "int32", "token_arm": "int32",
            "gap_nat": "double"}
"""Each answer of a drafting engine against the baseline's. position: tokens that the two share; null where they are equal."""

ACCEPTANCE = {"arm": "string", "k": "int32", "drafts": "int64", "draft_tokens": "int64", "accepted": "int64", "per_position": "list<int64>",
              "acceptance_length": "double"}
"""Each drafting engine's counts over the report split."""


PARTITIONS = ("arm", "workload")
"""Of cells and requests: `cells/arm=bf16/workload=report/part-0.parquet`. As Hive has it, the files do not repeat them; readers take them from the folders' names."""


def write_table(path: Path, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as one Parquet file. Every row must hold every column and nothing else."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(_table(path, columns, rows), path)


def write_partitioned(folder: Path, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as Parquet files into folders by arm and workload; otherwise as write_table."""
    import pyarrow
    import pyarrow.dataset

    by_folder = pyarrow.dataset.partitioning(pyarrow.schema([(name, _type(columns[name])) for name in PARTITIONS]), flavor="hive")
    pyarrow.dataset.write_dataset(_table(folder, columns, rows), folder, format="parquet", partitioning=by_folder, basename_template="part-{i}.parquet",
                                  preserve_order=True)


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The named columns of a table, one dict a row: of a file, or of a folder that write_partitioned wrote.

    Raises FileNotFoundError if there is none, pyarrow.ArrowInvalid if it is not Parquet, KeyError with the names of the columns that it lacks.
    """
    import pyarrow
    import pyarrow.dataset

    if not path.exists():
        raise FileNotFoundError(path)
    by_folder = pyarrow.dataset.partitioning(pyarrow.schema([(name, pyarrow.string()) for name in PARTITIONS]), flavor="hive") if path.is_dir() else None
    table = pyarrow.dataset.dataset(path, format="parquet", partitioning=by_folder, partition_base_dir=str(path) if path.is_dir() else None)
    if absent := [name for name in columns if name not in table.schema.names]:
        raise KeyError(*absent)
    return table.to_table(columns=list(columns)).to_pylist()


def _table(path: Path, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> Any:
    import pyarrow

    for row in rows:
        assert set(row) == set(columns), f"{path.name}: {sorted(set(row) ^ set(columns))}"
    return pyarrow.Table.from_pylist(list(rows), schema=pyarrow.schema([(name, _type(kind)) for name, kind in columns.items()]))


def _type(kind: str) -> Any:
    import pyarrow

    if kind.startswith("list<"):
        return pyarrow.list_(_type(kind[5:-1]))
    return pyarrow.type_for_alias(kind)
