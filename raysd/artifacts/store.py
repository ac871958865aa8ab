"""Where artifacts live: the Store protocol and its home in a local (or shared) folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raysd.artifacts.record import Record, read_record, verify_files, verify_sizes
from raysd.errors import ArtifactError


@dataclass(frozen=True)
class ArtifactKey:
    """Names one artifact: `<store>/<experiment>/<stage>/<fingerprint>/`."""

    experiment: str
    stage: str
    fingerprint: str


class Store(Protocol):
    """What stages and the runner need of a home for artifacts."""

    root: Path
    """The folder on this machine that artifacts are in."""

    def check_writable(self) -> None:
        """Raises ArtifactError, naming the folder, if nothing can be written."""

    def folder(self, key: ArtifactKey) -> Path:
        """Where the artifact's files are, or will be, on this machine. Nothing is checked, and the folder may be absent."""

    def record(self, key: ArtifactKey) -> Record | None:
        """The artifact's record, or None if the artifact does not exist."""

    def records(self, experiment: str, stage: str) -> list[Record]:
        """All records of one stage of one experiment, the newest first."""

    def open(self, key: ArtifactKey) -> Path:
        """A folder on this machine with the artifact's verified files. Raises ArtifactError if it is absent or damaged."""

    def lock(self, key: ArtifactKey) -> contextlib.AbstractContextManager[None]:
        """Held while the artifact is written, so that two runners never write the same one."""

    def work(self, key: ArtifactKey) -> Path:
        """A folder on this machine for unfinished work of the artifact; it survives a failed attempt."""

    def publish(self, key: ArtifactKey, folder: Path, record: Record) -> Path:
        """Makes the files of a folder the artifact, then writes its record; returns the artifact's folder on this machine."""


def check_record(folder: Path, record: Record, key: ArtifactKey) -> None:
    """Raises ArtifactError if a record is not that of the artifact whose folder it lies in, or if a file of it is missing or has another size.

    Quick, so that what is called found is there; `open` compares the hashes as well.
    """
    fix = f"delete {folder} to run the stage {key.stage} again"
    if (record.experiment, record.stage, record.fingerprint) != (key.experiment, key.stage, key.fingerprint):
        raise ArtifactError(what=f"the record is that of {record.experiment}/{record.stage}/{record.fingerprint[:12]}", where=folder / "record.json", fix=fix)
    verify_sizes(folder, record)


class LocalStore:
    """Artifacts in a folder. Several nodes may use it if the folder is on a shared file system."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise ArtifactError(what="the store is a file, not a folder", where=self.root, fix="name a folder in `store:`")

    def check_writable(self) -> None:
        with _explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(b"raysd")

    def folder(self, key: ArtifactKey) -> Path:
        return self.root / key.experiment / key.stage / key.fingerprint

    def record(self, key: ArtifactKey) -> Record | None:
        record = read_record(self.folder(key) / "record.json")
        if record is not None:
            check_record(self.folder(key), record, key)
        return record

    def records(self, experiment: str, stage: str) -> list[Record]:
        found = [read_record(path) for path in (self.root / experiment / stage).glob("*/record.json")]
        return sorted((record for record in found if record), key=lambda record: record.ended, reverse=True)

    def open(self, key: ArtifactKey) -> Path:
        record = self.record(key)
        folder = self.folder(key)
        if record is None:
            raise ArtifactError(
                what=f"there is no {key.stage} artifact {key.fingerprint[:12]}", where=folder, fix=f"run the stage {key.stage} first"
            )
        verify_files(folder, record)
        return folder

    @contextlib.contextmanager
    def lock(self, key: ArtifactKey) -> Iterator[None]:
        path = self.folder(key) / "lock"
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies, however it dies
            yield

    def work(self, key: ArtifactKey) -> Path:
        folder = self.folder(key) / "work"
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, key: ArtifactKey, folder: Path, record: Record) -> Path:
        home = self.folder(key)
        with _explained(home):
            home.mkdir(parents=True, exist_ok=True)
            for name in record.files:
                target = home / name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, target)
                _fsync(target)
            temporary = home / "record.json.part"
            temporary.write_text(record.model_dump_json(indent=1), encoding="utf-8")
            _fsync(temporary)
            os.replace(temporary, home / "record.json")
            _fsync(home)
            shutil.rmtree(home / "work", ignore_errors=True)  # the record is there: leftovers are only disk space
        return home


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write into an ArtifactError that says what to do."""
    try:
        yield
    except OSError as err:
        fixes = {
            errno.ENOSPC: "free disk space, or name another folder in `store:`",
            errno.EDQUOT: "raise the quota, or name another folder in `store:`",
            errno.EACCES: "make the folder writable, or name another one in `store:`",
            errno.EROFS: "name a folder on a writable file system in `store:`",
        }
        raise ArtifactError(
            what=f"the store cannot be written: {err.strerror}",
            where=err.filename or path,
            fix=fixes.get(err.errno, "check the folder in `store:`"),
        ) from err
