"""One load cut into several, each for a process of its own, and their results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysd.errors import ExperimentError
from raysd.load.arrivals import Load
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, LoadRun


@dataclass(frozen=True)
class Shard:
    """What one process does."""

    load: Load
    places: tuple[int, ...]
    """Of its requests among all."""


@dataclass(frozen=True)
class ShardRun:
    """What came of it."""

    run: LoadRun
    clock_ns: int
    """What to add to its times (`perf_counter_ns` of its machine) to have nanoseconds since 1970."""


def cut(load: Load, requests: Sequence[Request], count: int) -> list[Shard]:
    """So many shards that together are the load.

    In a closed loop their concurrencies add up to the one asked for, and each has a share of the requests by it, so that all end together. At a rate each shard
    sends every count-th request at its own time: constant arrivals stay evenly spaced, and Poisson arrivals of parts are Poisson arrivals of the whole.
    Raises ExperimentError if there are more shards than requests in flight.
    """
    if load.concurrency is None:
        return [Shard(replace(load, rate_s=load.rate_s / count, seed=load.seed + number), tuple(range(number, len(requests), count))) for number in range(count)]
    if count > load.concurrency:
        raise ExperimentError(what=f"{count} processes for {load.concurrency} requests in flight", where="--shards", fix=f"use at most {load.concurrency}")
    slots = [load.concurrency // count + (number < load.concurrency % count) for number in range(count)]
    owner = [number for number, size in enumerate(slots) for _ in range(size)]  # of each slot
    places: list[list[int]] = [[] for _ in slots]
    for place in range(len(requests)):
        places[owner[place % load.concurrency]].append(place)
    return [Shard(replace(load, concurrency=size), tuple(mine)) for size, mine in zip(slots, places, strict=True)]


def start_delay_s(load: Load, number: int, count: int) -> float:
    """By how much a shard's begin is put off, so that constant arrivals of all shards are evenly spaced."""
    return number / load.rate_s if load.rate_s is not None and load.arrivals == "constant" else 0.0


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
