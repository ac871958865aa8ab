"""The record of an artifact: written last, so that an artifact without one does not exist."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from raysd.errors import ArtifactError

SCHEMA = 1


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size_bytes: int
    sha256: str


class Record(BaseModel):
    """What an artifact is and where it came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    record_schema: int = SCHEMA
    experiment: str
    stage: str
    fingerprint: str
    """Hash of `identity`."""
    identity: dict[str, Any]
    """The document behind the fingerprint: stage, stage version, the values that change the result, input fingerprints."""
    section: dict[str, Any]
    """The resolved experiment, as YAML would hold it."""
    code_version: str
    packages: dict[str, str]
    """Versions of the libraries that shaped the result."""
    host: dict[str, Any]
    """Facts of the machine it ran on."""
    metrics: dict[str, Any]
    """What the stage measured, raw counts first."""
    started: str
    """UTC, ISO 8601."""
    ended: str
    elapsed_s: float
    attempt: int
    files: dict[str, FileEntry]
    """Path inside the artifact to size and hash."""


def read_record(path: Path) -> Record | None:
    """The record at a path; None if there is none. Raises ArtifactError if it does not parse or is of a newer schema."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise ArtifactError(
            what=f"the record cannot be read: {err.strerror}",
            where=path,
            fix="make the folder readable, or delete it to run the stage again",
        ) from err
    except UnicodeDecodeError as err:
        raise ArtifactError(
            what="the record is not UTF-8 text", where=path, fix="delete the artifact's folder to run the stage again"
        ) from err
    try:
        record = Record.model_validate_json(text)
    except ValidationError as err:
        raise ArtifactError(
            what=f"the record does not parse ({err.error_count()} problems)",
            where=path,
            fix="delete the artifact's folder to run the stage again, or use the raysd version that wrote it",
        ) from err
    if record.record_schema > SCHEMA:
        raise ArtifactError(
            what=f"the record has schema {record.record_schema}, this raysd reads up to {SCHEMA}", where=path, fix="upgrade raysd"
        )
    return record


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below a folder, by its path inside the folder."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(size_bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def verify_sizes(folder: Path, record: Record) -> None:
    """Raises ArtifactError, naming the file, if one is missing or differs from its record in size. Quick: it reads no content."""
    for name, entry in record.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(what="a file of the artifact is missing", where=path, fix=_again(folder, record))
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise ArtifactError(
                what=f"a file of the artifact has {size_bytes} bytes, its record says {entry.size_bytes}", where=path, fix=_again(folder, record)
            )


def verify_files(folder: Path, record: Record) -> None:
    """Raises ArtifactError, naming the file, if one is missing or differs from its record in size or SHA-256."""
    verify_sizes(folder, record)
    for name, entry in record.files.items():
        if sha256_of(folder / name) != entry.sha256:
            raise ArtifactError(
                what="a file of the artifact differs from the SHA-256 in its record", where=folder / name, fix=_again(folder, record)
            )


def _again(folder: Path, record: Record) -> str:
    return f"delete {folder} to run the stage {record.stage} again"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
