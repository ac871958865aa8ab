"""Reads a streamed completion from the bytes that arrived and when: pure, so that time stamps are taken first and parsed later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class MalformedStreamError(ValueError):
    """The bytes are not the stream of one finished completion; the text says what is wrong with them."""


@dataclass(frozen=True)
class Stream:
    """One finished completion."""

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    """As the server's usage counts them."""
    chunk_ns: tuple[int, ...]
    """When each chunk that carried tokens arrived."""
    chunk_tokens: tuple[int, ...]
    """Tokens of each of these chunks: several where a verify step accepted a draft."""


def parse_stream(reads: Sequence[tuple[int, bytes]]) -> Stream:
    """The completion in the reads (arrival in ns, bytes) of one response. Raises MalformedStreamError rather than count what is not certain."""
    token_ids: list[int] = []
    chunk_ns: list[int] = []
    chunk_tokens: list[int] = []
    finish_reason, usage, done = None, None, False
    for arrived_ns, data in _events(reads):
        if done:
            raise MalformedStreamError("an event after [DONE]")
        if data == b"[DONE]":
            done = True
            continue
        try:
            chunk = _chunk(data)
            if chunk.get("usage"):
                usage = int(chunk["usage"]["prompt_tokens"]), int(chunk["usage"]["completion_tokens"])
            for choice in chunk["choices"]:
                new_ids = [int(token) for token in choice["token_ids"]]
                finish_reason = choice["finish_reason"] or finish_reason
                if new_ids:
                    token_ids += new_ids
                    chunk_ns.append(arrived_ns)
                    chunk_tokens.append(len(new_ids))
        except (KeyError, TypeError, AttributeError) as err:
            raise MalformedStreamError(f"a chunk that lacks something ({type(err).__name__}: {err}; does the server know `return_token_ids`?): "
                                       f"{_shown(data)}") from err
    if not done:
        raise MalformedStreamError("the stream ended before [DONE]")
    if usage is None:
        raise MalformedStreamError("no usage in the stream: the server does not know `stream_options.include_usage`")
    if finish_reason is None:
        raise MalformedStreamError("no finish_reason in the stream")
    prompt_tokens, output_tokens = usage
    if output_tokens != len(token_ids):
        raise MalformedStreamError(f"the usage counts {output_tokens} output tokens, the chunks hold {len(token_ids)}")
    if not token_ids:
        raise MalformedStreamError("an answer without a token")
    return Stream(tuple(token_ids), finish_reason, prompt_tokens, output_tokens, tuple(chunk_ns), tuple(chunk_tokens))


def _events(reads: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Arrival and data of each server-sent event; an event arrived when its last byte did. Raises MalformedStreamError for what is none."""
    buffer = b""
    for arrived_ns, read in reads:
        *events, buffer = (buffer + read).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line for line in event.split(b"\n") if line and not line.startswith((b":", b"event:", b"id:", b"retry:"))]
            if any(not line.startswith(b"data:") for line in lines):
                raise MalformedStreamError(f"not a server-sent event: {_shown(event)}")
            if lines:
                yield arrived_ns, b"\n".join(line[len(b"data:"):].strip() for line in lines)
    if buffer.strip():
        raise MalformedStreamError(f"the stream ended inside an event: {_shown(buffer)}")


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as err:
        raise MalformedStreamError(f"an event that is not JSON: {_shown(data)}") from err
    if not isinstance(chunk, dict):
        raise MalformedStreamError(f"an event that is not a JSON object: {_shown(data)}")
    if "error" in chunk:
        raise MalformedStreamError(f"the server reports an error: {_shown(data)}")
    return chunk


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace")
    return repr(text if len(text) <= 120 else text[:117] + "...")
