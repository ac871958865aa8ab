"""One cell measured: the load, the engine's counters over it, and whether the numbers may be used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError
from raysd.experiment.sweep import SweepSection
from raysd.load.arrivals import Load
from raysd.load.health import answer_reasons, client_reasons
from raysd.load.metrics import LoadMetrics, request_row, summarise
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, Limits, LoadRun, RunLoad, run_load
from raysd.sweep import tables
from raysd.sweep.cells import Cell
from raysd.sweep.energy import energy_of
from raysd.sweep.engine import Server
from raysd.sweep.smi import own_devices

IDLE_PATIENCE_S = 60.0
"""How long an engine may take to finish what nobody waits for any more."""

Row = dict[str, Any]

Seen = Callable[[float, float], list[Row]]
"""`seen(start_s, end_s)`: rows of telemetry in a window of time.time(), and a little around it."""


def nothing_seen(start_s: float, end_s: float) -> list[Row]:
    """A Seen where nobody looks."""
    return []


@dataclass(frozen=True)
class Measured:
    """One measured cell."""

    row: Row
    """For the table `cells`."""
    requests: list[Row]
    """For the table `requests`."""
    telemetry: list[Row] = field(default_factory=list)
    """For the table `telemetry`."""

    @property
    def valid(self) -> bool:
        return self.row["valid"]


def measure_cell(cell: Cell, requests: Sequence[Request], server: Server, node: str, sweep: SweepSection, seen: Seen = nothing_seen, run: RunLoad = run_load) -> Measured:
    """Puts the load of a cell on its server. seen: what telemetry saw meanwhile. A request that fails makes the cell invalid, with its reason. Raises EngineError if the engine dies."""
    load, counted = run_counted(server, requests, cell.concurrency, limits_of(sweep), run)
    metrics = summarise(load.results, cell.concurrency)
    reasons = [*answer_reasons(load.results, requests, sweep.largest_repeating_frac), *client_reasons(metrics, load.health, cell.concurrency, sweep.largest_lag_ms, sweep.smallest_concurrency_frac, 0.0),
               *engine_reasons(cell, counted)]
    started_ns, ended_ns = min(result.dispatched_ns for result in load.results), max(result.ended_ns for result in load.results)
    window_s = [time.time() - (time.perf_counter_ns() - at_ns) / 1e9 for at_ns in (started_ns, ended_ns)]
    telemetry = seen(*window_s)
    row = _cell_row(cell, node, metrics, load.health, counted, reasons) | {
        "started_s": round(window_s[0], 3), "acceptance": "real" if cell.k is None else sweep.acceptance.words, "energy_j": energy_of(telemetry, *window_s, own_devices(os.environ))}
    return Measured(row, [_key(cell, node) | _request_row(request, result, started_ns) for request, result in zip(requests, load.results, strict=True)],
                    [_key(cell, node) | each for each in telemetry])


def unmeasured(cell: Cell, node: str, error: EngineError) -> Measured:
    """A cell that has no numbers, since its engine could not be had or died, with what the engine's log says."""
    nothing = dict.fromkeys(tables.CELLS) | {"requests": cell.requests, "failures": cell.requests, "output_tokens": 0, "prompt_tokens": 0, "drafts": 0,
                                             "draft_tokens": 0, "accepted": 0, "per_position": []}
    return Measured(nothing | _key(cell, node) | {"osl": cell.osl, "valid": False, "invalid_reasons": [f"{error.what} ({error.where})"],
                                                  "schema_version": tables.SCHEMA_VERSION}, [])


@dataclass(frozen=True)
class Counted:
    """What an engine counted over some requests."""

    acceptance: AcceptanceCounts
    prefix_hit_tokens: int
    preemptions: int
    restarted: bool
    """Whether it was started anew meanwhile: then the counts are of a part."""


def limits_of(sweep: SweepSection) -> Limits:
    """When a request to an engine of a sweep is given up."""
    return Limits(sweep.request_limit_s, sweep.silence_limit_s)


def run_counted(server: Server, requests: Sequence[Request], concurrency: int, limits: Limits, run: RunLoad = run_load) -> tuple[LoadRun, Counted]:
    """What came of some requests, and what the engine counted over them. run: what puts them on the server. Raises EngineError if the engine dies."""
    before = server.counters()
    load = run(server.address, server.model, requests, Load(concurrency=concurrency), limits, False)
    server.check_alive()
    wait_until_idle(server)  # the counters of the last step are written with the count of running requests, a moment after its tokens are sent
    after = server.counters()
    return load, Counted(after.acceptance - before.acceptance, after.prefix_hit_tokens - before.prefix_hit_tokens, after.preemptions - before.preemptions,
                        after.started_s != before.started_s)


def wait_until_idle(engine: Server) -> None:
    """Returns when the engine has no request. Raises EngineError if it stays busy: what is measured beside it would be wrong."""
    deadline = time.monotonic() + IDLE_PATIENCE_S
    while (running := engine.counters().running) > 0:
        if time.monotonic() > deadline:
            raise EngineError(what=f"the engine still works on {running} requests after {IDLE_PATIENCE_S:g} s, and nobody waits for them",
                              where=engine.log_path, fix="find in the log what it is busy with; is somebody else using it?")
        time.sleep(0.02)


def engine_reasons(cell: Cell, counted: Counted) -> list[str]:
    """Why the numbers of a cell must not be used, as far as the engine tells."""
    reasons = []
    if counted.restarted:
        reasons.append("the server was started anew while it was measured")
    if counted.prefix_hit_tokens:
        reasons.append(f"{counted.prefix_hit_tokens} prompt tokens came from the engine's prefix cache")
    if cell.k is not None and counted.acceptance.drafts == 0:
        reasons.append("the engine counted no draft")
    if cell.k is None and counted.acceptance.drafts > 0:
        reasons.append(f"the engine of the baseline counted {counted.acceptance.drafts} drafts")
    return reasons


def _key(cell: Cell, node: str) -> Row:
    return {"arm": cell.arm, "workload": cell.workload, "concurrency": cell.concurrency, "k": cell.k, "block": cell.block, "node": node}


def _cell_row(cell: Cell, node: str, metrics: LoadMetrics, health: ClientHealth, counted: Counted, reasons: list[str]) -> Row:
    good, acceptance = metrics.requests - metrics.failures, counted.acceptance
    return {**_key(cell, node), "isl": metrics.prompt_tokens / good if good else None, "osl": cell.osl, "valid": not reasons, "invalid_reasons": reasons,
            **asdict(metrics), "drafts": acceptance.drafts, "draft_tokens": acceptance.draft_tokens, "accepted": acceptance.accepted,
            "acceptance_length": acceptance.acceptance_length if acceptance.drafts else None, "per_position": list(acceptance.per_position),
            "client_cpu_frac": health.cpu_s / health.elapsed_s, "loop_lag_ms_p99": health.loop_lag_ms_p99,
            "dispatch_delay_ms_p99": health.dispatch_delay_ms_p99, "preemptions": counted.preemptions, "schema_version": tables.SCHEMA_VERSION}


def _request_row(request: Request, result: Result, started_ns: int) -> Row:
    told = {name: value for name, value in request_row(result, started_ns).items() if name in tables.REQUESTS}
    return told | {"category": request.category, "accepted": None if result.drafts is None else sum(result.per_position)}
