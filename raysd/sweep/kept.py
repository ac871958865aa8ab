"""Finished pieces of an unfinished sweep: each in its own file with its checksum, so that a killed sweep repeats none of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from raysd.artifacts import fingerprint


def keep(folder: Path, identity: dict[str, Any], document: dict[str, Any]) -> None:
    """Stores a JSON-ready document under its identity, whole or not at all."""
    text = json.dumps(document, ensure_ascii=False)
    path = _path(folder, identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _sha256(text), "document": text}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def kept(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The document stored under an identity. None if there is none, or if its file is damaged: then the piece is simply done again."""
    try:
        stored = json.loads(_path(folder, identity).read_text(encoding="utf-8"))
        text = stored["document"]
        return json.loads(text) if _sha256(text) == stored["sha256"] else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _path(folder: Path, identity: dict[str, Any]) -> Path:
    return folder / f"{fingerprint(identity)}.json"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
