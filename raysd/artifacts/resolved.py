"""What the name of an experiment stands for in a store: the target, and the artifacts of the experiment that was resolved last under it.

Written to `<experiment>/experiment.json` before anything of it runs: artifacts alone do not tell which of several settings is meant now, nor,
before the first is finished, which target the name belongs to.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from raysd.artifacts.sealed import seal, unseal
from raysd.errors import DamagedError

RESOLVED_SCHEMA = 1
RESOLVED_NAME = "experiment.json"
FIX = "delete it if no other target was used under this name: the next run writes it again"


class Resolved(BaseModel):
    """One experiment as it was resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    resolved_schema: int = RESOLVED_SCHEMA
    experiment: str
    target: dict[str, Any]
    """What `identify_target` said of its target."""
    stages: dict[str, str]
    """Stage name to fingerprint: all that the experiment is made of."""
    resolved: str
    """UTC, ISO 8601, by the clock of whoever ran it."""


def encode_resolved(resolved: Resolved) -> bytes:
    """The content of its file."""
    return seal(resolved.model_dump(mode="json"))


def decode_resolved(content: bytes, where: object) -> Resolved:
    """What a file holds. Raises DamagedError, naming `where`, if it is damaged or of another schema."""
    document = unseal(content, "note of what the name stands for", where, "resolved_schema", RESOLVED_SCHEMA, FIX)
    try:
        return Resolved.model_validate(document)
    except ValidationError as err:
        raise DamagedError(what=f"the note of what the name stands for does not parse ({err.error_count()} problems)", where=where, fix=FIX) from err
