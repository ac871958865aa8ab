"""Whether the numbers of a load may be used: reasons, each a sentence, why they must not."""

from __future__ import annotations

from collections.abc import Sequence

from raysd.load.metrics import LoadMetrics, kept_rate_frac
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth

LOOP_TOKENS, LONGEST_PERIOD = 32, 16
SMALLEST_RATE_FRAC = 0.95
"""Of the asked rate, at which requests must have been sent."""


def client_reasons(metrics: LoadMetrics, health: ClientHealth, concurrency: int | None, largest_lag_ms: float, smallest_concurrency_frac: float, ramp_s: float) -> list[str]:
    """Of the load itself: a concurrency that was not reached, a client that did not keep up. ramp_s: until the concurrency was to be reached."""
    reasons = []
    if concurrency is not None and metrics.failures < metrics.requests:
        if metrics.window_s is None:
            over = f": all was answered after {metrics.elapsed_s:.3g} s of a ramp of {ramp_s:g} s, so ask for more requests or a shorter ramp" if metrics.elapsed_s < ramp_s else ""
            reasons.append(f"the asked concurrency of {concurrency} was never reached{over}")
        elif metrics.achieved_concurrency < smallest_concurrency_frac * concurrency:
            reasons.append(f"{metrics.achieved_concurrency:.2f} requests were in flight on average, {concurrency} were asked for")
    if health.loop_lag_ms_p99 > largest_lag_ms:
        reasons.append(f"the client's event loop was {health.loop_lag_ms_p99:.1f} ms late (99th percentile, at most {largest_lag_ms:g}): its machine is too busy")
    return reasons


def rate_reasons(results: Sequence[Result], health: ClientHealth, largest_lag_ms: float) -> list[str]:
    """Of an open loop: requests sent later than asked for, whose wait no TTFT shows (coordinated omission), and a rate that was not kept.

    A new connection takes the round trips that it takes, which is the fastest one's time, and no request that needs one can be sent before; what is beyond that was waiting.
    """
    reasons, connect_ms = [], min((result.connect_ms for result in results if result.connect_ms is not None), default=0.0)
    if health.dispatch_delay_ms_p99 > largest_lag_ms + connect_ms:
        reasons.append(f"requests were sent {health.dispatch_delay_ms_p99:,.1f} ms later than asked for (99th percentile, at most {largest_lag_ms:g} beside the {connect_ms:.1f} of a connection), "
                       "which TTFT does not show")
    if (kept := kept_rate_frac(results)) is not None and kept < SMALLEST_RATE_FRAC:
        reasons.append(f"requests were sent at {100 * kept:.0f} % of the asked rate (at least {100 * SMALLEST_RATE_FRAC:.0f} %)")
    return reasons


def answer_reasons(results: Sequence[Result], requests: Sequence[Request], largest_repeating_frac: float) -> list[str]:
    """Of what was answered: failures, lengths other than asked for, prompts from a cache, answers that repeat themselves."""
    reasons, good = [], [result for result in results if result.error is None]
    if len(good) < len(results):
        first = next(result.error for result in results if result.error is not None)
        reasons.append(f"{len(results) - len(good)} of {len(results)} requests failed, the first with: {first}")
    short = sum(result.error is None and request.ignore_eos and result.output_tokens != request.max_tokens for result, request in zip(results, requests, strict=True))
    if short:
        reasons.append(f"{short} answers do not have the tokens that ignore_eos asks for")
    if long := sum(not request.ignore_eos and result.output_tokens > request.max_tokens for result, request in zip(results, requests, strict=True)):
        reasons.append(f"{long} answers are longer than was allowed")
    if cached := sum(result.cached_tokens for result in good):
        reasons.append(f"{cached} prompt tokens came from the server's prefix cache")
    repeating = sum(repeats(result.token_ids or result.text.split()) for result in good)
    if good and repeating > largest_repeating_frac * len(good):
        reasons.append(f"{repeating} of {len(good)} answers end in a loop of at most {LONGEST_PERIOD} tokens")
    return reasons


def repeats(tokens: Sequence[object]) -> bool:
    """Whether the last 32 tokens repeat with a period of at most 16: at least twice the same."""
    end = tokens[-LOOP_TOKENS:]
    return len(end) == LOOP_TOKENS and any(end[period:] == end[:-period] for period in range(1, LONGEST_PERIOD + 1))
