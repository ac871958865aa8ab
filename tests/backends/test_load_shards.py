import pytest

from raysd.backends.load_shards import run_shards
from raysd.load.arrivals import Load
from raysd.load.metrics import mean_in_flight, steady_window
from raysd.load.mock_server import MODEL
from raysd.load.requests import Request
from raysd.load.run import Limits
from raysd.load.selftest import mock_server


@pytest.mark.slow
def test_processes_hold_the_concurrency_together():
    requests = [Request(f"q{number}", "a prompt", 200, 0.0, True) for number in range(40)]
    with mock_server("--ttft-ms", "20", "--step-ms", "20") as address:
        run = run_shards(3, address, MODEL, requests, Load(concurrency=10), Limits(), False)
    assert [result.prompt_id for result in run.results] == [request.prompt_id for request in requests] and {result.error for result in run.results} == {None}
    window = steady_window(run.results, 10)
    assert mean_in_flight(run.results, window) == pytest.approx(10, rel=0.01)
