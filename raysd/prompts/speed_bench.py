"""SPEED-Bench's questions (arXiv 2604.09557): its Parquet files and what its preparation script makes of them, one folder or file a subset.

Like vLLM's own benchmark, only the first turn of a question is asked.
"""

from __future__ import annotations

from typing import Any

from raysd.errors import ExperimentError

WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How the text begins that stands in the place of questions whose licence forbids to pass them on."""


def is_question(fields: Any) -> bool:
    """Whether a row is one: it has turns and no request (as published), or a question's id and messages of users alone (as prepared)."""
    if not isinstance(fields, dict) or "prompt" in fields:
        return False
    if "messages" not in fields:
        return "turns" in fields
    messages = fields["messages"]
    return "question_id" in fields and isinstance(messages, list) and all(isinstance(message, dict) and message.get("role") == "user" for message in messages)


def question_fields(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """The row as `prompt`, with its id and category, and what it says of topic and split. Raises ExperimentError if it has no question, or one that is withheld."""
    name = "messages" if "messages" in fields else "turns"
    turns = [message.get("content") for message in fields["messages"]] if name == "messages" else fields["turns"]
    if not isinstance(turns, list) or not turns:
        raise ExperimentError(what=f"the question has no turn: {turns!r}", where=f"{place}: {name}", fix="remove the row")
    if isinstance(turns[0], str) and turns[0].startswith(WITHHELD):
        raise ExperimentError(what=f"the question is not in the file, since its licence forbids to pass it on: {turns[0][:60]!r}", where=f"{place}: {name}",
                              fix="make the subset with SPEED-Bench's own preparation script, which fetches such questions, and name what it writes")
    found = {"id": fields.get("question_id"), "prompt": turns[0], **{key: fields[key] for key in ("topic", "category", "split") if key in fields}}
    return found if found["id"] is None else found | {"id": str(found["id"])}
