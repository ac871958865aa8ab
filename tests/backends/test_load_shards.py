import pytest

from raysd.backends import load_shards
from raysd.backends.load_shards import run_shards
from raysd.load.arrivals import Load
from raysd.load.metrics import mean_in_flight, steady_window
from raysd.load.mock_server import MODEL
from raysd.load.requests import Request
from raysd.load.run import Limits
from raysd.load.selftest import mock_server
from raysd.load.tally import Tally


@pytest.mark.slow
def test_processes_hold_the_concurrency_together_and_say_how_far_they_are(monkeypatch):
    monkeypatch.setattr(load_shards, "TALLY_EVERY_S", 0.2)
    requests = [Request(f"q{number}", "a prompt", 200, 0.0, True) for number in range(40)]
    with mock_server("--ttft-ms", "20", "--step-ms", "20") as address:
        run = run_shards(3, tally := Tally(), address, MODEL, requests, Load(concurrency=10), Limits(), False)
    assert [result.prompt_id for result in run.results] == [request.prompt_id for request in requests] and {result.error for result in run.results} == {None}
    assert tally.requests == 40 and 0 < tally.ended <= 40 and tally.failed == 0
    window = steady_window(run.results, 10)
    assert mean_in_flight(run.results, window) == pytest.approx(10, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "times_s"), [
    (Load(concurrency=6, ramp_s=1.2), [0.2 * slot for slot in range(6)]), (Load(rate_s=10, arrivals="poisson", seed=3), Load(rate_s=10, arrivals="poisson", seed=3).times_s(6))])
def test_processes_send_when_one_would(load, times_s):
    requests = [Request(f"q{number}", "a prompt", 100, 0.0, True) for number in range(6)]
    with mock_server("--ttft-ms", "20", "--step-ms", "40") as address:  # each answer takes longer than the ramp, so that slot and request are of one number
        results = run_shards(3, Tally(), address, MODEL, requests, load, Limits(), False).results
    assert {result.error for result in results} == {None}
    sent_s = [(result.intended_ns - results[0].intended_ns) / 1e9 for result in results]
    assert sent_s == pytest.approx([at_s - times_s[0] for at_s in times_s], abs=0.005)  # each process reads its two clocks one after the other
