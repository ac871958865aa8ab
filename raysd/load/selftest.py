"""The load generator against a server whose pace is known: does it recover what happened, and what does that cost it."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from raysd.errors import MeasurementError
from raysd.experiment.sweep import LARGEST_LAG_MS, SMALLEST_CONCURRENCY_FRAC
from raysd.load.address import Address, parse_address
from raysd.load.arrivals import Load
from raysd.load.ask import ask_json
from raysd.load.health import client_reasons
from raysd.load.metrics import summarise
from raysd.load.mock_server import MODEL
from raysd.load.requests import Request, Result
from raysd.load.run import LoadRun, run_load

CONCURRENCY, REQUESTS_PER_SLOT, OSL = 64, 4, 256
RAMP_S = 0.5
"""So that streams are not all written to in the same moment: what waits in a socket behind 63 others is not late because of the client's clock."""
LARGEST_ERROR_FRAC, LARGEST_ERROR_MS = 0.01, 0.2
"""Of what is recovered: as a share, or in ms, whichever is more."""


def selftest(concurrency: int = CONCURRENCY) -> dict[str, Any]:
    """Runs it; JSON-ready: `recovered` and `truth` (medians over requests of ttft_ms and tpot_ms; acceptance_length over all steps), chunks_s,
    cpu_us_per_chunk, loop_lag_ms_p99, concurrency as it was held, `valid`, and the reasons if it is not.

    Raises MeasurementError if the server does not start or a request fails.
    """
    with mock_server() as address:
        run_load(address, MODEL, _requests(concurrency, 16), Load(concurrency=concurrency))
        before = len(ask_json(address, "/truth"))
        run = run_load(address, MODEL, _requests(concurrency * REQUESTS_PER_SLOT, OSL), Load(concurrency=concurrency, ramp_s=RAMP_S))
        truth = ask_json(address, "/truth")[before:]
    return judge(run, truth, concurrency)


def judge(run: LoadRun, truth: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """What was recovered beside what the server wrote down of each request (`ttft_ms`, `tpot_ms`, `steps`, `tokens`), and whether the two agree."""
    failed = [result for result in run.results if result.error is not None]
    if failed:
        raise MeasurementError(what=f"{len(failed)} requests of the self-test failed, the first with: {failed[0].error}", where="raysd bench --selftest",
                               fix="does something on this machine end its processes or connections?")
    metrics = summarise(run.results, concurrency)
    recovered = {"ttft_ms": metrics.ttft_ms_p50, "tpot_ms": metrics.tpot_ms_p50, "acceptance_length": acceptance_length(run.results)}
    true = {"ttft_ms": statistics.median(each["ttft_ms"] for each in truth), "tpot_ms": statistics.median(each["tpot_ms"] for each in truth),
            "acceptance_length": sum(each["tokens"] - 1 for each in truth) / sum(each["steps"] for each in truth)}
    reasons = [f"{name} is {recovered[name]:.3f}, and was {true[name]:.3f}" for name in true
               if abs(recovered[name] - true[name]) > max(LARGEST_ERROR_FRAC * true[name], LARGEST_ERROR_MS if name.endswith("_ms") else 0)]
    held = metrics.achieved_concurrency if metrics.window_s is not None else 0.0
    if abs(held - concurrency) > 0.01 * concurrency:
        reasons.append(f"{held:.2f} requests were in flight, {concurrency} were asked for")
    reasons += client_reasons(metrics, run.health, None, LARGEST_LAG_MS, SMALLEST_CONCURRENCY_FRAC, RAMP_S)  # None: the concurrency is judged more strictly above
    return {"recovered": recovered, "truth": true, "concurrency": concurrency, "held_concurrency": held, "chunks_s": run.health.chunks / run.health.elapsed_s,
            "cpu_us_per_chunk": run.health.cpu_us_per_chunk, "loop_lag_ms_p99": run.health.loop_lag_ms_p99, "valid": not reasons, "invalid_reasons": reasons}


def selftest_lines(told: dict[str, Any]) -> list[str]:
    """The document for people."""
    lines = ["                    recovered   truth"]
    lines += [f"{name:<20}{told['recovered'][name]:<11.3f} {told['truth'][name]:.3f}" for name in told["truth"]]
    lines += ["", f"{told['held_concurrency']:.2f} of {told['concurrency']} requests in flight, {told['chunks_s']:,.0f} chunks a second, {told['cpu_us_per_chunk']:.1f} us of CPU a chunk, "
                  f"event loop at most {told['loop_lag_ms_p99']:.2f} ms late (99th percentile)"]
    return lines + ["valid" if told["valid"] else "NOT VALID: " + "; ".join(told["invalid_reasons"])]


def acceptance_length(results: Sequence[Result]) -> float | None:
    """Tokens of a verify step, as the chunks tell: every chunk but an answer's first is one. None where chunks do not say how many tokens they carry."""
    steps = sum(len(result.chunk_tokens[1:]) for result in results)
    return sum(sum(result.chunk_tokens[1:]) for result in results) / steps if steps else None


def _requests(count: int, osl: int) -> list[Request]:
    return [Request(f"q{number}", f"prompt {number}", osl, 0.0, True) for number in range(count)]


@contextlib.contextmanager
def mock_server(*arguments: str) -> Iterator[Address]:
    """A mock server in a process of its own, which has ended on exit."""
    process = subprocess.Popen([sys.executable, "-m", "raysd.load.mock_server", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise MeasurementError(what=f"the mock server ended with exit code {process.wait()}", where="raysd bench --selftest", fix="its lines above say why")
        yield parse_address(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
