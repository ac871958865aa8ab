from dataclasses import replace

import pytest

from raysd.load.health import answer_reasons, client_reasons, rate_reasons, repeats
from raysd.load.metrics import summarise
from raysd.load.percentiles import percentile
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth

S = 10**9
WELL = ClientHealth(cpu_s=0.1, elapsed_s=4, chunks=8, loop_lag_ms_p99=1.0, dispatch_delay_ms_p99=0.2)


def result(start_s=0.0, end_s=4.0, tokens=4, error=None, **changes) -> Result:
    if error:
        return Result("p", int(start_s * S), int(start_s * S), int(end_s * S), error)
    return replace(Result("p", int(start_s * S), int(start_s * S), int(end_s * S), None, token_ids=tuple(range(tokens)), finish_reason="length", prompt_tokens=3, output_tokens=tokens,
                          chunk_ns=(int(end_s * S),), chunk_tokens=(tokens,)), **changes)


def reasons(results, ignore_eos=True, health=WELL, ramp_s=0.0):
    asked = [Request("p", (1, 2, 3), 4, 0.0, ignore_eos)] * len(results)
    return [*answer_reasons(results, asked, 0.5), *client_reasons(summarise(results, 2), health, 2, 20.0, 0.95, ramp_s)]


def test_a_clean_load_is_valid():
    assert reasons([result(), result()]) == []


@pytest.mark.parametrize(("results", "says"), [
    ([result(), result(error="status 500: dead")], "1 of 2 requests failed, the first with: status 500: dead"),
    ([result(error="status 500: dead")] * 2, "2 of 2 requests failed"),
    ([result(), result(start_s=4.5, end_s=6)], "never reached"),
    ([result(0, 1), result(0, 1), result(8, 9), result(8, 9)], "0.44 requests were in flight on average, 2 were asked for"),
    ([result(), result(cached_tokens=3)], "3 prompt tokens came from the server's prefix cache"),
    ([result(), result(tokens=3)], "1 answers do not have the tokens that ignore_eos asks for"),
    ([result(token_ids=(7,) * 40), result(token_ids=(1, 2) * 20)], "2 of 2 answers end in a loop")])
def test_what_must_not_be_used_says_why(results, says):
    [reason] = reasons(results)
    assert says in reason


def test_an_answer_may_end_early_unless_it_was_told_not_to():
    assert reasons([result(), result(tokens=3)], ignore_eos=False) == []
    [reason] = reasons([result(), result(tokens=5)], ignore_eos=False)
    assert reason == "1 answers are longer than was allowed"


def test_a_client_that_does_not_keep_up_spoils_what_it_measured():
    [reason] = reasons([result(), result()], health=replace(WELL, loop_lag_ms_p99=31.5))
    assert "31.5 ms late" in reason


def test_a_load_that_was_over_before_its_ramp_says_so():
    results = [result(), result(start_s=4.5, end_s=6)]
    assert "all was answered after 6 s of a ramp of 20 s" in reasons(results, ramp_s=20.0)[0] and "ramp" not in reasons(results, ramp_s=5.0)[0]


def at_a_rate(late_ms, connect_ms=(), rate_s=100, count=100):
    """Why an open loop must not be used whose requests were each sent so much later than asked for."""
    sent_s = [number / rate_s + late_ms(number) / 1e3 for number in range(count)]
    results = [replace(result(at_s, at_s + 1), intended_ns=int(number / rate_s * S), connect_ms=dict(enumerate(connect_ms)).get(number)) for number, at_s in enumerate(sent_s)]
    return rate_reasons(results, replace(WELL, dispatch_delay_ms_p99=percentile([late_ms(number) for number in range(count)], 99)), 20.0)


def test_an_open_loop_that_sends_late_or_too_slowly_spoils_what_it_measured():
    assert at_a_rate(lambda number: 1.0) == [] == at_a_rate(lambda number: 0.0, count=1)
    [late] = at_a_rate(lambda number: 25.0 if number % 10 == 0 else 0.0)
    assert "25.0 ms later than asked for (99th percentile, at most 20" in late
    [slow] = at_a_rate(lambda number: 0.1 * number, rate_s=1000)
    assert "91 % of the asked rate (at least 95 %)" in slow
    assert len(at_a_rate(lambda number: 40.0 * number)) == 2, "as of a server that lets ten connect a second, where twice as many are asked for"


def test_a_connection_takes_the_time_that_it_takes_and_waiting_for_one_is_late():
    assert at_a_rate(lambda number: 150.0 if number < 10 else 0.0, connect_ms=[150.0] * 10) == []
    assert "at most 20 beside the 150.0 of a connection" in at_a_rate(lambda number: 150.0 if number < 5 else 400.0, connect_ms=[150.0] * 5 + [400.0] * 95)[0]


def test_a_loop_is_the_same_at_least_twice_at_the_end():
    assert repeats([1, 2, 3] + [4] * 32) and repeats([9] + list(range(16)) * 2) and repeats(("so on and " * 12).split())
    assert not repeats([4] * 31) and not repeats(list(range(40))) and not repeats([4] * 40 + [5])
