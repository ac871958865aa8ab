"""What a client saw, in the field's numbers: TTFT, TPOT, E2EL, tokens per second, and the window at the asked concurrency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysd.errors import MeasurementError
from raysd.load.percentiles import percentile
from raysd.load.requests import Result

STEADY_SHARE = 0.95
"""Of the asked concurrency: what counts as steady."""


@dataclass(frozen=True)
class Window:
    """A stretch of the client's clock."""

    start_ns: int
    end_ns: int

    @property
    def length_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class LoadMetrics:
    """One run of the client. Rates and percentiles are of the requests without an error; None where there is nothing to compute them from."""

    requests: int
    failures: int
    prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    """First dispatch to last end."""
    output_tok_s: float
    total_tok_s: float
    """Prompt and output tokens."""
    window_s: float | None
    """Length of the steady window."""
    window_output_tok_s: float | None
    achieved_concurrency: float
    """Requests in flight on average over the steady window; over the whole run if there was none, or no concurrency was asked for."""
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2el_ms_p50: float | None
    e2el_ms_p90: float | None
    e2el_ms_p99: float | None
    step_ms_p50: float | None
    step_ms_p99: float | None
    connect_ms_p50: float | None
    """Of requests whose connection was made for them."""


def ttft_ms(result: Result) -> float:
    """From sending the request to its first chunk with a token."""
    return (result.chunk_ns[0] - result.dispatched_ns) / 1e6


def e2el_ms(result: Result) -> float:
    """From sending the request to its last chunk with a token."""
    return (result.chunk_ns[-1] - result.dispatched_ns) / 1e6


def tpot_ms(result: Result) -> float | None:
    """(E2EL - TTFT) / (tokens - 1); None for an answer of one token."""
    return (e2el_ms(result) - ttft_ms(result)) / (result.output_tokens - 1) if result.output_tokens > 1 else None


def step_ms(result: Result) -> list[float]:
    """The time between a chunk with tokens and the next: of a verify step, however many tokens it gave."""
    return [(after - before) / 1e6 for before, after in itertools.pairwise(result.chunk_ns)]


def kept_rate_frac(results: Sequence[Result]) -> float | None:
    """Of an open loop: the share of the asked rate at which requests were sent, ramp and Poisson gaps included: the time that all were to be sent in over the time that it took.
    None where a single moment has no rate."""
    asked_ns, took_ns = (max(times) - min(times) for times in ([result.intended_ns for result in results], [result.dispatched_ns for result in results]))
    return asked_ns / took_ns if asked_ns and took_ns else None


def request_row(result: Result, begun_ns: int) -> dict[str, Any]:
    """One request, JSON-ready; times in ms since the first was sent."""
    good = result.error is None
    return {"prompt_id": result.prompt_id, "error": result.error, "finish_reason": result.finish_reason, "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens, "output_tokens": result.output_tokens, "intended_ms": (result.intended_ns - begun_ns) / 1e6,
            "dispatched_ms": (result.dispatched_ns - begun_ns) / 1e6, "ended_ms": (result.ended_ns - begun_ns) / 1e6, "connect_ms": result.connect_ms,
            "ttft_ms": ttft_ms(result) if good else None, "tpot_ms": tpot_ms(result) if good else None, "e2el_ms": e2el_ms(result) if good else None,
            "chunk_ms": [(at_ns - begun_ns) / 1e6 for at_ns in result.chunk_ns], "chunk_tokens": list(result.chunk_tokens), "drafts": result.drafts,
            "per_position": list(result.per_position)}


def steady_window(results: Sequence[Result], concurrency: int, share: float = STEADY_SHARE) -> Window | None:
    """From the first to the last moment at which at least `share` of the asked concurrency was in flight; None if there was no such stretch.

    The ramp and the tail stay out. Between one answer's end and the next request of its slot the count dips for microseconds; that stays in.
    """
    changes = sorted([(result.dispatched_ns, 1) for result in results] + [(result.ended_ns, -1) for result in results], key=lambda change: (change[0], -change[1]))
    in_flight, start_ns, end_ns = 0, None, None
    needed = math.ceil(share * concurrency)
    for at_ns, step in changes:
        if in_flight >= needed:
            end_ns = at_ns
        in_flight += step
        if in_flight >= needed and start_ns is None:
            start_ns = at_ns
    return Window(start_ns, end_ns) if start_ns is not None and end_ns is not None and end_ns > start_ns else None


def mean_in_flight(results: Sequence[Result], window: Window) -> float:
    """Requests in flight, averaged over the time of a window."""
    held_ns = sum(max(0, min(result.ended_ns, window.end_ns) - max(result.dispatched_ns, window.start_ns)) for result in results)
    return held_ns / (window.end_ns - window.start_ns)


def window_output_tokens(results: Sequence[Result], window: Window) -> int | None:
    """Output tokens that arrived in a window; None if the server did not tell how many a chunk carries."""
    if any(result.chunk_ns and not result.chunk_tokens for result in results):
        return None
    return sum(tokens for result in results for at_ns, tokens in zip(result.chunk_ns, result.chunk_tokens, strict=True)
               if window.start_ns < at_ns <= window.end_ns)


def summarise(results: Sequence[Result], concurrency: int | None) -> LoadMetrics:
    """The numbers of one run of the client. concurrency: what was asked for, if it was a closed loop. Raises MeasurementError without results."""
    if not results:
        raise MeasurementError(what="a run of no requests has no metrics", where="the client's results", fix="ask for at least one request")
    good = [result for result in results if result.error is None]
    whole = Window(min(result.dispatched_ns for result in results), max(result.ended_ns for result in results))
    window = None if concurrency is None else steady_window(results, concurrency)
    in_window = window_output_tokens(results, window) if window else None
    prompt_tokens, output_tokens = sum(result.prompt_tokens for result in good), sum(result.output_tokens for result in good)
    values = {"ttft_ms": [ttft_ms(result) for result in good], "tpot_ms": [tpot for result in good if (tpot := tpot_ms(result)) is not None],
              "e2el_ms": [e2el_ms(result) for result in good], "step_ms": [step for result in good for step in step_ms(result)],
              "connect_ms": [result.connect_ms for result in good if result.connect_ms is not None]}
    ranks = {"ttft_ms": (50, 90, 99), "tpot_ms": (50, 90, 99), "e2el_ms": (50, 90, 99), "step_ms": (50, 99), "connect_ms": (50,)}
    percentiles = {f"{name}_p{rank}": percentile(values[name], rank) if values[name] else None for name in ranks for rank in ranks[name]}
    return LoadMetrics(requests=len(results), failures=len(results) - len(good), prompt_tokens=prompt_tokens, output_tokens=output_tokens,
                       elapsed_s=whole.length_s, output_tok_s=output_tokens / whole.length_s, total_tok_s=(prompt_tokens + output_tokens) / whole.length_s,
                       window_s=window.length_s if window else None,
                       window_output_tok_s=in_window / window.length_s if in_window is not None else None,
                       achieved_concurrency=mean_in_flight(results, window or whole), **percentiles)
