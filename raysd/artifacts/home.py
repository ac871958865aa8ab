"""A home of artifacts: the few things that a store asks of a folder or of S3, so that all else is written once.

Keys are relative, with `/` between their parts: `tiny/train/0f3a.../record.json`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raysd.errors import ArtifactError

Moved = Callable[[int], None]
"""Called with the bytes that were moved since the last call."""
OF_ARTIFACT = re.compile(r"[^/]+/[^/]+/[0-9a-f]{32}/.+", re.DOTALL)
"""Keys of what belongs to an artifact, finished or not. Whatever else lies in a home is somebody else's."""


@dataclass(frozen=True)
class Entry:
    """One stored file."""

    key: str
    size_bytes: int
    modified_s: float
    """When it was last written, in seconds of the home's own clock (`Home.now_s`)."""


class Home(Protocol):
    """Where files are kept. Every method raises ArtifactError or TryAgainError, naming the place, when the home refuses or does not answer."""

    uri: str
    """The home as `--store` takes it."""
    remote: bool
    """Whether a file must be fetched before it can be read."""

    def place(self, key: str = "") -> str:
        """A key as a person names it: a path or a URL."""

    def local(self, key: str = "") -> Path:
        """Where a key's file is on this machine; for a remote home, where its copy is or will be. The file may be absent."""

    def writing_locally(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Turns the operating system's refusal to write at `local(key)` into an ArtifactError that says what to do."""

    def exists(self) -> bool:
        """Whether there is anything at the place: the folder, or the bucket. A bucket that is not there raises ExperimentError."""

    def check_writable(self) -> None:
        """Raises if nothing can be written, or if the home cannot create a file only if it is absent. Leaves nothing behind."""

    def now_s(self) -> float:
        """The home's own clock: the one that `Entry.modified_s` is told in, whatever the clocks of the machines that use it say."""

    def get(self, key: str) -> bytes | None:
        """The content; None if there is none."""

    def put(self, key: str, content: bytes) -> None:
        """Writes or replaces a small file; a reader sees the old content or the new."""

    def create(self, key: str, content: bytes) -> bool:
        """Writes a small file only if there is none under the key; False if there is. Of several at once exactly one gets True."""

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        """Writes or replaces a file with that at a path, whole or not at all; durable on return. The file itself moves to `local(key)`."""

    def fetch(self, key: str, moved: Moved | None = None) -> Path:
        """The file on this machine, at `local(key)`. Raises ArtifactError if there is none."""

    def list(self, prefix: str, skipped: list[ArtifactError] | None = None) -> list[Entry]:
        """All files whose key starts with a prefix, that ends with `/` or within a file's name; sorted by key.

        skipped: takes the errors of what cannot be read below the prefix, and the rest is listed; without it, the first of them is raised. That of
        the prefix's own folder is raised in any case.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes files; one that is absent already is no error."""

    def abandoned(self, older_than_s: float) -> list[Entry]:
        """What raysd began to write so long ago and never finished: it counts for nothing and takes space. `key` is what `forget` takes.
        What may not be read is left out."""

    def forget(self, uploads: Iterable[str]) -> None:
        """Discards it."""
