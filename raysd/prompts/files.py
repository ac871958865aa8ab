"""Prompt files of every form, read as rows: JSONL, JSON, Parquet and CSV, each with prompts, conversations or SPEED-Bench's questions in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raysd.errors import ExperimentError
from raysd.prompts.recorded import conversation_fields, is_conversation
from raysd.prompts.rows import Row, kind_of, row_of
from raysd.prompts.speed_bench import is_question, question_fields

Numbered = Iterator[tuple[int, Any]]
"""A row's line or number, from 1, and its fields."""


def prompt_files(path: Path, where: str) -> list[Path]:
    """The prompt files at a path: the file itself, or those directly in the folder, by name. Raises ExperimentError if there is none.

    A folder's .json files count only where there are no others: beside data they describe it.
    """
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in READERS and not file.name.startswith(".") and file.is_file())
        files = [file for file in inside if file.suffix != ".json"] or inside
        if not files:
            below = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and any(file.suffix in READERS for file in folder.iterdir()))
            raise ExperimentError(what=f"the folder of prompts holds no {' or '.join(READERS)} file" + (f", but its folders {', '.join(below)} do" if below else ""), where=where,
                                  fix="name one of them" if below else "put one in, one request a line: {\"prompt\": \"...\"}")
        return files
    if not path.exists():
        raise ExperimentError(what="there is no prompt file or folder here", where=where,
                              fix="correct the path; it is relative to the experiment file")
    if path.suffix not in READERS:
        raise ExperimentError(what=f"the prompt file ends in `{path.suffix}`, not in {' or '.join(f'`{suffix}`' for suffix in READERS)}", where=where,
                              fix="name a JSONL file (one JSON object a line), a JSON list, a Parquet or CSV table, or a folder of them")
    return [path]


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """The rows of one prompt file; recorded conversations in which nobody asks are left out. name: for the ids of rows that have none. Raises ExperimentError, naming row and field, at the first of no use."""
    for number, fields in READERS[file.suffix](file):
        place, default_id = f"{file}:{number}", f"{name}:{number}"
        if is_conversation(fields):
            asked = conversation_fields(fields, place)
            if asked is not None:
                yield row_of(asked, place, default_id)
        else:
            yield row_of(question_fields(fields, place) if is_question(fields) else fields, place, default_id)


def _jsonl(file: Path) -> Numbered:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if line.strip(" \t\r"):
            try:
                yield number, json.loads(line)
            except ValueError as err:
                raise ExperimentError(what=f"the line is not JSON: {err}", where=f"{file}:{number}",
                                      fix="write one JSON object a line: {\"prompt\": \"...\"}") from err


def _json(file: Path) -> Numbered:
    try:
        document = json.loads(_text(file))
    except (ValueError, RecursionError) as err:
        raise ExperimentError(what=f"the file is not JSON: {err}", where=file, fix="write one list of objects, or name the file .jsonl if it holds one a line") from err
    if not isinstance(document, list):
        raise ExperimentError(what=f"the file holds {kind_of(document)}, not a list of requests or conversations", where=file,
                              fix="write one list of objects, with `prompt`, `messages` or ShareGPT's `conversations`")
    yield from enumerate(document, start=1)


def _parquet(file: Path) -> Numbered:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from _table_rows(pyarrow.parquet.ParquetFile(file).read(), file)
    except (pyarrow.ArrowInvalid, OSError) as err:
        raise ExperimentError(what=f"the Parquet file cannot be read: {err}", where=file, fix="write it again, or remove it") from err


def _csv(file: Path) -> Numbered:
    import pyarrow
    import pyarrow.csv

    _text(file)  # refused here, by its line, if it is not UTF-8
    try:
        # Every value as text: a prompt may look like a number, a date or nothing.
        names = pyarrow.csv.open_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)).schema.names
        options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=True, null_values=[""])
        table = pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True), convert_options=options)
    except (pyarrow.ArrowInvalid, OSError) as err:
        raise ExperimentError(what=f"the CSV file cannot be read: {err}", where=file, fix="write a first line with the names of columns, `prompt` among them") from err
    yield from _table_rows(table, file)


def _table_rows(table: Any, file: Path) -> Numbered:
    """Rows of a table; what a row has no value for, it does not have."""
    if not {"prompt", "messages", "conversations", "turns"} & set(table.column_names):
        raise ExperimentError(what=f"the table has no column `prompt`, `messages`, `conversations` or `turns`; it has {', '.join(table.column_names)}", where=file,
                              fix="rename the column that holds the requests to `prompt`")
    for number, fields in enumerate(table.to_pylist(), start=1):
        yield number, {name: _without_nulls(value) for name, value in fields.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """A table gives every message every key that one of them has."""
    if isinstance(value, list):
        return [{name: each for name, each in item.items() if each is not None} if isinstance(item, dict) else item for item in value]
    return value


def _text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as err:
        raise ExperimentError(what=f"the prompt file cannot be read: {err.strerror}", where=file, fix="check its permissions") from err
    try:
        return content.decode("utf-8-sig")  # with or without the mark that some editors put first
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        raise ExperimentError(what="the prompt file is not UTF-8 text", where=f"{file}:{line}", fix="save it as UTF-8") from err


READERS: dict[str, Callable[[Path], Numbered]] = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv}
"""Suffix to what reads a file of it."""
