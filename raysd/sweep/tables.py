"""The tables of a sweep: columns, types and units, and how they are written as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
"""Raised whenever a column changes its name or meaning."""

CELLS = {"arm": "string", "workload": "string", "isl": "double", "osl": "int32", "concurrency": "int32", "k": "int32", "block": "int32", "valid": "bool",
         "invalid_reasons": "list<string>", "output_tok_s": "double", "total_tok_s": "double", "window_output_tok_s": "double", "ttft_ms_p50": "double",
         "tpot_ms_p50": "double", "e2el_ms_p50": "double", "drafts": "int64", "draft_tokens": "int64", "accepted": "int64",
         "acceptance_length": "double", "per_position": "list<int64>", "requests": "int32", "failures": "int32", "output_tokens": "int64",
         "prompt_tokens": "int64", "elapsed_s": "double", "window_s": "double", "achieved_concurrency": "double", "order": "int32",
         "schema_version": "int32"}
"""One row a cell. isl: prompt tokens on average, as counted; osl: as asked for; k: null for `none`; per_position: accepted tokens, first to k-th."""

REQUESTS = {"arm": "string", "workload": "string", "concurrency": "int32", "k": "int32", "block": "int32", "prompt_id": "string", "error": "string",
            "finish_reason": "string", "prompt_tokens": "int32", "output_tokens": "int32", "dispatched_ms": "double", "ended_ms": "double",
            "ttft_ms": "double", "tpot_ms": "double", "e2el_ms": "double", "chunk_ms": "list<double>", "chunk_tokens": "list<int32>"}
"""One row a request. dispatched_ms, ended_ms, chunk_ms: since the cell's first request was sent."""

ANSWERS = {"arm": "string", "k": "int32", "prompt_id": "string", "token_ids": "list<int32>", "finish_reason": "string"}
"""The greedy answer of each engine to each prompt of the report split."""

LOSSLESS = {"arm": "string", "k": "int32", "prompt_id": "string", "verdict": "string", "position": "int32", "token_none": "int32", "token_arm": "int32",
            "gap_nat": "double"}
"""Each answer of a drafting engine against the baseline's. position: tokens that the two share; null where they are equal."""

ACCEPTANCE = {"arm": "string", "k": "int32", "drafts": "int64", "draft_tokens": "int64", "accepted": "int64", "per_position": "list<int64>",
              "acceptance_length": "double"}
"""Each drafting engine's counts over the report split."""


def write_table(path: Path, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as Parquet. Every row must hold every column and nothing else."""
    import pyarrow
    import pyarrow.parquet

    for row in rows:
        assert set(row) == set(columns), f"{path.name}: {sorted(set(row) ^ set(columns))}"
    schema = pyarrow.schema([(name, _type(kind)) for name, kind in columns.items()])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path)


def _type(kind: str) -> Any:
    import pyarrow

    if kind.startswith("list<"):
        return pyarrow.list_(_type(kind[5:-1]))
    return pyarrow.type_for_alias(kind)
