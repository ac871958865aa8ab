"""Small JSON documents with a checksum of their own: a flipped byte in a number would otherwise still be JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from raysd.errors import DamagedError

CHECKSUM = "document_sha256"


def seal(document: dict[str, Any]) -> bytes:
    """The document as JSON, with its checksum in it."""
    return json.dumps(document | {CHECKSUM: _checksum(document)}, indent=1, ensure_ascii=False).encode("utf-8")


def unseal(content: bytes, noun: str, where: object, schema_field: str, schema: int, fix: str) -> dict[str, Any]:
    """The document in a file's content, without its checksum.

    noun: what it is, for messages. Raises DamagedError, naming `where`, if it is damaged or its `schema_field` is another than `schema`; fix: what to do then.
    """
    try:
        document = json.loads(content)
        checksum, found = document.pop(CHECKSUM, None), document[schema_field]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise DamagedError(what=f"the {noun} is damaged: it is not the JSON that was written", where=where, fix=fix) from err
    if isinstance(found, int) and found != schema:
        raise DamagedError(what=f"the {noun} has schema {found}, this raysd reads {schema}", where=where, fix="upgrade raysd" if found > schema else fix)
    if checksum != _checksum(document):
        raise DamagedError(what=f"the {noun} is damaged: it differs from the checksum in it", where=where, fix=fix)
    return document


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
