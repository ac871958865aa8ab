import statistics

import pytest

from raysd.errors import ExperimentError
from raysd.load.arrivals import LARGEST_RATE_S, LONGEST_S, Load


def test_a_constant_rate_is_evenly_spaced_and_starts_at_once():
    assert Load(rate_s=4).times_s(4) == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_are_independent_follow_the_seed_and_have_the_rate():
    times = Load(rate_s=50, arrivals="poisson", seed=1).times_s(20_000)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03) and statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert times == Load(rate_s=50, arrivals="poisson", seed=1).times_s(20_000) != Load(rate_s=50, arrivals="poisson", seed=2).times_s(20_000)


def test_a_ramp_grows_from_nothing_to_the_rate():
    times = Load(rate_s=10, ramp_s=4).times_s(60)
    assert sum(at < 4 for at in times) == 20, "half of the rate on average"
    assert sum(at < 2 for at in times) == 5 and times[-1] - times[-2] == pytest.approx(0.1) and times == sorted(times)


def test_slots_of_a_closed_loop_start_one_after_the_other_on_a_ramp():
    load = Load(concurrency=4, ramp_s=2)
    assert [load.start_s(slot) for slot in range(4)] == [0, 0.5, 1, 1.5] and Load(concurrency=4).start_s(3) == 0


@pytest.mark.parametrize(("load", "where"), [({}, "--rate"), ({"concurrency": 2, "rate_s": 1}, "--rate"), ({"concurrency": 0}, "--concurrency"), ({"rate_s": 0}, "--rate"),
                                             ({"rate_s": float("nan")}, "--rate"), ({"concurrency": 1, "arrivals": "poisson"}, "--poisson"), ({"rate_s": 1, "ramp_s": -1}, "--ramp"),
                                             ({"rate_s": 1e-300}, "--rate"), ({"rate_s": 1e308, "ramp_s": 1e308}, "--rate"), ({"rate_s": 1, "ramp_s": 1e300}, "--ramp"),
                                             ({"concurrency": 1, "ramp_s": 1e300}, "--ramp"), ({"concurrency": 1, "ramp_s": float("inf")}, "--ramp"), ({"concurrency": 1, "ramp_s": float("nan")}, "--ramp")])
def test_a_load_that_means_nothing_is_refused(load, where):
    with pytest.raises(ExperimentError) as refused:
        Load(**load)
    assert where in refused.value.where


def test_an_open_loop_has_an_end_and_comes_to_that_of_its_ramp():
    Load(rate_s=1 / LONGEST_S).check_count(2)
    Load(rate_s=LARGEST_RATE_S, ramp_s=LONGEST_S)
    Load(rate_s=10, ramp_s=4).check_count(21)
    Load(concurrency=1, ramp_s=1000).check_count(1)
    with pytest.raises(ExperimentError, match="the last of 3 requests would be sent after 1209600 s") as refused:
        Load(rate_s=1 / LONGEST_S).check_count(3)
    assert refused.value.where == "--rate"
    with pytest.raises(ExperimentError, match="10 requests a second would never be reached: the last of 20 is sent after 3.9 s of a ramp of 4 s") as refused:
        Load(rate_s=10, ramp_s=4).check_count(20)
    assert refused.value.where == "--ramp"
