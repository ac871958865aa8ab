"""The record of an artifact: written last, so that an artifact without one does not exist."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from raysd.artifacts.sealed import seal, unseal
from raysd.errors import ArtifactError, DamagedError

SCHEMA = 3
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
    folder: str = Field(pattern="^files-[0-9a-f]{12}$")
    """Where its files are, beside the record: each lease has a folder of its own, so that an owner that was taken for dead can touch no file of its successor."""
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]
    """Path inside the folder to size and hash."""


def encode_record(record: Record) -> bytes:
    """The content of a record's file."""
    return seal(record.model_dump(mode="json"))


def decode_record(content: bytes, where: object) -> Record:
    """The record in a file's content. Raises DamagedError, naming `where`, if it is damaged or of another schema."""
    fix = "delete the artifact's folder to run the stage again"
    document = unseal(content, "record", where, "record_schema", SCHEMA, fix)
    try:
        return Record.model_validate(document)
    except ValidationError as err:
        raise DamagedError(what=f"the record does not parse ({err.error_count()} problems)", where=where,
                           fix=f"{fix}, or use the raysd version that wrote it") from err


def read_record(folder: Path) -> Record | None:
    """The record of the artifact whose files are in a folder, as a stage gets it among its inputs; None if there is none.

    Raises DamagedError as `decode_record` does, ArtifactError if it cannot be read.
    """
    path = folder.parent / NAME
    with _readable():
        return decode_record(path.read_bytes(), path) if path.is_file() else None


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below a folder, by its path inside the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): FileEntry(size_bytes=path.stat().st_size, sha256=digest)
            for path, digest in zip(paths, _hashes(paths), strict=True)}


def verify_files(folder: Path, record: Record, place: str) -> None:
    """Raises DamagedError, naming the file, if one is missing or differs from its record in size or SHA-256; ArtifactError if one cannot be read.

    place: the artifact as a person names it, for the message.
    """
    with _readable():
        check_sizes({name: (folder / name).stat().st_size for name in record.files if (folder / name).is_file()}, record, place)
        digests = _hashes([folder / name for name in record.files])
    for (name, entry), digest in zip(record.files.items(), digests, strict=True):
        if digest != entry.sha256:
            raise _damaged(f"{name} differs from the SHA-256 in its record", name, record, place)


def check_sizes(sizes: dict[str, int], record: Record, place: str) -> None:
    """Raises DamagedError, naming the file, if one is missing or differs from its record in size. sizes: what is there, in bytes."""
    for name, entry in record.files.items():
        if name not in sizes:
            raise _damaged(f"{name} is missing", name, record, place)
        if sizes[name] != entry.size_bytes:
            raise _damaged(f"{name} has {sizes[name]} bytes, its record says {entry.size_bytes}", name, record, place)


def _damaged(what: str, name: str, record: Record, place: str) -> DamagedError:
    return DamagedError(what=f"a file of the artifact is damaged: {what}", where=f"{place}/{record.folder}/{name}", fix=again(record, place))


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ArtifactError(what=f"a file of the artifact cannot be read: {err.strerror}", where=err.filename, fix="make the store readable") from err


def again(record: Record, place: str) -> str:
    """What to do about a damaged artifact."""
    return f"delete {place} to run the stage {record.stage} again"


def _hashes(paths: Iterable[Path]) -> list[str]:
    # hashlib lets other threads run while it works, so files are hashed side by side.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(sha256_of, paths))


def is_whole(path: Path, entry: FileEntry) -> bool:
    """Whether there is a file of this size and SHA-256. Raises ArtifactError if it cannot be read."""
    with _readable():
        return path.is_file() and path.stat().st_size == entry.size_bytes and sha256_of(path) == entry.sha256


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
