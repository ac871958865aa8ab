"""Reads a streamed answer from the bytes that arrived and when: pure, so that time stamps are taken first and parsed later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class MalformedStreamError(ValueError):
    """The bytes are not the stream of one finished answer; the text says what is wrong with them."""


@dataclass(frozen=True)
class Stream:
    """One finished answer; fields as Result has them."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    drafts: int | None
    per_position: tuple[int, ...]


def parse_stream(reads: Sequence[tuple[int, bytes]]) -> Stream:
    """The answer in the reads (arrival in ns, bytes) of one response, of `/v1/completions` or `/v1/chat/completions`.

    How many tokens a chunk carries is told by its token ids, or by how far the usage has come since the chunk before (`continuous_usage_stats`): one verify step
    of a draft gives several. A server that tells neither has the tokens counted at the end, and its chunks' times. Raises MalformedStreamError rather than count
    what is not certain.
    """
    token_ids: list[int] = []
    texts: list[str] = []
    chunk_ns: list[int] = []
    chunk_tokens: list[int | None] = []
    finish_reason, usage, done, before, metrics = None, None, False, 0, None
    for arrived_ns, data in _events(reads):
        if done:
            raise MalformedStreamError("an event after [DONE]")
        if data == b"[DONE]":
            done = True
            continue
        chunk = _chunk(data)
        try:
            metrics = chunk.get("metrics") or metrics
            if chunk.get("usage"):
                usage = chunk["usage"]
                counted = int(usage["completion_tokens"])
            else:
                counted = None
            for choice in chunk["choices"]:
                finish_reason = choice.get("finish_reason") or finish_reason
                new_ids = choice.get("token_ids")
                text = _text(choice)
                new = len(new_ids) if new_ids is not None else counted - before if counted is not None else None
                if new if new is not None else text:  # a chat's first chunk tells the role and carries no token, a last one may tell the end alone
                    chunk_ns.append(arrived_ns)
                    chunk_tokens.append(new)
                token_ids += new_ids or []
                texts.append(text)
            before = counted if counted is not None else before
        except (KeyError, TypeError, AttributeError, ValueError) as err:
            raise MalformedStreamError(f"a chunk that lacks something ({type(err).__name__}: {err}): {_shown(data)}") from err
    if not done:
        raise MalformedStreamError("the stream ended before [DONE]")
    if usage is None:
        raise MalformedStreamError("no usage in the stream: the server does not know `stream_options.include_usage`")
    if finish_reason is None:
        raise MalformedStreamError("no finish_reason in the stream")
    output_tokens = int(usage["completion_tokens"])
    known = all(tokens is not None for tokens in chunk_tokens)
    if known and sum(chunk_tokens) != output_tokens or token_ids and len(token_ids) != output_tokens:
        raise MalformedStreamError(f"the usage counts {output_tokens} output tokens, the chunks hold {len(token_ids) or sum(chunk_tokens)}")
    if not chunk_ns:
        raise MalformedStreamError("an answer without a token")
    drafts, per_position = _acceptance((metrics or {}).get("speculative_decoding"))
    return Stream(tuple(token_ids), "" if token_ids else "".join(texts), finish_reason, int(usage["prompt_tokens"]),
                  int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0), output_tokens, tuple(chunk_ns), tuple(chunk_tokens) if known else (),
                  drafts, per_position)


def _text(choice: dict[str, Any]) -> str:
    """What a chunk says: of a completion, of a chat, or of what a model thinks before it answers. Raises KeyError if it says neither text nor token ids."""
    if "text" in choice:
        return choice["text"]
    if "delta" not in choice and "token_ids" in choice:
        return ""
    delta = choice["delta"]
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _acceptance(told: dict[str, Any] | None) -> tuple[int | None, tuple[int, ...]]:
    """Drafts, and accepted tokens by position, of what vLLM tells of one request (`--per-request-spec-decode-metrics`): a histogram of verify steps by how many
    draft tokens they accepted (vllm/v1/metrics/stats.py)."""
    if not told:
        return None, ()
    histogram = told["acceptance_histogram"]
    return sum(histogram), tuple(sum(histogram[position:]) for position in range(1, len(histogram)))


def _events(reads: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Arrival and data of each server-sent event; an event arrived when its last byte did. Raises MalformedStreamError for what is none."""
    buffer = b""
    for arrived_ns, read in reads:
        text = buffer + read
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, buffer = text.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:  # nearly all are
                yield arrived_ns, event[6:]
                continue
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
