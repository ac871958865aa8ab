import itertools

from raysd.sweep.warm_up import ROUNDS, warm_up


def test_it_goes_on_while_steps_get_faster_and_ends_when_they_do_not():
    latencies_ms = iter([100.0, 60.0, 50.0, 49.0, 1.0])
    assert warm_up(lambda: {1: next(latencies_ms)}) == [{1: 100.0}, {1: 60.0}, {1: 50.0}, {1: 49.0}]


def test_a_single_noisy_concurrency_does_not_keep_it_going():
    rounds = iter([{1: 50.0, 2: 60.0, 4: 70.0}, {1: 20.0, 2: 60.0, 4: 70.0}])
    assert len(warm_up(lambda: next(rounds))) == 2


def test_it_ends_though_steps_seem_to_get_faster_for_ever():
    latency_ms = itertools.count(1)
    assert len(warm_up(lambda: {1: 100 / 2 ** next(latency_ms)})) == ROUNDS
