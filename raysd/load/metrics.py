"""What a client saw, in the field's numbers: TTFT, TPOT, E2EL, tokens per second, and the window at the asked concurrency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raysd.errors import MeasurementError
from raysd.load.client import RequestResult

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
    """Requests in flight on average over the steady window; over the whole run if there was none."""
    ttft_ms_p50: float | None
    tpot_ms_p50: float | None
    e2el_ms_p50: float | None


def ttft_ms(result: RequestResult) -> float:
    """From sending the request to its first chunk with a token."""
    return (result.chunk_ns[0] - result.dispatched_ns) / 1e6


def e2el_ms(result: RequestResult) -> float:
    """From sending the request to its last chunk with a token."""
    return (result.chunk_ns[-1] - result.dispatched_ns) / 1e6


def tpot_ms(result: RequestResult) -> float | None:
    """(E2EL - TTFT) / (tokens - 1); None for an answer of one token."""
    return (e2el_ms(result) - ttft_ms(result)) / (result.output_tokens - 1) if result.output_tokens > 1 else None


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile with linear interpolation between ranks (NumPy's default). Raises MeasurementError without values."""
    ranked = sorted(values)
    if not ranked:
        raise MeasurementError(what="a percentile of no values", where="the client's results", fix="look at the errors of the requests")
    rank = (len(ranked) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)


def steady_window(results: Sequence[RequestResult], concurrency: int, share: float = STEADY_SHARE) -> Window | None:
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


def mean_in_flight(results: Sequence[RequestResult], window: Window) -> float:
    """Requests in flight, averaged over the time of a window."""
    held_ns = sum(max(0, min(result.ended_ns, window.end_ns) - max(result.dispatched_ns, window.start_ns)) for result in results)
    return held_ns / (window.end_ns - window.start_ns)


def window_output_tokens(results: Sequence[RequestResult], window: Window) -> int:
    """Output tokens that arrived in a window."""
    return sum(tokens for result in results for at_ns, tokens in zip(result.chunk_ns, result.chunk_tokens, strict=True)
               if window.start_ns < at_ns <= window.end_ns)


def summarise(results: Sequence[RequestResult], concurrency: int) -> LoadMetrics:
    """The numbers of one run of the client. Raises MeasurementError without results."""
    if not results:
        raise MeasurementError(what="a run of no requests has no metrics", where="the client's results", fix="ask for at least one request")
    good = [result for result in results if result.error is None]
    whole = Window(min(result.dispatched_ns for result in results), max(result.ended_ns for result in results))
    window = steady_window(results, concurrency)
    prompt_tokens, output_tokens = sum(result.prompt_tokens for result in good), sum(result.output_tokens for result in good)

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return percentile(known, 50) if known else None

    return LoadMetrics(requests=len(results), failures=len(results) - len(good), prompt_tokens=prompt_tokens, output_tokens=output_tokens,
                       elapsed_s=whole.length_s, output_tok_s=output_tokens / whole.length_s, total_tok_s=(prompt_tokens + output_tokens) / whole.length_s,
                       window_s=window.length_s if window else None,
                       window_output_tok_s=window_output_tokens(results, window) / window.length_s if window else None,
                       achieved_concurrency=mean_in_flight(results, window or whole),
                       ttft_ms_p50=median(map(ttft_ms, good)), tpot_ms_p50=median(map(tpot_ms, good)), e2el_ms_p50=median(map(e2el_ms, good)))
