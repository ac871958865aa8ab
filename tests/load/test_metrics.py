import dataclasses

import numpy
import pytest

from raysd.errors import MeasurementError
from raysd.load.metrics import Window, e2el_ms, steady_window, step_ms, summarise, tpot_ms, ttft_ms
from raysd.load.percentiles import percentile
from raysd.load.requests import Result

S = 10**9


def request(start_s: float, *chunks: tuple[float, int], end_s: float | None = None, error: str | None = None) -> Result:
    """A request that got (second, tokens) chunks."""
    at_ns = tuple(int(second * S) for second, _ in chunks)
    tokens = tuple(count for _, count in chunks)
    return Result("p", int(start_s * S), int(start_s * S), int((end_s or chunks[-1][0]) * S), error, token_ids=tuple(range(sum(tokens))), finish_reason="stop", prompt_tokens=5,
                  output_tokens=sum(tokens), chunk_ns=at_ns, chunk_tokens=tokens)


def test_times_of_a_request_count_tokens_and_not_chunks():
    result = request(1, (1.5, 3), (2.5, 4), (3.5, 4))
    assert (ttft_ms(result), e2el_ms(result), tpot_ms(result)) == (500, 2500, 200)
    assert tpot_ms(request(1, (1.5, 1))) is None
    assert step_ms(result) == [1000, 1000]


def test_window_leaves_out_the_ramp_and_the_tail():
    results = [request(0, (4, 40)), request(1, (5, 40)), request(4.001, (8, 40)), request(5.001, (12, 70))]
    assert steady_window(results, concurrency=2) == Window(1 * S, 8 * S)
    assert steady_window(results, concurrency=3) is None


def test_a_slot_at_concurrency_1_is_steady_from_the_first_request_to_the_end_of_the_last():
    assert steady_window([request(0, (2, 5)), request(2.0001, (3, 5))], 1) == Window(0, 3 * S)


def test_a_request_that_starts_when_another_ends_makes_no_overlap():
    assert steady_window([request(0, (2, 5)), request(2, (4, 5))], 2) is None


def test_percentiles_are_numpys():
    values = [5.0, 1.0, 4.0, 2.0]
    for percent in (0, 25, 50, 90, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    with pytest.raises(MeasurementError):
        percentile([], 50)


def test_rates_are_of_good_requests_over_the_whole_run_and_of_the_window():
    results = [request(0, (1, 10), (4, 10)), request(0, (1, 10), (2, 10)), request(0, (3, 1), end_s=3, error=None), request(2, (10, 20))]
    metrics = summarise(results, concurrency=3)
    assert (metrics.requests, metrics.failures, metrics.prompt_tokens, metrics.output_tokens) == (4, 0, 20, 61)
    assert metrics.elapsed_s == 10 and metrics.output_tok_s == 6.1 and metrics.total_tok_s == 8.1
    assert metrics.window_s == 3 and metrics.window_output_tok_s == pytest.approx(31 / 3)
    assert metrics.achieved_concurrency == pytest.approx(3)


def test_a_failed_request_adds_no_tokens_but_its_time():
    failed = Result("p", 0, 0, 5 * S, error="status 500: x")
    metrics = summarise([request(0, (1, 4), (2, 4)), failed], concurrency=2)
    assert metrics.failures == 1 and metrics.output_tokens == 8 and metrics.elapsed_s == 5 and metrics.ttft_ms_p50 == 1000
    only_failed = summarise([failed], concurrency=1)
    assert only_failed.output_tok_s == 0 and only_failed.ttft_ms_p50 is None


def test_where_chunks_do_not_say_how_many_tokens_they_carry_the_window_has_no_rate():
    untold = [dataclasses.replace(request(0, (1, 10), (4, 10)), chunk_tokens=())]
    metrics = summarise(untold, concurrency=1)
    assert metrics.window_output_tok_s is None and metrics.output_tok_s == 5 and metrics.tpot_ms_p50 == pytest.approx(3000 / 19)
