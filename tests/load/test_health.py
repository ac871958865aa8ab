from dataclasses import replace

import pytest

from raysd.load.health import answer_reasons, client_reasons, repeats
from raysd.load.metrics import summarise
from raysd.load.requests import Request, Result
from raysd.load.run import ClientHealth

S = 10**9
WELL = ClientHealth(cpu_s=0.1, elapsed_s=4, chunks=8, loop_lag_ms_p99=1.0, dispatch_delay_ms_p99=0.2)


def result(start_s=0.0, end_s=4.0, tokens=4, error=None, **changes) -> Result:
    if error:
        return Result("p", int(start_s * S), int(start_s * S), int(end_s * S), error)
    return replace(Result("p", int(start_s * S), int(start_s * S), int(end_s * S), None, token_ids=tuple(range(tokens)), finish_reason="length", prompt_tokens=3, output_tokens=tokens,
                          chunk_ns=(int(end_s * S),), chunk_tokens=(tokens,)), **changes)


def reasons(results, ignore_eos=True, health=WELL):
    asked = [Request("p", (1, 2, 3), 4, 0.0, ignore_eos)] * len(results)
    return [*answer_reasons(results, asked, 0.5), *client_reasons(summarise(results, 2), health, 2, 20.0, 0.95)]


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


def test_a_loop_is_the_same_at_least_twice_at_the_end():
    assert repeats([1, 2, 3] + [4] * 32) and repeats([9] + list(range(16)) * 2) and repeats(("so on and " * 12).split())
    assert not repeats([4] * 31) and not repeats(list(range(40))) and not repeats([4] * 40 + [5])
