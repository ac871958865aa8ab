"""Ratios and verdicts against values worked out by hand or by scipy's own tests."""

import math

import pytest
from scipy import stats

from raysd.errors import MeasurementError
from raysd.sweep.statistics import RatioEstimate, holm_levels, paired_ratio, ratios_of_arms, speedups, unpaired_ratio, verdict


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
    assert compared.interval is None and compared.p_value is None and compared.detectable_ratio() is None and compared.n == 2
    assert verdict(compared.interval) is None


@pytest.mark.parametrize(
    ("interval", "said"),
    [((1.01, 1.2), "faster"), ((0.8, 0.99), "slower"), ((0.9, 1.1), "tie"), ((1.0, 1.1), "tie"), ((1.0, 1.0), "tie")],
)
def test_verdict_is_a_tie_when_the_interval_holds_1(interval, said):
    assert verdict(interval) == said


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
    assert found["report", 2].compared == RatioEstimate(pytest.approx(0.5), 1) and found["report", 2].verdict is None
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
    assert speedups(cells)[0].compared == RatioEstimate(pytest.approx(1.5), 3, 0.0, 2)


def test_a_point_without_any_valid_pair_is_still_there():
    (found,) = speedups([cell("none", 0, None, valid=False), cell("bf16", 0, 100.0, k=3)])
    assert found.compared is None and found.verdict is None and found.output_tok_s is None


def test_a_cell_that_is_there_twice_is_refused():
    with pytest.raises(MeasurementError, match=r"block\) = \('report', 'none', None, 1, 1\) is there twice"):  # blocks count from 1 for people
        speedups([cell("none", 0, 1.0), cell("none", 0, 2.0)])


def test_the_p_value_is_that_of_the_paired_t_test():
    values, others = [104.0, 108.0, 99.0, 107.0, 90.0], [100.0, 101.0, 98.0, 103.0, 91.0]
    expected = stats.ttest_rel(*([math.log(each) for each in side] for side in (values, others)))
    assert paired_ratio(values, others).p_value == pytest.approx(expected.pvalue)


def test_without_a_pilot_all_pairs_say_what_the_spread_is_and_with_one_only_its_own():
    values, others = [1.1, 1.2, 1.0, 1.3, 1.1, 2.0, 0.5], [1.0] * 7
    whole, staged = paired_ratio(values, others), paired_ratio(values, others, pilot=5)
    assert whole.ratio == staged.ratio and (whole.freedom, staged.freedom) == (6, 4)
    assert staged.log_se == pytest.approx(stats.tstd([math.log(each) for each in values[:5]]) / math.sqrt(7))
    assert paired_ratio(values[:5], others[:5], pilot=5) == paired_ratio(values[:5], others[:5])


def test_unpaired_is_welchs_test():
    values, others = [104.0, 108.0, 99.0, 107.0], [80.0, 95.0, 71.0, 83.0, 88.0, 90.0]
    expected = stats.ttest_ind(*([math.log(each) for each in side] for side in (values, others)), equal_var=False)
    found = unpaired_ratio(values, others)
    low, high = expected.confidence_interval()
    assert found.p_value == pytest.approx(expected.pvalue) and found.interval == pytest.approx((math.exp(low), math.exp(high))) and found.n == 4
    assert unpaired_ratio([2.0, 2.0], [1.0, 1.0, 1.0]) == RatioEstimate(pytest.approx(2.0), 2)
    assert verdict(unpaired_ratio([2.0] * 3, [1.0] * 3).interval) == "faster"


def test_the_bootstrap_stands_beside_the_t_interval_from_ten_pairs_on():
    values = [1.2 * math.exp(0.05 * math.sin(3 * block)) for block in range(10)]
    assert paired_ratio(values[:9], [1.0] * 9).bootstrap is None and paired_ratio(values, [1.0] * 10, resample=False).bootstrap is None
    found = paired_ratio(values, [1.0] * 10)
    assert found.bootstrap == pytest.approx(found.interval, rel=0.02) and found.bootstrap != found.interval
    assert found == paired_ratio(values, [1.0] * 10), "the same pairs give the same resamples"
    assert paired_ratio([1.5] * 10, [1.0] * 10).bootstrap == pytest.approx((1.5, 1.5))


def test_holm_decides_from_the_smallest_p_value_on_and_stops_at_the_first_that_is_too_large():
    # 0.05/4 = 0.0125, 0.05/3 = 0.0167, 0.05/2 = 0.025; the third is too large, so the fourth is decided at its level, though it is below 0.05
    assert holm_levels([0.03, 0.001, None, 0.016, 0.045]) == pytest.approx([0.025, 0.0125, 0.05, 0.05 / 3, 0.025])
    assert holm_levels([]) == [] and holm_levels([0.04]) == [0.05]


def test_intervals_agree_with_the_verdicts_of_holm():
    # The standard error is 0.00707; t(4) at 0.05/4, 0.05/3 and 0.05/2 is 4.31, 3.96 and 3.50, and 2.78 at 0.05: by themselves all four differ from 1
    shifts = {1: 0.30, 2: 0.030, 4: 0.022, 8: 0.021}
    noise = (-0.02, -0.01, 0.0, 0.01, 0.02)
    cells = [cell("none", block, 100.0, concurrency=c) for block in range(5) for c in shifts]
    cells += [cell("bf16", block, 100.0 * math.exp(shift + noise[block]), k=3, concurrency=c) for block in range(5) for c, shift in shifts.items()]
    found = {each.concurrency: each for each in speedups(cells)}
    assert {c: verdict(each.compared.interval) for c, each in found.items()} == dict.fromkeys(shifts, "faster")
    assert {c: each.verdict for c, each in found.items()} == {1: "faster", 2: "faster", 4: "tie", 8: "tie"}
    assert [found[c].level for c in shifts] == pytest.approx([0.05 / 4, 0.05 / 3, 0.05 / 2, 0.05 / 2])
    for each in found.values():
        low, high = each.interval
        assert (low <= 1 <= high) == (each.verdict == "tie")
        assert low <= each.compared.interval[0] and each.compared.interval[1] <= high


def test_two_drafts_are_compared_in_their_common_blocks_and_among_themselves():
    cells = [cell(arm, block, rate * c, k=k, concurrency=c, valid=(arm, block) != ("fp8", 1)) for block in range(5) for c in (1, 4)
             for arm, k, rate in (("none", None, 50.0), ("bf16", 3, 100.0), ("fp8", 3, 104.0))]
    found = ratios_of_arms(cells, "fp8", "bf16")
    assert [(each.concurrency, each.compared, each.baseline_output_tok_s) for each in found] == [(c, RatioEstimate(pytest.approx(1.04), 4, 0.0, 3), pytest.approx(100 * c)) for c in (1, 4)]
    assert [each.level for each in found] == [0.025, 0.05] and ratios_of_arms(cells, "bf16", "fp4") == []


def test_unpaired_takes_the_spread_of_each_sides_pilot():
    values, others = [1.1, 1.2, 1.0, 1.3, 1.1, 2.0, 0.5], [1.0, 1.05, 0.9, 1.1]
    parts = [stats.tvar([math.log(each) for each in side]) / n for side, n in ((values[:5], 7), (others, 4))]
    found = unpaired_ratio(values, others, (5, None))
    assert found.log_se == pytest.approx(math.sqrt(sum(parts))) and found.freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 3))
