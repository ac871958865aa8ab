"""What a store could do without: `raysd gc`.

Kept are the newest resolved experiment of each name with all that it refers to, and what is being made or read by whoever runs. Of the rest goes what has
not been written for a while. What raysd did not write is never touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from raysd.artifacts import ArtifactKey, Store
from raysd.artifacts.home import OF_ARTIFACT, Entry
from raysd.artifacts.store import Content, Found, is_leftover
from raysd.errors import ArtifactError, DamagedError, ExperimentError
from raysd.pipeline.stages import OURS

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Garbage:
    """What may go, and what was left although it may be of no use."""

    artifacts: list[Found]
    leftovers: list[Entry]
    """Files of unfinished work beside a finished artifact that is kept: of an attempt that was killed as it cleared up, or was taken for dead."""
    uploads: list[Entry]
    """Begun and never finished."""
    left: list[str]
    """Why something was left that nobody may need, a line each: only a person can tell what it is."""
    now_s: float

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in (*self.artifacts, *self.leftovers, *self.uploads))

    def as_json(self, deleted: bool) -> dict[str, Any]:
        """The object that `raysd gc --json` prints."""
        return {
            "deleted": deleted,
            "bytes": self.size_bytes,
            "artifacts": [{"experiment": each.key.experiment, "stage": each.key.stage, "fingerprint": each.key.fingerprint, "bytes": each.size_bytes,
                           "age_s": round(self.now_s - each.modified_s)} for each in self.artifacts],
            "leftovers": [each.key for each in self.leftovers],
            "uploads": [each.key for each in self.uploads],
            "left": self.left,
        }


def read_age_s(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `0s`. Raises ExperimentError for any other text."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if match is None:
        raise ExperimentError(what=f"`{text}` is not an age", where="--older-than",
                              fix="write a number of up to six digits with s, m, h, d or w, for instance 30d")
    return int(match[1]) * UNITS_S[match[2]]


def find_garbage(store: Store, older_than_s: float) -> Garbage:
    """What may go. Reads all records and leases; deletes nothing."""
    skipped: list[ArtifactError] = []
    found = [each for each in store.inventory(skipped=skipped) if each.key.stage in OURS]
    contents = dict(zip([each.key for each in found], store.read_all(found), strict=True))
    now_s = store.home.now_s() if found else 0.0
    left = [f"{error.where}: {error.what}" for error in skipped]
    kept: set[ArtifactKey] = set()
    for name in sorted({key.experiment for key in contents}):
        try:
            if any(f"{error.where}/".startswith(f"{store.home.place(name)}/") for error in skipped):
                raise DamagedError(what="what cannot be read may refer to the rest", where=store.home.place(name), fix="make it readable")
            kept |= protected(store, name, contents)
        except ArtifactError as err:
            left.append(f"all of {name}: {err.what} ({err.where})")
            kept |= {key for key in contents if key.experiment == name}
    left += [f"{store.place(key)}: {content.error.what}" for key, content in contents.items() if key not in kept and content.error is not None]
    gone = [each for each in found if each.key not in kept and _is_ours(each, contents[each.key]) and now_s - each.modified_s >= older_than_s]
    busy = {key for key, content in contents.items() if _is_running(content)}
    uploads = [entry for entry in store.home.abandoned(older_than_s) if (key := _artifact_of(entry)) is not None and key not in busy]
    leftovers = [entry for each in found if each not in gone and (record := contents[each.key].record) is not None for entry in each.files
                 if is_leftover(entry.key.removeprefix(each.key.prefix), record) and now_s - entry.modified_s >= older_than_s]
    return Garbage(artifacts=gone, leftovers=leftovers, uploads=uploads, left=left, now_s=now_s)


def protected(store: Store, experiment: str, contents: dict[ArtifactKey, Content]) -> set[ArtifactKey]:
    """What is kept of an experiment: what its name stands for, and all that somebody who runs makes or reads.

    Raises DamagedError if nobody can tell what the name stands for.
    """
    resolved = store.resolved(experiment)
    if resolved is None:
        raise DamagedError(what="what its name stands for now is not written", where=f"{experiment}/experiment.json", fix="run it once, or delete it by hand")
    kept = {ArtifactKey(experiment, stage, fingerprint) for stage, fingerprint in resolved.stages.items()}
    kept |= {key for key, content in contents.items() if key.experiment == experiment and _is_running(content)}
    return referred(kept, contents)


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


def delete_garbage(store: Store, garbage: Garbage) -> Garbage:
    """Deletes what is still garbage when its turn comes; returns what that was: a run may have begun since that needs what was not needed before."""
    deleted, left = [], list(garbage.left)
    finished: dict[ArtifactKey, Content] = {}
    for each in garbage.artifacts:
        name = each.key.experiment
        found = {one.key: one for one in store.inventory(name)}
        asked = [one for one in found.values() if one.key not in finished]  # records do not change
        contents = dict(zip([one.key for one in asked], store.read_all(asked), strict=True))
        finished |= {key: content for key, content in contents.items() if content.record is not None}
        try:
            kept = protected(store, name, finished | contents)
        except ArtifactError as err:  # since it was looked at
            left.append(f"{store.place(each.key)}: {err.what} ({err.where})")
            continue
        if each.key not in kept and found.get(each.key) == each:  # all its files as they were: nobody has worked on it since
            store.delete(each)
            deleted.append(each)
    store.home.delete([entry.key for entry in garbage.leftovers])
    store.home.forget([upload.key for upload in garbage.uploads])
    return Garbage(deleted, garbage.leftovers, garbage.uploads, left, garbage.now_s)


def _is_ours(found: Found, content: Content) -> bool:
    """Whether raysd made it, so that it may go: it can be read, or it is what is left of an attempt that never began, nothing but logs."""
    if content.error is not None:
        return False
    return content.record is not None or content.lease is not None or all(_is_log(entry) for entry in found.files)


def _is_log(entry: Entry) -> bool:
    return re.fullmatch(r"job-a\d+\.log", entry.key.rpartition("/")[2]) is not None


def _is_running(content: Content) -> bool:
    return content.record is None and content.lease is not None and content.lease.state() == "running"


def _artifact_of(upload: Entry) -> ArtifactKey | None:
    """The artifact that an unfinished upload is of; None if it is of none."""
    if OF_ARTIFACT.match(upload.key) is None:
        return None
    key = ArtifactKey(*upload.key.split("/")[:3])
    return key if key.stage in OURS else None
