"""Recorded conversations in ShareGPT's form: of each, the first thing that a person asks."""

from __future__ import annotations

from typing import Any

from raysd.errors import ExperimentError
from raysd.prompts.rows import kind_of

PEOPLE = {"human", "user"}
SYSTEM = "system"


def is_conversation(fields: Any) -> bool:
    """Whether a row is one: it has `conversations` and no request of its own."""
    return isinstance(fields, dict) and "conversations" in fields and not {"prompt", "messages"} & set(fields)


def conversation_fields(fields: dict[str, Any], place: str) -> dict[str, Any] | None:
    """The row's first request, with the system's message before it if there is one, as `messages`; None if nobody asks, as in some that were cut in pieces.

    ShareGPT's own ids are left out: some of them are there twice. Raises ExperimentError for what is no conversation.
    """
    turns = fields["conversations"]
    if not isinstance(turns, list):
        raise ExperimentError(what=f"`conversations` is {kind_of(turns)}, not a list of turns", where=f"{place}: conversations",
                              fix="write [{\"from\": \"human\", \"value\": \"...\"}, ...]")
    messages = []
    for index, turn in enumerate(turns):
        speaker, said = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(said, str):
            raise ExperimentError(what="the turn has no `from` and `value` that are strings", where=f"{place}: conversations[{index}]",
                                  fix="write {\"from\": \"human\", \"value\": \"...\"}")
        if speaker == SYSTEM and said.strip() and not messages:
            messages.append({"role": "system", "content": said})
        if speaker in PEOPLE and said.strip():
            messages.append({"role": "user", "content": said})
            return {"messages": messages, **{name: fields[name] for name in ("topic", "category", "split") if name in fields}}
    return None
