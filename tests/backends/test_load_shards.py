import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raysd.backends import load_shards
from raysd.backends.load_shards import run_shards
from raysd.load.arrivals import Load
from raysd.load.ask import ask_text
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


def shard_of(pid):
    """The process of a shard that a bench's Ray has started."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, after = status.read_text().rsplit(")", 1)
            number, names_it = before.split("(", 1)
            parents[int(number)], names[int(number)] = int(after.split()[1]), names_it

    def below(number):
        return number == pid or number in parents and below(parents[number])

    return next(number for number, name in names.items() if name.startswith("ray::ShardActor"[:15]) and below(number))


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "number", "exit_code", "says"), [
    (lambda pid: pid, signal.SIGTERM, 143, "stopped by SIGTERM; a bench has results only at its end"), (shard_of, signal.SIGKILL, 75, "run again, from the start: a load keeps nothing")])
def test_a_bench_of_several_processes_that_is_ended_says_what_is_true_of_it(whose, number, exit_code, says):
    with mock_server("--ttft-ms", "60000") as address:
        bench = subprocess.Popen([sys.executable, "-m", "raysd", "bench", address.url, "--concurrency", "2", "--requests", "2", "--shards", "2"], stderr=subprocess.PIPE, text=True)
        try:
            while "num_requests_running 2" not in ask_text(address, "/metrics"):
                assert bench.poll() is None
                time.sleep(0.1)
            os.kill(whose(bench.pid), number)
            told = bench.communicate(timeout=100)[1]
        finally:
            bench.terminate()
            bench.wait()
    assert bench.returncode == exit_code and says in told and "Traceback" not in told
