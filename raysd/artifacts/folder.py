"""The home of artifacts in a folder: on this machine, or on a file system that several nodes share."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from raysd.artifacts.home import Entry, Moved
from raysd.errors import ArtifactError, ExperimentError

PART = ".part"
"""Ends the name of a file that is being written."""


class FolderHome:
    """Files below a folder (a Home). Writing is by a rename or a hard link, which POSIX file systems and NFS do as one step."""

    remote = False

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.uri = str(root)
        with _explained(self.root, "read"):
            is_file = self.root.exists() and not self.root.is_dir()
        if is_file:
            raise ExperimentError(what="the store is a file, not a folder", where=f"store: {self.root}", fix="name a folder, or s3://BUCKET/PREFIX")

    def place(self, key: str = "") -> str:
        return str(self.root / key)

    def local(self, key: str = "") -> Path:
        return self.root / key

    def writing_locally(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _explained(self.local(key))

    def check_writable(self) -> None:
        with _explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".probe-") as folder:
                probe = Path(folder) / "probe"
                probe.write_bytes(b"raysd")
                os.link(probe, Path(folder) / "link")

    def now_s(self) -> float:
        # The file system's clock, not this machine's: on a shared one the server stamps the files, for every node alike.
        with _explained(self.root):
            try:
                with tempfile.TemporaryFile(dir=self.root) as file:
                    file.write(b".")
                    file.flush()
                    return os.fstat(file.fileno()).st_mtime
            except OSError as err:
                if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
                    return time.time()  # who may only read, or finds the disk full, can ask for no stamp
                raise

    def get(self, key: str) -> bytes | None:
        try:
            return self.local(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise ArtifactError(what=f"the file cannot be read: {err.strerror}", where=self.local(key), fix="make the store readable") from err

    def put(self, key: str, content: bytes) -> None:
        with self._part_of(key, content) as part:
            os.replace(part, self.local(key))

    def create(self, key: str, content: bytes) -> bool:
        with self._part_of(key, content) as part:
            try:
                os.link(part, self.local(key))  # unlike a rename, it fails if the name is taken
            except FileExistsError:
                return False
            _fsync(self.local(key).parent)
            return True

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        target = self.local(key)
        with _explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            size_bytes = path.stat().st_size
            _fsync(path)
            os.replace(path, target)
            _fsync(target.parent)
        if moved is not None:
            moved(size_bytes)

    def fetch(self, key: str, moved: Moved | None = None) -> Path:
        if not self.local(key).is_file():
            raise ArtifactError(what="the file is missing", where=self.local(key), fix="delete its artifact's folder to run the stage again")
        return self.local(key)

    def list(self, prefix: str) -> list[Entry]:
        return [entry for entry in self._all(prefix) if not entry.key.endswith(PART)]

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        with _explained(self.root):
            for key in keys:
                self.local(key).unlink(missing_ok=True)
                folders.add(self.local(key).parent)
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                while folder != self.root and self.root in folder.parents:
                    try:
                        folder.rmdir()
                    except OSError:  # not empty, or somebody was faster
                        break
                    folder = folder.parent

    def abandoned(self, older_than_s: float) -> list[Entry]:
        if not self.root.is_dir():
            return []
        now_s = self.now_s()
        return [entry for entry in self._all("") if entry.key.endswith(PART) and now_s - entry.modified_s >= older_than_s]

    def forget(self, uploads: Iterable[str]) -> None:
        self.delete(uploads)

    def _all(self, prefix: str) -> list[Entry]:
        """Files and parts of files whose key starts with a prefix, sorted by key."""
        folder, _, start = prefix.rpartition("/")
        found = []
        with _explained(self.local(folder), "read"):
            for parent, folders, names in os.walk(self.local(folder), onerror=_raise_unless_absent):
                at_top = Path(parent) == self.local(folder)
                if at_top:
                    folders[:] = [name for name in folders if name.startswith(start)]
                for name in names:
                    path = Path(parent) / name
                    if at_top and not name.startswith(start):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        status = path.stat()
                        found.append(Entry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.key)

    @contextlib.contextmanager
    def _part_of(self, key: str, content: bytes) -> Iterator[Path]:
        """The content in a file beside the key's, durable; gone on exit."""
        target = self.local(key)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}{PART}")
        with _explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                yield part
            finally:
                part.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_absent(err: OSError) -> None:
    if not isinstance(err, (FileNotFoundError, NotADirectoryError)):
        raise err


@contextlib.contextmanager
def _explained(path: Path, doing: str = "written") -> Iterator[None]:
    """Turns the operating system's refusal to write, or to read, below a path of the store into an ArtifactError that says what to do."""
    try:
        yield
    except OSError as err:
        fixes = {
            errno.ENOSPC: "free disk space, or name another folder in `store:`",
            errno.EDQUOT: "raise the quota, or name another folder in `store:`",
            errno.EACCES: "make the folder readable and writable, or name another one in `store:`",
            errno.EROFS: "name a folder on a writable file system in `store:`",
            errno.EPERM: "name a folder on a file system with hard links in `store:`",
        }
        raise ArtifactError(
            what=f"the store cannot be {doing}: {err.strerror}",
            where=err.filename or path,
            fix=fixes.get(err.errno, "check the folder in `store:`"),
        ) from err
