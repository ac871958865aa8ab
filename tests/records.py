"""Records and artifacts for tests that need some to be there: made by the store's own code, of given files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysd.artifacts import ArtifactKey, Record, Store, describe_files
from raysd.pipeline.stages import Stage

AT = "2026-01-01T00:00:00+00:00"


def make_record(key: ArtifactKey, out: Path, **changes: Any) -> Record:
    """A record of the files in `out`."""
    facts = {"experiment": key.experiment, "stage": key.stage, "fingerprint": key.fingerprint, "identity": {"stage": key.stage, "inputs": {}}, "section": {},
             "code_version": "0", "packages": {}, "host": {}, "metrics": {}, "started": AT, "ended": AT, "elapsed_s": 1.0, "attempt": 1,
             "folder": "files-0123456789ab", "files": describe_files(out)}
    return Record(**{**facts, **changes})


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files of given contents below a folder, which it returns."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def publish_files(store: Store, key: ArtifactKey, files: Mapping[str, bytes], **changes: Any) -> Record:
    """Publishes an artifact of given files, as a job does; returns its record."""
    with store.work_on(key, {}) as work:
        out = write_files(work.clear(), files)
        record = make_record(key, out, folder=work.folder, **changes)
        assert work.publish(out, record) == store.folder(key) / record.folder
    return record


def publish_stage(store: Store, stage: Stage, **changes: Any) -> Record:
    """Publishes an empty artifact of a stage."""
    return publish_files(store, stage.key, {}, **{"identity": stage.identity, **changes})
