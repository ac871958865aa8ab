"""The rows of a prompt file, checked one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysd.errors import ExperimentError

SPLITS = ("train", "choose", "report")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Row:
    """One row as it was written; None for what it leaves out."""

    place: str
    """`<path>:<line>` or the like, for messages."""
    id: str
    """The row's own, or `<file name>:<number>`."""
    messages: tuple[dict[str, str], ...]
    topic: str | None
    split: str | None
    category: str | None = None
    """What kind of request it is, for acceptance by category: `coding`, say."""


def row_of(fields: Any, place: str, default_id: str) -> Row:
    """The row that some fields say: `prompt` or `messages`, optionally `id`, `topic`, `category` and `split`; other keys are the user's own.

    Raises ExperimentError, naming place and field, for one of no use.
    """
    if not isinstance(fields, dict):
        raise ExperimentError(what=f"the line holds {kind_of(fields)}, not an object", where=place,
                              fix="write one JSON object a line: {\"prompt\": \"...\"}")
    split = _optional_text(fields, "split", place)
    if split is not None and split not in SPLITS:
        raise ExperimentError(what=f"unknown split `{split}`", where=f"{place}: split",
                              fix=f"use one of {', '.join(SPLITS)}, or leave it out")
    return Row(place=place, id=_optional_text(fields, "id", place) or default_id, messages=_messages(fields, place),
               topic=_optional_text(fields, "topic", place), split=split, category=_optional_text(fields, "category", place))


def _messages(fields: dict[str, Any], place: str) -> tuple[dict[str, str], ...]:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        seen = "neither `prompt` nor `messages`" if prompt is None else "both `prompt` and `messages`"
        raise ExperimentError(what=f"the row has {seen}", where=place,
                              fix="give one: `prompt` (a string), or `messages` (a list of role and content)")
    if messages is None:
        return ({"role": "user", "content": _text_value(prompt, f"{place}: prompt")},)
    if not isinstance(messages, list) or not messages:
        seen = "an empty list" if messages == [] else kind_of(messages)
        raise ExperimentError(what=f"`messages` is {seen}, not a list of messages", where=f"{place}: messages",
                              fix="write [{\"role\": \"user\", \"content\": \"...\"}]")
    checked = tuple(_message(message, f"{place}: messages[{index}]") for index, message in enumerate(messages))
    if checked[-1]["role"] != "user":
        raise ExperimentError(what=f"the last message is from `{checked[-1]['role']}`, so there is nothing to answer",
                              where=f"{place}: messages[{len(checked) - 1}].role", fix="end the messages with one from `user`")
    return checked


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ExperimentError(what=f"the message is {kind_of(message)}, not an object", where=where,
                              fix="write {\"role\": \"user\", \"content\": \"...\"}")
    unknown = sorted(set(message) - {"role", "content"})
    if unknown:  # left out silently, a key such as `tool_calls` would change what is asked
        raise ExperimentError(what=f"the message has a key that is not used: `{unknown[0]}`", where=where,
                              fix="keep `role` and `content` only")
    for key in ("role", "content"):
        if key not in message:
            raise ExperimentError(what=f"the message has no `{key}`", where=where, fix="write {\"role\": \"user\", \"content\": \"...\"}")
    role = _text_value(message["role"], f"{where}.role")
    if role not in ROLES:
        raise ExperimentError(what=f"unknown role `{role}`", where=f"{where}.role", fix=f"use one of {', '.join(ROLES)}")
    return {"role": role, "content": _text_value(message["content"], f"{where}.content")}


def _optional_text(fields: dict[str, Any], key: str, place: str) -> str | None:
    value = fields.get(key)
    return None if value is None else _text_value(value, f"{place}: {key}")


def _text_value(value: Any, where: str) -> str:
    """The value, if it is a string with something in it that UTF-8 can hold."""
    if not isinstance(value, str):
        raise ExperimentError(what=f"the value is {kind_of(value)}, not a string", where=where, fix="write a string in quotes")
    if not value.strip():
        raise ExperimentError(what=f"the text is empty: {value!r}", where=where, fix="fill it in, or remove the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ExperimentError(what=f"the text holds half a character ({value[err.start]!a})", where=where,
                              fix="write the character itself, or both of its \\u escapes") from err
    return value


def kind_of(value: Any) -> str:
    """A JSON value's kind, in words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number",
             type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
