import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from raysd.errors import MeasurementError
from raysd.load.arrivals import Load
from raysd.load.ask import ask_json
from raysd.load.mock_server import MODEL
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth, LoadRun, run_load
from raysd.load.selftest import judge, mock_server, selftest_lines

MS = 10**6
HEALTH = ClientHealth(cpu_s=0.001, elapsed_s=1.0, chunks=100, loop_lag_ms_p99=0.5, dispatch_delay_ms_p99=0.1)


def result(ttft_ms=50.0, tokens=(1, 4, 1), step_ms=20.0) -> Result:
    chunk_ns = tuple(int((ttft_ms + step_ms * step) * MS) for step in range(len(tokens)))
    return Result("q", 0, 0, chunk_ns[-1], token_ids=(), output_tokens=sum(tokens), finish_reason="length", prompt_tokens=1, chunk_ns=chunk_ns, chunk_tokens=tuple(tokens))


TRUTH = [{"ttft_ms": 50.0, "tpot_ms": 8.0, "steps": 2, "tokens": 6}]


def test_what_agrees_with_the_truth_is_valid():
    told = judge(LoadRun([result()], HEALTH), TRUTH, 1)
    assert told["valid"] and told["recovered"] == told["truth"] == {"ttft_ms": 50, "tpot_ms": 8, "acceptance_length": 2.5}
    assert told["chunks_s"] == 100 and told["cpu_us_per_chunk"] == pytest.approx(10) and selftest_lines(told)[-1] == "valid"


@pytest.mark.parametrize(("run", "says"), [
    (LoadRun([result(ttft_ms=50.6)], HEALTH), "ttft_ms is 50.600, and was 50.000"), (LoadRun([result(step_ms=21)], HEALTH), "tpot_ms"),
    (LoadRun([result(tokens=(1, 4, 1, 1))], HEALTH), "acceptance_length"), (LoadRun([result()], replace(HEALTH, loop_lag_ms_p99=21)), "21.0 ms late")])
def test_what_does_not_is_not(run, says):
    told = judge(run, TRUTH, 1)
    assert not told["valid"] and any(says in reason for reason in told["invalid_reasons"]) and "NOT VALID" in selftest_lines(told)[-1]


def test_a_failed_request_is_no_measurement():
    with pytest.raises(MeasurementError, match="1 requests of the self-test failed"):
        judge(LoadRun([Result("q", 0, 0, 1, "connection failed")], HEALTH), TRUTH, 1)


def test_the_mock_server_emits_the_tokens_that_it_was_told_and_counts_them():
    with mock_server("--ttft-ms", "5", "--step-ms", "2", "--step-tokens", "4,1,3,2") as address:
        run = run_load(address, MODEL, [Request(f"q{number}", "a prompt", 12, 0.0, True) for number in range(6)], Load(concurrency=3))
        assert {result.error for result in run.results} == {None}
        assert {result.chunk_tokens for result in run.results} == {(1, 1, 3, 2, 4, 1)} and run.results[0].prompt_tokens == 2
        truth = ask_json(address, "/truth")
        assert [each["tokens"] for each in truth] == [12] * 6 and {each["steps"] for each in truth} == {5}
        [other] = run_load(address, "another", [Request("q", "a prompt", 12, 0.0, True)], Load(concurrency=1)).results
        assert "status 404" in other.error and "does not exist" in other.error


def test_a_self_test_that_is_terminated_leaves_no_server_behind():
    bench = subprocess.Popen([sys.executable, "-m", "raysd", "bench", "--selftest"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (servers := psutil.Process(bench.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bench.terminate()
        said = bench.communicate(timeout=60)[1]
        assert bench.returncode == 143 and "stopped by SIGTERM" in said
        assert psutil.wait_procs(servers, timeout=60)[1] == []
    finally:
        bench.kill()
        bench.wait()
