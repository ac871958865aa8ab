"""Where prompts come from: a file, a folder, or a data set of the Hugging Face hub; all read as rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysd.errors import ExperimentError
from raysd.prompts.files import prompt_files, read_rows
from raysd.prompts.hub import hub_files, is_hub_name
from raysd.prompts.rows import Row


def read_source(path: Path, field: str) -> list[Row]:
    """All rows at a path, or of the data set that it names (`hf:ORG/NAME`). field: of the experiment, for messages.

    Raises ExperimentError, naming file, line and field, for a missing or empty source, a row that cannot be used, and an id that is there twice.
    """
    where = f"{path} ({field})"
    files = hub_files(str(path), where) if is_hub_name(path) else {file.name: file for file in prompt_files(path, where)}
    rows = [row for name, file in files.items() for row in read_rows(file, name)]
    if not rows:
        raise ExperimentError(what="there is not one prompt in it", where=where, fix="write one request a line: {\"prompt\": \"...\"}")
    _refuse_duplicate_ids(rows)
    return rows


def _refuse_duplicate_ids(rows: Iterable[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        earlier = first.setdefault(row.id, row)
        if earlier is not row:
            raise ExperimentError(what=f"the id `{row.id}` is already that of {earlier.place}", where=f"{row.place}: id",
                                  fix="give every row an id of its own, or leave ids out")
