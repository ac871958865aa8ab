"""The data set of a sweep, read back: cells, and the requests of those that are valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.errors import ArtifactError
from raysd.sweep.tables import read_rows

Row = dict[str, Any]

CELL_COLUMNS = (
    "arm", "workload", "isl", "osl", "concurrency", "k", "block", "valid", "invalid_reasons", "output_tok_s", "total_tok_s", "window_output_tok_s",
    "ttft_ms_p50", "tpot_ms_p50", "e2el_ms_p50", "drafts", "draft_tokens", "accepted", "per_position", "requests", "failures", "output_tokens",
    "prompt_tokens", "elapsed_s", "node", "acceptance", "energy_j", "client_cpu_frac", "loop_lag_ms_p99", "dispatch_delay_ms_p99",
)
REQUEST_COLUMNS = (
    "arm", "workload", "concurrency", "k", "block", "prompt_id", "category", "error", "prompt_tokens", "output_tokens", "drafts", "accepted", "ttft_ms", "tpot_ms",
    "e2el_ms",
)


@dataclass(frozen=True)
class Results:
    """What a sweep measured."""

    cells: list[Row]
    """One row per cell; `invalid_reasons` is a list."""
    requests: list[Row]
    """One row per request of a valid cell."""


def read_results(folder: Path) -> Results:
    """The data set in a folder, as the sweep writes it. Raises ArtifactError for an absent table or column, and for a sweep without a cell."""
    cells = table_rows(folder / "cells", CELL_COLUMNS)
    if not cells:
        raise ArtifactError(what="the sweep holds no cell", where=folder / "cells", fix="delete the sweep's artifact to run it again")
    for cell in cells:
        reasons = cell["invalid_reasons"] or []
        cell["invalid_reasons"] = [reasons] if isinstance(reasons, str) else list(reasons)
    valid = {cell_key(cell) for cell in cells if cell["valid"]}
    requests = table_rows(folder / "requests", REQUEST_COLUMNS)
    return Results(cells, [request for request in requests if cell_key(request) in valid])


def cell_key(row: Row) -> tuple:
    """What tells a cell from the others, of a row of cells or of requests."""
    return row["workload"], row["arm"], row["k"], row["concurrency"], row["block"]


def table_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """The named columns of a table, one dict a row; other columns are left alone. Raises ArtifactError for a table or a column that is not there."""
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
