from collections import Counter

import pytest

from raysd.errors import ExperimentError
from raysd.load.arrivals import Load
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, LoadRun
from raysd.load.shards import ShardRun, cut, merge

REQUESTS = [Request(f"q{number}", "p", 1, 0.0, False) for number in range(70)]


def test_concurrencies_add_up_and_requests_are_dealt_by_them():
    shards = cut(Load(concurrency=7), REQUESTS, 3)
    assert [shard.load.concurrency for shard in shards] == [3, 2, 2] and [len(shard.places) for shard in shards] == [30, 20, 20]
    assert Counter(place for shard in shards for place in shard.places) == Counter(range(70))
    with pytest.raises(ExperimentError, match="3 processes for 2"):
        cut(Load(concurrency=2), REQUESTS, 3)


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("load", [Load(rate_s=10), Load(rate_s=10, ramp_s=4), Load(rate_s=10, arrivals="poisson", seed=5), Load(rate_s=10, arrivals="poisson", ramp_s=4)])
def test_arrivals_of_all_shards_are_those_of_the_whole(load, count):
    times = {}
    for shard in cut(load, REQUESTS, count):
        times |= zip(shard.places, shard.load.times_s(len(shard.places)), strict=True)
    assert [times[place] for place in range(70)] == load.times_s(70)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_on_a_ramp_each_first_request_of_all_shards_starts_when_it_would_in_the_whole(count):
    load, starts = Load(concurrency=7, ramp_s=14), {}
    for shard in cut(load, REQUESTS, count):
        starts |= {shard.places[slot]: shard.load.start_s(slot) for slot in range(shard.load.concurrency)}
    assert [starts[place] for place in range(7)] == [0, 2, 4, 6, 8, 10, 12]


def test_a_shard_may_have_nothing_to_do_at_a_rate():
    [*_, idle] = cut(Load(rate_s=1), REQUESTS[:2], 3)
    assert idle.places == () and idle.load.times_s(0) == []


def test_results_come_together_in_order_and_on_one_clock():
    shards = cut(Load(concurrency=2), REQUESTS[:4], 2)
    runs = [ShardRun(LoadRun([Result(f"q{place}", 1, 2, 9, chunk_ns=(5,), chunk_tokens=(1,)) for place in shard.places], ClientHealth(0.5, 2.0 + number, 3, 1.0 + number, 0.1)), 100 * number)
            for number, shard in enumerate(shards)]
    run = merge(shards, runs, 4)
    assert [(result.prompt_id, result.dispatched_ns, result.chunk_ns) for result in run.results] == [("q0", 2, (5,)), ("q1", 102, (105,)), ("q2", 2, (5,)), ("q3", 102, (105,))]
    assert run.health == ClientHealth(1.0, 3.0, 6, 2.0, 0.1)
