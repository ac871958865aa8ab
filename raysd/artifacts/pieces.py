"""Finished pieces of an unfinished artifact: shards, checkpoints, cells. Each with its own checksum, so that a later attempt, perhaps on another
node, repeats none of them and trusts no damaged one.

A piece is two files: `<artifact>/work/<number of its lease>/NAME` and NAME.sum, the second written last. Each lease writes in a folder of its own:
an owner that was taken for dead and goes on can spoil no piece of its successor.
"""

from __future__ import annotations

import json
from pathlib import Path

from raysd.artifacts.home import Home
from raysd.artifacts.lease import HeldLease
from raysd.artifacts.record import FileEntry, is_whole, sha256_of

SUM = ".sum"


class Pieces:
    """The pieces of one artifact, for the one that holds its lease."""

    def __init__(self, home: Home, prefix: str, held: HeldLease) -> None:
        """prefix: the artifact's, ending with `/`."""
        self._home, self._prefix, self._held = home, f"{prefix}work/", held

    def keep(self, name: str, path: Path) -> Path:
        """Keeps a finished file as the piece of a name, in place of an earlier one; returns where it is on this machine now: it is moved there.

        Raises LeaseLostError if the artifact is somebody else's by now, ArtifactError or TryAgainError if it cannot be written.
        """
        self._held.check()
        entry = FileEntry(size_bytes=path.stat().st_size, sha256=sha256_of(path))
        number = self._held.lease.number
        key = f"{self._prefix}{number:05d}/{name}"
        self._home.delete([key + SUM])  # of the piece that is replaced: beside the new content it would call it damaged
        self._home.put_file(key, path)
        self._home.put(key + SUM, entry.model_dump_json().encode("utf-8"))
        if number > 1:
            self._home.delete([file for file, of, rest in self._numbered() if of < number and rest in (name, name + SUM)])
        print(f"kept {name}", flush=True)
        return self._home.local(key)

    def find(self, name: str) -> Path | None:
        """The piece of a name on this machine, fetched if need be; None if there is none, or none that is whole."""
        found = [key.removesuffix(SUM) for key, _, rest in reversed(self._numbered()) if rest == name + SUM]
        for key in found:
            if (path := self._whole(key)) is not None:
                return path
        if found:
            print(f"damaged: {name}; it is made again", flush=True)
        return None

    def _numbered(self) -> list[tuple[str, int, str]]:
        """Key, number of the lease and name of each file of each piece, by lease."""
        files = []
        for entry in self._home.list(self._prefix):
            number, _, rest = entry.key.removeprefix(self._prefix).partition("/")
            if number.isdecimal():
                files.append((entry.key, int(number), rest))
        return files

    def _whole(self, key: str) -> Path | None:
        """The piece under a key, on this machine; None if it differs from its checksum."""
        try:
            entry = FileEntry(**json.loads(self._home.get(key + SUM) or b""))
        except (ValueError, TypeError):  # pydantic's errors are ValueErrors
            return None
        path = self._home.local(key)
        if self._home.remote and not is_whole(path, entry):
            if not any(each.key == key and each.size_bytes == entry.size_bytes for each in self._home.list(key)):
                return None
            self._home.fetch(key)
        return path if is_whole(path, entry) else None
