"""The store: artifacts by experiment, stage and fingerprint, in one of the homes.

    <experiment>/experiment.json                          what the name stands for (artifacts/resolved.py)
    <experiment>/<stage>/<fingerprint>/record.json        there is an artifact, and these are its files
                                       files-0f3a.../...  its files
                                       lease-00001.json   who works on it, or did
                                       job-a1.log         what the job of an attempt said
                                       work/              unfinished: pieces, and one attempt's own files
    <experiment>/run/<random>/lease-00001.json            somebody runs the experiment now
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from raysd.artifacts.home import OF_ARTIFACT, Entry, Home
from raysd.artifacts.lease import Clock, HeldLease, LeaseLostError, SeenLease, hold_lease, lease_entries, newest_lease, read_lease, utc_now
from raysd.artifacts.pieces import Pieces
from raysd.artifacts.record import NAME, Record, again, check_sizes, decode_record, encode_record, is_whole, verify_files
from raysd.artifacts.resolved import RESOLVED_NAME, Resolved, decode_resolved, encode_resolved
from raysd.artifacts.stage import Progress, no_progress
from raysd.errors import ArtifactError, DamagedError, RaysdError, TryAgainError

PARALLEL = 16
"""Small files asked for at once."""
LOG_INTERVAL_S = 10.0
"""Between two uploads of a log that is still being written."""
RUN = "run"
"""Stands in the place of a stage in the keys of leases that say who runs an experiment."""


@dataclass(frozen=True)
class ArtifactKey:
    """Names one artifact."""

    experiment: str
    stage: str
    fingerprint: str

    @property
    def prefix(self) -> str:
        """What the keys of all its files start with."""
        return f"{self.experiment}/{self.stage}/{self.fingerprint}/"


@dataclass(frozen=True)
class Found:
    """An artifact, finished or not, as a listing finds it."""

    key: ArtifactKey
    files: list[Entry]
    """All of it: its files, its record, leases, logs and unfinished work."""

    def entry(self, name: str) -> Entry | None:
        """The stored file of a name inside the artifact."""
        return next((entry for entry in self.files if entry.key == self.key.prefix + name), None)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def modified_s(self) -> float:
        """When any of it was last written, on the home's clock."""
        return max(entry.modified_s for entry in self.files)


@dataclass(frozen=True)
class Content:
    """What is told of an artifact."""

    record: Record | None
    lease: SeenLease | None
    error: ArtifactError | None
    """Why the record, or neither of them, can be read."""


class Store:
    """Artifacts in a home. All methods raise what the home raises."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @property
    def uri(self) -> str:
        """The store as `--store` takes it."""
        return self.home.uri

    def check_writable(self) -> None:
        """Raises ArtifactError, naming the place, if nothing can be written."""
        self.home.check_writable()

    def place(self, key: ArtifactKey, name: str = "") -> str:
        """The artifact, or a file of it, as a person names it."""
        return self.home.place(key.prefix + name).rstrip("/")

    def folder(self, key: ArtifactKey) -> Path:
        """Where the artifact's files are on this machine, or would be. Nothing is checked, and the folder may be absent."""
        return self.home.local(key.prefix.rstrip("/"))

    def record(self, key: ArtifactKey) -> Record | None:
        """The artifact's record, or None if the artifact does not exist.

        Quick: sizes are compared, contents are not (`open` does). Raises DamagedError, naming the file, if the record is damaged or another
        artifact's, or if a file is missing or of another size.
        """
        record = self._read_record(key)
        if record is not None:
            folder = f"{key.prefix}{record.folder}/"
            check_sizes({entry.key.removeprefix(folder): entry.size_bytes for entry in self.home.list(folder)}, record, self.place(key))
        return record

    def newest_record(self, experiment: str, stage: str) -> Record | None:
        """The record that was written last, of one stage of one experiment; None if there is none. Raises ArtifactError if it is damaged."""
        records = [entry for entry in self.home.list(f"{experiment}/{stage}/") if entry.key.endswith(f"/{NAME}") and entry.key.count("/") == 3]
        if not records:
            return None
        newest = max(records, key=lambda entry: (entry.modified_s, entry.key))
        return self._read_record(ArtifactKey(experiment, stage, newest.key.split("/")[2]))

    def open(self, key: ArtifactKey, progress: Progress = no_progress) -> Path:
        """A folder on this machine with the artifact's verified files; the record is beside it. Raises ArtifactError if it is absent, DamagedError if it is damaged."""
        record = self.record(key)
        if record is None:
            raise ArtifactError(what=f"there is no {key.stage} artifact {key.fingerprint[:12]}", where=self.place(key), fix=f"run the stage {key.stage} first")
        folder, place = self.folder(key) / record.folder, self.place(key)
        if not self.home.remote:
            verify_files(folder, record, place)
            return folder
        try:
            verify_files(folder, record, place)
        except DamagedError:  # it is the copy that is absent or damaged
            lacking = {name: entry.size_bytes for name, entry in record.files.items() if not is_whole(folder / name, entry)}
            moved = _counted(progress, f"fetching {key.stage}", sum(lacking.values()))
            for name in lacking:
                self.home.fetch(f"{key.prefix}{record.folder}/{name}", moved)
            verify_files(folder, record, place)
        self.home.fetch(key.prefix + NAME)
        return folder

    def resolved(self, experiment: str) -> Resolved | None:
        """What a name stands for; None if nothing ran under it. Raises DamagedError if that cannot be told."""
        content = self.home.get(f"{experiment}/{RESOLVED_NAME}")
        return None if content is None else decode_resolved(content, self.home.place(f"{experiment}/{RESOLVED_NAME}"))

    def first_resolved(self, resolved: Resolved) -> bool:
        """Makes a name that stood for nothing stand for an experiment; False if it stands for something already."""
        return self.home.create(f"{resolved.experiment}/{RESOLVED_NAME}", encode_resolved(resolved))

    def now_resolved(self, resolved: Resolved) -> None:
        """Makes a name stand for an experiment."""
        self.home.put(f"{resolved.experiment}/{RESOLVED_NAME}", encode_resolved(resolved))

    def lease(self, key: ArtifactKey) -> SeenLease | None:
        """The artifact's newest lease, or None if nobody ever worked on it."""
        return newest_lease(self.home, key.prefix)

    @contextlib.contextmanager
    def work_on(self, key: ArtifactKey, inputs: dict[str, str], job: str = "", clock: Clock = utc_now) -> Iterator[Work]:
        """Holds the artifact's lease, with what is needed to make it; the arguments are `hold_lease`'s. Raises LeaseHeldError if somebody else does."""
        with hold_lease(self.home, key.prefix, key.experiment, key.stage, key.fingerprint, inputs, job, clock=clock) as held:
            yield Work(self, key, held)

    @contextlib.contextmanager
    def run_of(self, experiment: str, stages: dict[str, str]) -> Iterator[HeldLease]:
        """Tells everybody, by a lease of its own, that this process runs an experiment: between its stages, too, and while its jobs wait.

        stages: name to fingerprint of what it is made of; `raysd gc` leaves all of it alone.
        """
        key = ArtifactKey(experiment, RUN, uuid.uuid4().hex)
        try:
            with hold_lease(self.home, key.prefix, experiment, RUN, key.fingerprint, stages) as held:
                yield held
        finally:
            with contextlib.suppress(RaysdError):  # what is left is stale within STALE_S, and `raysd gc` takes it
                self.home.delete([entry.key for entry in self.home.list(key.prefix)])

    @contextlib.contextmanager
    def log(self, key: ArtifactKey, attempt: int) -> Iterator[KeptLog]:
        """A log of an attempt, kept beside the artifact while it is written."""
        name = log_name(attempt)
        path = self.home.local(key.prefix + name)
        with self.home.writing_locally(key.prefix + name):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w", encoding="utf-8", errors="replace")
        with file:
            log = KeptLog(self.home, key.prefix + name, file)
            try:
                log.upload()
                yield log
            except BaseException as err:
                try:
                    log.upload()
                except RaysdError as also:  # the interruption, or what went wrong, is what must be told
                    err.add_note(f"the end of the log could not be kept: {also.what}")
                raise
            log.upload()

    def new_log(self, key: ArtifactKey, attempt: int) -> bool:
        """Takes the log of an attempt for the caller; False if there is one already, perhaps another runner's of the same instant."""
        return self.home.create(key.prefix + log_name(attempt), b"")

    def logs(self, key: ArtifactKey) -> dict[int, float]:
        """Attempts whose logs are kept, in order, and when each was last written, on the home's clock."""
        entries = [(re.fullmatch(r"job-a(\d+)\.log", entry.key.rpartition("/")[2]), entry) for entry in self.home.list(f"{key.prefix}job-a")]
        return dict(sorted((int(match[1]), entry.modified_s) for match, entry in entries if match))

    def read_log(self, key: ArtifactKey, attempt: int) -> str:
        """What is kept of an attempt's log so far; empty if there is none."""
        return (self.home.get(key.prefix + log_name(attempt)) or b"").decode("utf-8", "replace")

    def inventory(self, experiment: str | None = None, skipped: list[ArtifactError] | None = None) -> list[Found]:
        """Everything that is an artifact, finished or not, of one experiment or of all, from one listing.

        skipped: as `Home.list` takes it.
        """
        found: dict[ArtifactKey, list[Entry]] = {}
        for entry in self.home.list("" if experiment is None else f"{experiment}/", skipped):
            if OF_ARTIFACT.match(entry.key):
                found.setdefault(ArtifactKey(*entry.key.split("/")[:3]), []).append(entry)
        return [Found(key, files) for key, files in found.items()]

    def read_all(self, found: list[Found]) -> list[Content]:
        """Record and newest lease of each, read side by side."""
        now_s = self.home.now_s() if found else 0.0

        def read(each: Found) -> Content:
            leases, record = lease_entries(each.files), None
            try:
                record = self._read_record(each.key) if each.entry(NAME) else None
                return Content(record, read_lease(self.home, leases[-1], now_s) if leases else None, None)
            except ArtifactError as err:
                return Content(record, None, None if record else err)  # with a record nobody needs the lease any more

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(read, found))

    def delete(self, found: Found) -> None:
        """Deletes an artifact: its record first, so that what is left of an interrupted deletion is no artifact."""
        self.home.delete([found.key.prefix + NAME])
        self.home.delete([entry.key for entry in found.files])

    def _read_record(self, key: ArtifactKey) -> Record | None:
        content = self.home.get(key.prefix + NAME)
        if content is None:
            return None
        record = decode_record(content, self.place(key, NAME))
        if (record.experiment, record.stage, record.fingerprint) != (key.experiment, key.stage, key.fingerprint):
            raise DamagedError(what=f"the record is that of {record.experiment}/{record.stage}/{record.fingerprint[:12]}", where=self.place(key, NAME),
                               fix=again(record, self.place(key)))
        return record


class Work:
    """What the holder of an artifact's lease makes it with."""

    def __init__(self, store: Store, key: ArtifactKey, held: HeldLease) -> None:
        self._store, self._key = store, key
        self.held = held
        self.pieces = Pieces(store.home, key.prefix, held)
        self.scratch = store.home.local(f"{key.prefix}work/attempt-{held.lease.number}")
        """This attempt's own folder on this machine, for what no other attempt needs."""
        self.folder = f"files-{held.lease.token[:12]}"
        """Where this lease's files go: `Record.folder`."""

    def clear(self) -> Path:
        """Makes the scratch folder, and removes those of attempts before; returns an empty folder in it for the artifact's files."""
        for folder in self.scratch.parent.glob("attempt-*"):
            shutil.rmtree(folder, ignore_errors=True)  # its attempt may still be dying, or be another machine's
        with self._store.home.writing_locally(f"{self._key.prefix}work/"):
            out = self.scratch / "out"
            out.mkdir(parents=True)
        return out

    def publish(self, folder: Path, record: Record, progress: Progress = no_progress) -> Path:
        """Makes the files of a folder the artifact, then writes its record; returns the folder of its files on this machine. The files are moved.

        record: its `folder` is this work's. Raises LeaseLostError if another run has the lease, or has published before.
        """
        store, home, prefix = self._store, self._store.home, self._key.prefix
        moved = _counted(progress, "publishing", sum(entry.size_bytes for entry in record.files.values()))
        for name in record.files:
            self.held.check()
            home.put_file(f"{prefix}{self.folder}/{name}", folder / name, moved)
        self.held.check_now()
        if not home.create(prefix + NAME, encode_record(record)):
            raise LeaseLostError(what=f"another run published the {self._key.stage} artifact meanwhile", where=store.place(self._key), fix="run again: it is found")
        # Leftovers are only disk space from here on, and the record says which are.
        home.delete([entry.key for entry in home.list(prefix) if is_leftover(entry.key.removeprefix(prefix), record)])
        shutil.rmtree(home.local(f"{prefix}work"), ignore_errors=True)
        return store.folder(self._key) / self.folder


class KeptLog:
    """A log that is written on this machine and kept beside its artifact."""

    def __init__(self, home: Home, key: str, file: IO[str]) -> None:
        self._home, self._key, self._file = home, key, file
        self._uploaded_s = time.monotonic()

    def write(self, line: str) -> None:
        """Adds a line."""
        with self._home.writing_locally(self._key):
            self._file.write(line + "\n")
            self._file.flush()
        if time.monotonic() - self._uploaded_s > LOG_INTERVAL_S:
            with contextlib.suppress(TryAgainError):  # the next one brings it all; only the last must not fail
                self.upload()

    def replace(self, lines: str) -> None:
        """Writes the whole log anew."""
        with self._home.writing_locally(self._key):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(lines)
            self._file.flush()

    def upload(self) -> None:
        """Brings what is written so far to the home, if that is elsewhere."""
        if self._home.remote:
            self._uploaded_s = time.monotonic()
            self._home.put(self._key, self._home.local(self._key).read_bytes())


def log_name(attempt: int) -> str:
    """The file that keeps the log of an attempt."""
    return f"job-a{attempt}.log"


def is_leftover(name: str, record: Record) -> bool:
    """Whether a file of this name below a finished artifact is of unfinished work, or of an attempt that died while it published."""
    return name.startswith("work/") or (name.startswith("files-") and not name.startswith(f"{record.folder}/"))


def _counted(progress: Progress, doing: str, total_bytes: int):
    """A callable for bytes that were moved, which tells the progress in GB."""
    done = 0

    def moved(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(doing, done / 1e9, total_bytes / 1e9, "GB")

    return moved
