"""Paired ratios against values worked out by hand or by scipy's own interval."""

import math

import pytest
from scipy import stats

from raysd.errors import MeasurementError
from raysd.report.statistics import PairedRatio, paired_ratio, position_rates, speedups, wilson_interval


def cell(arm, block, output_tok_s, *, k=None, concurrency=1, workload="report", valid=True):
    return {
        "arm": arm,
        "workload": workload,
        "concurrency": concurrency,
        "k": k,
        "block": block,
        "valid": valid,
        "output_tok_s": output_tok_s,
    }


def test_ratio_is_the_geometric_mean_of_the_pairs():
    assert paired_ratio([2.0, 8.0, 4.0], [1.0, 1.0, 1.0]).ratio == pytest.approx(4.0)
    assert paired_ratio([100.0, 50.0], [80.0, 40.0]).ratio == pytest.approx(1.25)


def test_interval_is_the_t_interval_of_the_log_ratios():
    values, baselines = [104.0, 108.0, 99.0, 107.0], [80.0, 81.0, 79.0, 83.0]
    logs = [math.log(a / b) for a, b in zip(values, baselines, strict=True)]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    assert paired_ratio(values, baselines).interval == pytest.approx((math.exp(low), math.exp(high)))


def test_three_blocks_by_hand():
    # log-ratios ln 1.1 + (-0.02, 0, 0.02): deviation 0.02, t(0.975, 2) = 4.30265, half-width 4.30265 * 0.02 / sqrt(3) = 0.049683
    values = [1.1 * math.exp(shift) for shift in (-0.02, 0, 0.02)]
    assert paired_ratio(values, [1.0] * 3).interval == pytest.approx((1.1 * math.exp(-0.049683), 1.1 * math.exp(0.049683)), rel=1e-5)


def test_no_interval_and_no_verdict_below_three_pairs():
    compared = paired_ratio([130.0, 131.0], [100.0, 100.0])
    assert compared.interval is None and compared.verdict is None and compared.pairs == 2


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((1.01, 1.2), "faster"), ((0.8, 0.99), "slower"), ((0.9, 1.1), "tie"), ((1.0, 1.1), "tie"), ((1.0, 1.0), "tie")],
)
def test_verdict_is_a_tie_when_the_interval_holds_1(interval, verdict):
    assert PairedRatio(1.0, interval, 3).verdict == verdict


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_value_without_a_logarithm_is_refused(bad):
    with pytest.raises(MeasurementError, match="above zero"):
        paired_ratio([1.0, bad, 1.0], [1.0, 1.0, 1.0])


def test_pairs_stay_within_block_concurrency_and_workload():
    cells = [
        cell("none", 0, 100.0),
        cell("none", 1, 200.0),
        cell("none", 2, 400.0),
        cell("none", 0, 10.0, concurrency=2),
        cell("none", 0, 1.0, workload="other"),
        cell("bf16", 2, 480.0, k=3),
        cell("bf16", 0, 120.0, k=3),
        cell("bf16", 1, 240.0, k=3),
        cell("bf16", 0, 5.0, k=3, concurrency=2),
        cell("bf16", 0, 3.0, k=3, workload="other"),
    ]
    found = {(s.workload, s.concurrency): s for s in speedups(cells)}
    at_1 = found["report", 1]
    assert at_1.compared.ratio == pytest.approx(1.2) and at_1.compared.interval == pytest.approx((1.2, 1.2)) and at_1.verdict == "faster"
    assert at_1.baseline_output_tok_s == pytest.approx(200.0) and at_1.output_tok_s == pytest.approx(240.0)
    assert found["report", 2].compared == PairedRatio(pytest.approx(0.5), None, 1)
    assert found["other", 1].compared.ratio == pytest.approx(3.0)


def test_each_k_of_an_arm_is_compared_with_the_one_baseline():
    cells = [cell("none", 0, 100.0), cell("bf16", 0, 130.0, k=3), cell("bf16", 0, 110.0, k=1), cell("fp8", 0, 50.0, k=1)]
    assert [(s.arm, s.k, round(s.compared.ratio, 6)) for s in speedups(cells)] == [("bf16", 1, 1.1), ("bf16", 3, 1.3), ("fp8", 1, 0.5)]


@pytest.mark.parametrize("broken", ["none", "bf16"])
def test_a_pair_with_an_invalid_cell_is_left_out(broken):
    cells = [
        cell(
            arm,
            block,
            100.0 if arm == "none" else 150.0 * 10 ** (block == 1),
            k=None if arm == "none" else 3,
            valid=not (arm == broken and block == 1),
        )
        for block in range(4)
        for arm in ("none", "bf16")
    ]
    assert speedups(cells)[0].compared == PairedRatio(pytest.approx(1.5), pytest.approx((1.5, 1.5)), 3)


def test_a_point_without_any_valid_pair_is_still_there():
    (found,) = speedups([cell("none", 0, None, valid=False), cell("bf16", 0, 100.0, k=3)])
    assert found.compared is None and found.verdict is None and found.output_tok_s is None


def test_a_cell_that_is_there_twice_is_refused():
    with pytest.raises(MeasurementError, match="twice"):
        speedups([cell("none", 0, 1.0), cell("none", 0, 2.0)])


def test_position_rates_of_all_drafts_and_of_those_that_got_there():
    rates = position_rates(1000, [480, 220, 0, 0])
    assert [rate.unconditional_frac for rate in rates] == [0.48, 0.22, 0.0, 0.0]
    assert [rate.conditional_frac for rate in rates] == [0.48, pytest.approx(220 / 480), 0.0, None]
    with pytest.raises(MeasurementError, match="no draft"):
        position_rates(0, [0, 0, 0])


@pytest.mark.parametrize(("successes", "trials"), [(48, 100), (0, 20), (20, 20), (1, 3)])
def test_wilson_interval_is_scipys(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(successes, trials)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-7)
    assert 0 <= low <= successes / trials <= high <= 1
