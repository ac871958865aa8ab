"""A load from several processes: a Ray actor each, on this machine or spread over the nodes of a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from raysd.backends.ray_driver import connected, received
from raysd.errors import NodeLostError
from raysd.load.address import Address
from raysd.load.arrivals import Load, Part
from raysd.load.requests import Request
from raysd.load.run import Limits, LoadRun, run_load
from raysd.load.shards import ShardRun, cut, merge
from raysd.load.tally import Tally

TALLY_EVERY_S = 5.0
"""Rarely: to answer takes each process a moment in which no chunk is stamped."""
FROM_THE_START = "run again, from the start: a load keeps nothing before its end"
START_S = 2.0
"""From the moment at which all processes are there until they begin, together."""


class ShardActor:
    """One process of the load."""

    def __init__(self) -> None:
        self._tally = Tally()

    def ready(self) -> None:
        """Returns when it is there, its libraries loaded."""
        import uvloop  # noqa: F401

    def run(self, address: Address, model: str, requests: Sequence[Request], load: Load | Part, limits: Limits, plain: bool, begin_ns: int | None) -> ShardRun:
        """Its share; begin_ns: when all begin, in nanoseconds since 1970; None: when it is ready."""
        clock_ns = time.time_ns() - time.perf_counter_ns()
        return ShardRun(run_load(address, model, requests, load, limits, plain, None if begin_ns is None else begin_ns - clock_ns, self._tally), clock_ns)

    def tally(self) -> Tally:
        """How far it is; to be asked while it runs."""
        return self._tally


def run_far(actor: Any, address: Address, model: str, requests: Sequence[Request], load: Load, limits: Limits, plain: bool) -> LoadRun:
    """As run_load, by the process of a ShardActor's handle. Raises NodeLostError if it has ended."""
    return received(actor.run.remote(address, model, requests, load, limits, plain, None), "the load", "sweep.client: other_node", NodeLostError).run


def run_shards(count: int, tally: Tally, address: Address, model: str, requests: Sequence[Request], load: Load, limits: Limits, plain: bool) -> LoadRun:
    """The load, from so many processes; tally and the rest as run_load has them. Raises ExperimentError as `cut` does, TryAgainError if Ray fails."""
    import ray

    def told(reference: Any) -> Any:
        return received(reference, "the load", "--shards", again=FROM_THE_START)

    shards = cut(load, requests, count)
    with connected("the load", "--shards", FROM_THE_START):
        actors = [ray.remote(ShardActor).options(num_cpus=0, max_concurrency=2, scheduling_strategy="SPREAD").remote() for _ in shards]  # 2: the run, and who asks how far it is
        for actor in actors:
            told(actor.ready.remote())
        begin_ns = time.time_ns() + int(1e9 * START_S)
        running = [actor.run.remote(address, model, [requests[place] for place in shard.places], shard.load, limits, plain, begin_ns)
                   for actor, shard in zip(actors, shards, strict=True)]
        while ray.wait(running, num_returns=len(running), timeout=TALLY_EVERY_S)[1]:
            tally.become_sum([told(actor.tally.remote()) for actor in actors])
        runs = [told(reference) for reference in running]
    return merge(shards, runs, len(requests))


