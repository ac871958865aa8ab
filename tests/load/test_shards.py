from collections import Counter

import pytest

from raysd.errors import ExperimentError
from raysd.load.arrivals import Load
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, LoadRun
from raysd.load.shards import ShardRun, cut, merge, start_delay_s

REQUESTS = [Request(f"q{number}", "p", 1, 0.0, False) for number in range(70)]


def test_concurrencies_add_up_and_requests_are_dealt_by_them():
    shards = cut(Load(concurrency=7), REQUESTS, 3)
    assert [shard.load.concurrency for shard in shards] == [3, 2, 2] and [len(shard.places) for shard in shards] == [30, 20, 20]
    assert Counter(place for shard in shards for place in shard.places) == Counter(range(70))
    with pytest.raises(ExperimentError, match="3 processes for 2"):
        cut(Load(concurrency=2), REQUESTS, 3)


def test_constant_arrivals_of_all_shards_are_those_of_the_whole():
    load = Load(rate_s=10)
    times = {}
    for number, shard in enumerate(cut(load, REQUESTS, 3)):
        times |= {place: at_s + start_delay_s(load, number, 3) for place, at_s in zip(shard.places, shard.load.times_s(len(shard.places)), strict=True)}
    assert [times[place] for place in range(70)] == pytest.approx(load.times_s(70))


def test_poisson_arrivals_of_shards_differ():
    one, other = cut(Load(rate_s=10, arrivals="poisson"), REQUESTS, 2)
    assert one.load.rate_s == 5 and one.load.times_s(9) != other.load.times_s(9)


def test_results_come_together_in_order_and_on_one_clock():
    shards = cut(Load(concurrency=2), REQUESTS[:4], 2)
    runs = [ShardRun(LoadRun([Result(f"q{place}", 1, 2, 9, chunk_ns=(5,), chunk_tokens=(1,)) for place in shard.places], ClientHealth(0.5, 2.0 + number, 3, 1.0 + number, 0.1)), 100 * number)
            for number, shard in enumerate(shards)]
    run = merge(shards, runs, 4)
    assert [(result.prompt_id, result.dispatched_ns, result.chunk_ns) for result in run.results] == [("q0", 2, (5,)), ("q1", 102, (105,)), ("q2", 2, (5,)), ("q3", 102, (105,))]
    assert run.health == ClientHealth(1.0, 3.0, 6, 2.0, 0.1)
