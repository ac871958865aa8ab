"""What a store could do without: `raysd gc`.

Kept are the newest resolved experiment of each name with all that it refers to, and what a running stage makes or reads. Of the rest goes what has
not been written for a while.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raysd.artifacts import ArtifactKey, Store
from raysd.artifacts.home import Entry
from raysd.artifacts.record import NAME
from raysd.artifacts.store import Content, Found
from raysd.errors import ExperimentError
from raysd.pipeline.status import is_running

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Garbage:
    """What may go, and what was left although it may be of no use."""

    artifacts: list[Found]
    uploads: list[Entry]
    """Begun and never finished."""
    damaged: list[str]
    """Places of artifacts that cannot be read: only a person can tell what they were."""
    now_s: float

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.artifacts) + sum(each.size_bytes for each in self.uploads)

    def as_json(self, deleted: bool) -> dict[str, Any]:
        """The object that `raysd gc --json` prints."""
        return {
            "deleted": deleted,
            "bytes": self.size_bytes,
            "artifacts": [{"experiment": each.key.experiment, "stage": each.key.stage, "fingerprint": each.key.fingerprint, "bytes": each.size_bytes,
                           "age_s": round(self.now_s - each.modified_s)} for each in self.artifacts],
            "uploads": [each.key for each in self.uploads],
            "damaged": self.damaged,
        }


def read_age_s(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `0s`. Raises ExperimentError for any other text."""
    match = re.fullmatch(r"(\d+)([smhdw])", text)
    if match is None:
        raise ExperimentError(what=f"`{text}` is not an age", where="--older-than", fix="write a number with s, m, h, d or w, for instance 30d")
    return int(match[1]) * UNITS_S[match[2]]


def find_garbage(store: Store, older_than_s: float) -> Garbage:
    """What may go. Reads all records and leases; deletes nothing."""
    found = store.inventory()
    contents = dict(zip([each.key for each in found], store.read_all(found), strict=True))
    now_s = store.home.now_s() if found else 0.0
    kept = referred(roots(found, contents), contents)
    return Garbage(
        artifacts=[each for each in found if each.key not in kept and contents[each.key].error is None and now_s - each.modified_s >= older_than_s],
        uploads=store.home.abandoned(older_than_s),
        damaged=[store.place(each.key) for each in found if contents[each.key].error is not None],
        now_s=now_s,
    )


def roots(found: Iterable[Found], contents: dict[ArtifactKey, Content]) -> set[ArtifactKey]:
    """What is kept for its own sake: all artifacts of the newest resolved experiment of each name, and all that is being made."""
    newest: dict[str, tuple[float, dict[str, Any]]] = {}
    for each in found:
        record, entry = contents[each.key].record, each.entry(NAME)
        if record is not None and entry is not None and entry.modified_s >= newest.get(each.key.experiment, (0.0, {}))[0]:
            newest[each.key.experiment] = (entry.modified_s, record.section)
    kept = set()
    for key, content in contents.items():
        if content.record is not None and content.record.section == newest[key.experiment][1]:
            kept.add(key)
        if content.record is None and content.lease is not None and content.lease.state() == "running":
            kept.add(key)
    return kept


def referred(keys: set[ArtifactKey], contents: dict[ArtifactKey, Content]) -> set[ArtifactKey]:
    """Keys with all that they were or are made from."""
    reached, waiting = set(), list(keys)
    while waiting:
        key = waiting.pop()
        if key in reached:
            continue
        reached.add(key)
        content = contents.get(key)
        if content is None:
            continue
        inputs = content.record.identity["inputs"] if content.record is not None else content.lease.lease.inputs if content.lease is not None else {}
        waiting += [ArtifactKey(key.experiment, stage, fingerprint) for stage, fingerprint in inputs.items()]
    return reached


def delete_garbage(store: Store, garbage: Garbage) -> None:
    """Deletes it; an artifact that somebody has begun to work on since is left."""
    for each in garbage.artifacts:
        if not is_running(store, each.key):
            store.delete(each)
    store.home.forget([upload.key for upload in garbage.uploads])
