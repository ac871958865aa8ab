"""The home of artifacts in a folder: on this machine, or on a file system that several nodes share."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from raysd.artifacts.home import Entry, Moved
from raysd.errors import ArtifactError, ExperimentError

PART_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)
"""Of a file that is being written (`_part_beside`)."""
SCRATCH = re.compile(r"[^/]+/[^/]+/[0-9a-f]{32}/work/attempt-[^/]+/.+", re.DOTALL)
"""Below an attempt's own folder (`Work.scratch`). Links that its tools made there are not followed: what they lead to must not be deleted with it."""
FOLDER_ATTEMPTS = 3

ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""How reading fails where there is nothing: no such name, a file in the middle of the path, a link to itself."""


class FolderHome:
    """Files below a folder (a Home). Writing is by a rename or a hard link, which POSIX file systems and NFS do as one step."""

    remote = False

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.uri = str(root)
        with _explained(self.root, "read"):
            nearest = next(path for path in (self.root, *self.root.parents) if path.exists())
            is_file = not nearest.is_dir()
        if is_file:
            what = "the store is a file, not a folder" if nearest == self.root else f"the store would lie below a file, {nearest}"
            raise ExperimentError(what=what, where=f"store: {self.root}", fix="name a folder, or s3://BUCKET/PREFIX")

    def place(self, key: str = "") -> str:
        return str(self.root / key)

    def local(self, key: str = "") -> Path:
        return self.root / key

    def writing_locally(self, key: str) -> contextlib.AbstractContextManager[None]:
        return _explained(self.local(key))

    def exists(self) -> bool:
        with _explained(self.root, "read"):
            return self.root.is_dir()

    def check_writable(self) -> None:
        with self._part_of("probe", b"raysd") as part:
            link = _part_beside(self.local("probe"))  # a part as well: a process that is killed here leaves what `abandoned` finds
            os.link(part, link)
            link.unlink()

    def now_s(self) -> float:
        # The file system's clock, not this machine's: on a shared one the server stamps the files, for every node alike.
        with _explained(self.root):
            try:
                with tempfile.TemporaryFile(dir=self.root) as file:
                    file.write(b".")
                    file.flush()
                    return os.fstat(file.fileno()).st_mtime
            except OSError as err:
                if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                    return time.time()  # who may only read, or finds the disk full, can ask for no stamp
                raise

    def get(self, key: str) -> bytes | None:
        with _reading(self.local(key)):
            return self.local(key).read_bytes()
        return None

    def put(self, key: str, content: bytes) -> None:
        with self._part_of(key, content) as part:
            os.replace(part, self.local(key))

    def create(self, key: str, content: bytes) -> bool:
        with self._part_of(key, content) as part:
            try:
                os.link(part, self.local(key))  # unlike a rename, it fails if the name is taken
            except FileExistsError:
                return part.stat().st_nlink == 2  # NFS asks again when an answer is lost, and then meets the link that it made itself
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
        with _explained(self.local(key), "read"):
            is_file = self.local(key).is_file()
        if not is_file:
            raise ArtifactError(what="the file is missing", where=self.local(key), fix="delete its artifact's folder to run the stage again")
        return self.local(key)

    def list(self, prefix: str, skipped: list[ArtifactError] | None = None) -> list[Entry]:
        return [entry for entry in self._all(prefix, skipped) if not _is_part(entry)]

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        with _explained(self.root):
            for key in keys:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self.local(key).unlink()
                folders.add(self.local(key).parent)
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                while folder != self.root and self.root in folder.parents:
                    try:
                        folder.rmdir()
                    except OSError:  # not empty, or somebody was faster
                        break
                    folder = folder.parent

    def abandoned(self, older_than_s: float) -> list[Entry]:
        if not self.exists():
            return []
        now_s = self.now_s()
        return [entry for entry in self._all("", skipped=[]) if _is_part(entry) and now_s - entry.modified_s >= older_than_s]

    def forget(self, uploads: Iterable[str]) -> None:
        self.delete(uploads)

    def _all(self, prefix: str, skipped: list[ArtifactError] | None) -> list[Entry]:
        """Files and parts of files whose key starts with a prefix, sorted by key; skipped: as in `list`.

        Links to folders are followed, once all folders that are no links are listed: what several names lead to has the first of them. Those in an
        attempt's own folder are not (SCRATCH).
        """
        top, _, start = prefix.rpartition("/")
        real_top = os.path.realpath(self.local(top))
        # What a link to a folder around this one leads to has a name already.
        listed = {*map(os.path.realpath, self.local(top).absolute().parents), *map(str, Path(real_top).parents)}
        folders, links, found = [(top, real_top)], [], []
        while folders or links:
            folder, real = folders.pop() if folders else heapq.heappop(links)
            if real in listed:
                continue
            listed.add(real)
            with _reading(self.local(folder), None if folder == top else skipped), os.scandir(self.local(folder)) as children:
                for child in children:
                    if folder == top and not child.name.startswith(start):
                        continue
                    key = f"{folder}/{child.name}" if folder else child.name
                    with _reading(child.path, skipped):
                        if not child.is_dir():
                            status = child.stat()
                            found.append(Entry(key, status.st_size, status.st_mtime))
                        elif not child.is_symlink():
                            folders.append((key, os.path.join(real, child.name)))
                        elif not SCRATCH.fullmatch(key):
                            heapq.heappush(links, (key, os.path.realpath(child.path)))
        return sorted(found, key=lambda entry: entry.key)

    @contextlib.contextmanager
    def _part_of(self, key: str, content: bytes) -> Iterator[Path]:
        """The content in a file beside the key's, durable; gone on exit."""
        target = self.local(key)
        part = _part_beside(target)
        with _explained(target):
            file = _new_file(part)
            try:
                with file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                yield part
            finally:
                part.unlink(missing_ok=True)


def _new_file(path: Path, attempts: int = FOLDER_ATTEMPTS) -> IO[bytes]:
    """A file to write, with its folder; somebody else may delete that, empty as it is, in between."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except FileNotFoundError:
        if attempts == 1:
            raise
        return _new_file(path, attempts - 1)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _part_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")


def _is_part(entry: Entry) -> bool:
    return PART_NAME.fullmatch(entry.key.rpartition("/")[2]) is not None


@contextlib.contextmanager
def _reading(path: Path | str, skipped: list[ArtifactError] | None = None) -> Iterator[None]:
    """What is absent ends the `with` and is no error; what cannot be read is one for `skipped`, or raised without it."""
    try:
        with _explained(Path(path), "read"):
            try:
                yield
            except OSError as err:
                if err.errno not in ABSENT:
                    raise
    except ArtifactError as err:
        if skipped is None:
            raise
        skipped.append(err)


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
            errno.EEXIST: "remove what stands in the folder's place: a file, or a link to a folder that is not there",
            errno.EROFS: "name a folder on a writable file system in `store:`",
            errno.EPERM: "name a folder on a file system with hard links in `store:`",
        }
        raise ArtifactError(
            what=f"the store cannot be {doing}: {err.strerror}",
            where=err.filename2 or err.filename or path,  # of a rename or a link, where it leads
            fix=fixes.get(err.errno, "check the folder in `store:`"),
        ) from err
