"""Closed-loop streaming client for OpenAI-compatible servers: keeps so many completions in flight, and says when every chunk came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from raysd.load.stream import MalformedStreamError, parse_stream

READ_BUFFER_BYTES = 2**20
"""aiohttp's own 64 KiB stall a stream of long chunks."""


@dataclass(frozen=True)
class CompletionRequest:
    """One prompt to be answered."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of `/v1/completions`. Token ids go in and come out, so nothing is tokenised twice."""
        return {"model": model, "prompt": list(self.prompt_token_ids), "max_tokens": self.max_tokens, "temperature": self.temperature,
                "ignore_eos": self.ignore_eos, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class RequestResult:
    """What came of one request. With an error all counts are 0 and all sequences empty: half an answer is no measurement."""

    prompt_id: str
    dispatched_ns: int
    """`perf_counter_ns` just before the request was sent."""
    ended_ns: int
    """When its last byte had come, or when it failed."""
    error: str | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server's usage counts them."""
    chunk_ns: tuple[int, ...] = ()
    """When each chunk with tokens arrived; the first is the first token, the last the last."""
    chunk_tokens: tuple[int, ...] = ()


def run_closed_loop(base_url: str, model: str, requests: Sequence[CompletionRequest], concurrency: int, timeout_s: float) -> list[RequestResult]:
    """Sends all requests, `concurrency` of them in flight at any moment until they run out; the results are in the order of the requests.

    base_url: without `/v1`. timeout_s: the longest that one request may take. A request that is refused, cut off, garbled or too slow has its
    `error` set, and the others go on.
    """
    return asyncio.run(_closed_loop(base_url, model, requests, concurrency, timeout_s))


async def _closed_loop(base_url: str, model: str, requests: Sequence[CompletionRequest], concurrency: int, timeout_s: float) -> list[RequestResult]:
    results: list[RequestResult | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def slot(session: aiohttp.ClientSession) -> None:
        for index, request in waiting:  # shared by all slots: each takes the next one as soon as its last has ended
            results[index] = await _answer(session, f"{base_url}/v1/completions", request, model, timeout_s)

    connector = aiohttp.TCPConnector(limit=0)
    async with (aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=READ_BUFFER_BYTES) as session,
                asyncio.TaskGroup() as slots):
        for _ in range(min(concurrency, len(requests))):
            slots.create_task(slot(session))
    return results


async def _answer(session: aiohttp.ClientSession, url: str, request: CompletionRequest, model: str, timeout_s: float) -> RequestResult:
    body = request.body(model)
    reads: list[tuple[int, bytes]] = []
    clock = time.perf_counter_ns
    dispatched_ns = clock()
    try:
        async with asyncio.timeout(timeout_s), session.post(url, json=body) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:300]
                return RequestResult(request.prompt_id, dispatched_ns, clock(), error=f"status {response.status}: {text}")
            async for read in response.content.iter_any():
                reads.append((clock(), read))
        ended_ns = clock()
        stream = parse_stream(reads)
    except TimeoutError:
        return RequestResult(request.prompt_id, dispatched_ns, clock(), error=f"not answered within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as err:
        return RequestResult(request.prompt_id, dispatched_ns, clock(), error=f"connection failed: {type(err).__name__}: {err}")
    except MalformedStreamError as err:
        return RequestResult(request.prompt_id, dispatched_ns, ended_ns, error=f"malformed answer: {err}")
    return RequestResult(request.prompt_id, dispatched_ns, ended_ns, None, stream.token_ids, stream.finish_reason, stream.prompt_tokens,
                         stream.output_tokens, stream.chunk_ns, stream.chunk_tokens)
