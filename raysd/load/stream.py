"""Reads a streamed answer from the bytes that arrived and when: pure, so that time stamps are taken first and parsed later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: _PromptDetails | None = None


class _Speculative(msgspec.Struct):
    acceptance_histogram: list[Count]


class _Metrics(msgspec.Struct):
    speculative_decoding: _Speculative | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: object = None
    usage: _Usage | None = None
    metrics: _Metrics | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
"""Reads what is needed of a chunk and checks all of it: half a microsecond, where a dict of everything takes five."""


def parse_stream(reads: Sequence[tuple[int, bytes]]) -> Stream:
    """The answer in the reads (arrival in ns, bytes) of one response, of `/v1/completions` or `/v1/chat/completions`.

    How many tokens a chunk carries is told by its token ids, or by how far the usage has come since the chunk before, where every chunk has it
    (`continuous_usage_stats`): one verify step of a draft gives several. A server that tells neither has the tokens counted at the end, and the times of its chunks
    with text. Raises MalformedStreamError rather than count what is not certain.
    """
    token_ids: list[int] = []
    texts: list[str] = []
    chunk_ns: list[int] = []
    chunk_tokens: list[int | None] = []
    finish_reason, usage, done, metrics = None, None, False, None
    before, continuous = 0, True
    for arrived_ns, data in _events(reads):
        if done:
            raise MalformedStreamError("an event after [DONE]")
        if data == b"[DONE]":
            done = True
            continue
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, RecursionError) as err:
            raise _why_not(data, err) from err
        choices, told = chunk.choices, chunk.usage
        if chunk.error is not None:
            raise MalformedStreamError(f"the server reports an error: {_shown(data)}")
        if choices is None and told is None:
            raise MalformedStreamError(f"a chunk that lacks something (neither choices nor usage): {_shown(data)}")
        metrics, usage = chunk.metrics or metrics, told or usage
        counted = before if told is None else told.completion_tokens
        if counted < before:
            raise MalformedStreamError(f"the usage falls from {before} to {counted} output tokens")
        for choice in choices or ():
            if choice.index:
                raise MalformedStreamError(f"a second answer, where one was asked for: {_shown(data)}")
            finish_reason = choice.finish_reason or finish_reason
            text = choice.text
            if text is None:
                delta = choice.delta
                if delta is None and choice.token_ids is None:
                    raise MalformedStreamError(f"a chunk that lacks something (neither text, nor delta, nor token_ids): {_shown(data)}")
                text = "" if delta is None else delta.content or delta.reasoning_content or delta.reasoning or ""  # a model may think before it answers
            continuous = continuous and told is not None  # a usage that comes with the end alone counts all tokens, not those of that chunk
            if choice.token_ids is not None:
                new = len(choice.token_ids)
                token_ids += choice.token_ids
            else:
                new = counted - before if continuous else None
            if text if new is None else new:  # a chat's first chunk tells the role and carries no token, a last one may tell the end alone
                chunk_ns.append(arrived_ns)
                chunk_tokens.append(new)
            texts.append(text)
        before = counted
    if not done:
        raise MalformedStreamError("the stream ended before [DONE]")
    if usage is None:
        raise MalformedStreamError("no usage in the stream: the server does not know `stream_options.include_usage`")
    if finish_reason is None:
        raise MalformedStreamError("no finish_reason in the stream")
    if finish_reason in ("abort", "error"):
        raise MalformedStreamError(f"the server broke the answer off: its finish_reason is {finish_reason}")
    known = None not in chunk_tokens
    if known and sum(chunk_tokens) != usage.completion_tokens or token_ids and len(token_ids) != usage.completion_tokens:
        raise MalformedStreamError(f"the usage counts {usage.completion_tokens} output tokens, the chunks hold {len(token_ids) or sum(chunk_tokens)}")
    if not chunk_ns or not usage.completion_tokens:
        raise MalformedStreamError("an answer without a token" if not chunk_ns else "the usage counts no token, though text came")
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    drafts, per_position = _acceptance(metrics.speculative_decoding if metrics else None)
    return Stream(tuple(token_ids), "" if token_ids else "".join(texts), finish_reason, usage.prompt_tokens, cached or 0, usage.completion_tokens, tuple(chunk_ns),
                  tuple(chunk_tokens) if known else (), drafts, per_position)


def _acceptance(told: _Speculative | None) -> tuple[int | None, tuple[int, ...]]:
    """Drafts, and accepted tokens by position, of what vLLM tells of one request (`--per-request-spec-decode-metrics`): a histogram of verify steps by how many
    draft tokens they accepted (vllm/v1/metrics/stats.py)."""
    if told is None:
        return None, ()
    histogram = told.acceptance_histogram
    return sum(histogram), tuple(sum(histogram[position:]) for position in range(1, len(histogram)))


def _events(reads: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Arrival and data of each server-sent event; an event arrived when its last byte did. Raises MalformedStreamError for what is none."""
    buffer, after_return = b"", False
    for arrived_ns, read in reads:
        if after_return:  # the second half of a line's end, whose event has been told of
            read, after_return = read.removeprefix(b"\n"), False
        if b"\r" in read:  # a line ends with CRLF, LF or CR (the HTML standard, 9.2.5)
            after_return = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = buffer + read
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


def _why_not(data: bytes, error: Exception) -> MalformedStreamError:
    """Why an event is no chunk."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return MalformedStreamError(f"an event that is not JSON, or too deep: {_shown(data)}")
    if not isinstance(content, dict):
        return MalformedStreamError(f"an event that is not a JSON object: {_shown(data)}")
    if content.get("error") is not None:
        return MalformedStreamError(f"the server reports an error: {_shown(data)}")
    return MalformedStreamError(f"a chunk that lacks something ({error}): {_shown(data)}")


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace")
    return repr(text if len(text) <= 120 else text[:117] + "...")
