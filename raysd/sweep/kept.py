"""Finished pieces of an unfinished sweep, as JSON: a killed sweep repeats none of them."""

from __future__ import annotations

import json
from typing import Any

from raysd.artifacts.fingerprint import fingerprint
from raysd.artifacts.stage import StageRun


def keep(run: StageRun, kind: str, identity: dict[str, Any], document: dict[str, Any]) -> None:
    """Keeps a JSON-ready document under its identity, for this attempt and later ones. kind: the folder of its name, `cells`."""
    name = _name(kind, identity)
    path = run.work / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    run.pieces.keep(name, path)


def kept(run: StageRun, kind: str, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The document kept under an identity; None if there is none that is whole: then the piece is simply done again."""
    path = run.pieces.find(_name(kind, identity))
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def _name(kind: str, identity: dict[str, Any]) -> str:
    return f"{kind}/{fingerprint(identity)}.json"
