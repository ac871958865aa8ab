"""The record of an artifact: written last, so that an artifact without one does not exist."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from raysd.errors import ArtifactError

SCHEMA = 2
NAME = "record.json"


def _inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} lies outside of the artifact")
    return name


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


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
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]
    """Path inside the artifact to size and hash."""


def encode_record(record: Record) -> bytes:
    """The record as JSON with a checksum of its own, `record_sha256`: a flipped byte in a metric would otherwise still be JSON."""
    document = record.model_dump(mode="json")
    return json.dumps(document | {"record_sha256": _checksum(document)}, indent=1, ensure_ascii=False).encode("utf-8")


def decode_record(content: bytes, where: object) -> Record:
    """The record in a file's content. Raises ArtifactError, naming `where`, if it is damaged or of another schema."""
    fix = "delete the artifact's folder to run the stage again"
    try:
        document = json.loads(content)
        checksum, schema = document.pop("record_sha256", None), document["record_schema"]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ArtifactError(what="the record is damaged: it is no record in JSON", where=where, fix=fix) from err
    if isinstance(schema, int) and schema != SCHEMA:
        raise ArtifactError(what=f"the record has schema {schema}, this raysd reads {SCHEMA}", where=where, fix="upgrade raysd" if schema > SCHEMA else fix)
    if checksum != _checksum(document):
        raise ArtifactError(what="the record is damaged: it differs from the checksum in it", where=where, fix=fix)
    try:
        return Record.model_validate(document)
    except ValidationError as err:
        raise ArtifactError(what=f"the record does not parse ({err.error_count()} problems)", where=where,
                            fix=f"{fix}, or use the raysd version that wrote it") from err


def read_record(path: Path) -> Record | None:
    """The record at a path; None if there is none. Raises ArtifactError as `decode_record` does, and if it cannot be read."""
    try:
        return decode_record(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise ArtifactError(what=f"the record cannot be read: {err.strerror}", where=path,
                            fix="make the folder readable, or delete it to run the stage again") from err


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below a folder, by its path inside the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): FileEntry(size_bytes=path.stat().st_size, sha256=digest)
            for path, digest in zip(paths, _hashes(paths), strict=True)}


def verify_files(folder: Path, record: Record, place: str) -> None:
    """Raises ArtifactError, naming the file, if one is missing or differs from its record in size or SHA-256.

    place: the artifact as a person names it, for the message.
    """
    check_sizes({name: (folder / name).stat().st_size for name in record.files if (folder / name).is_file()}, record, place)
    for (name, entry), digest in zip(record.files.items(), _hashes([folder / name for name in record.files]), strict=True):
        if digest != entry.sha256:
            raise ArtifactError(what="a file of the artifact differs from the SHA-256 in its record", where=f"{place}/{name}", fix=again(record, place))


def check_sizes(sizes: dict[str, int], record: Record, place: str) -> None:
    """Raises ArtifactError, naming the file, if one is missing or differs from its record in size. sizes: what is there, in bytes."""
    for name, entry in record.files.items():
        if name not in sizes:
            raise ArtifactError(what="a file of the artifact is missing", where=f"{place}/{name}", fix=again(record, place))
        if sizes[name] != entry.size_bytes:
            raise ArtifactError(what=f"a file of the artifact has {sizes[name]} bytes, its record says {entry.size_bytes}", where=f"{place}/{name}",
                                fix=again(record, place))


def again(record: Record, place: str) -> str:
    """What to do about a damaged artifact."""
    return f"delete {place} to run the stage {record.stage} again"


def _hashes(paths: Iterable[Path]) -> list[str]:
    # hashlib lets other threads run while it works, so files are hashed side by side.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(sha256_of, paths))


def is_whole(path: Path, entry: FileEntry) -> bool:
    """Whether there is a file of this size and SHA-256."""
    return path.is_file() and path.stat().st_size == entry.size_bytes and sha256_of(path) == entry.sha256


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
