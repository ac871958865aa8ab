"""One load cut into several, each for a process of its own, and their results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysd.errors import ExperimentError
from raysd.load.arrivals import Load, Part
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, LoadRun


@dataclass(frozen=True)
class Shard:
    """What one process does."""

    load: Part
    places: tuple[int, ...]
    """Of its requests among all."""


@dataclass(frozen=True)
class ShardRun:
    """What came of it."""

    run: LoadRun
    clock_ns: int
    """What to add to its times (`perf_counter_ns` of its machine) to have nanoseconds since 1970."""


def cut(load: Load, requests: Sequence[Request], count: int) -> list[Shard]:
    """So many shards that together are the load, if they begin at one moment.

    They take turns: the slots of a closed loop, each with the requests that are its, and the requests of an open loop go to one shard after the other, so that the
    concurrencies add up, all end together, and ramps and arrivals of either kind are those that one process would have. Raises ExperimentError if there are more
    shards than requests in flight.
    """
    if load.concurrency is not None and count > load.concurrency:
        raise ExperimentError(what=f"{count} processes for {load.concurrency} requests in flight", where="--shards", fix=f"use at most {load.concurrency}")
    places: list[list[int]] = [[] for _ in range(count)]
    for place in range(len(requests)):
        slot = place if load.concurrency is None else place % load.concurrency
        places[slot % count].append(place)
    return [Shard(Part(load, number, count), tuple(mine)) for number, mine in enumerate(places)]


def merge(shards: Sequence[Shard], runs: Sequence[ShardRun], requests: int) -> LoadRun:
    """One run, its results in the order of all requests and on one clock.

    The clocks of processes on one machine are the same; of several machines they agree as well as the machines' own time does.
    """
    results: list[Result | None] = [None] * requests
    for shard, shard_run in zip(shards, runs, strict=True):
        for place, result in zip(shard.places, shard_run.run.results, strict=True):
            results[place] = _shifted(result, shard_run.clock_ns)
    healths = [shard_run.run.health for shard_run in runs]
    return LoadRun(results, ClientHealth(sum(health.cpu_s for health in healths), max(health.elapsed_s for health in healths), sum(health.chunks for health in healths),
                                         max(health.loop_lag_ms_p99 for health in healths), max(health.dispatch_delay_ms_p99 for health in healths)))


def _shifted(result: Result, by_ns: int) -> Result:
    return replace(result, intended_ns=result.intended_ns + by_ns, dispatched_ns=result.dispatched_ns + by_ns, ended_ns=result.ended_ns + by_ns,
                   chunk_ns=tuple(at_ns + by_ns for at_ns in result.chunk_ns))
