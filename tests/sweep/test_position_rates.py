"""Acceptance from counts, against values worked out by hand or by scipy's own interval."""

import pytest
from scipy import stats

from raysd.draft.acceptance import add_positions
from raysd.errors import MeasurementError
from raysd.sweep.position_rates import pooled_length, position_rates, wilson_interval


def test_position_rates_of_all_drafts_and_of_those_that_got_there():
    rates = position_rates(1000, [480, 220, 0, 0])
    assert [rate.cumulative_frac for rate in rates] == [0.48, 0.22, 0.0, 0.0]
    assert [rate.conditional_frac for rate in rates] == [0.48, pytest.approx(220 / 480), 0.0, None]
    with pytest.raises(MeasurementError, match="no draft"):
        position_rates(0, [0, 0, 0])


def test_positions_add_up_over_rows_whatever_each_of_them_counted():
    rows = [{"drafts": 10, "per_position": [5, 2]}, {"drafts": 20, "per_position": [9, 4, 1]}, {"drafts": None, "per_position": None}]
    assert add_positions(rows) == (30, [14, 6, 1])


def test_the_acceptance_length_pools_counts_and_its_interval_is_over_rows():
    rows = [{"drafts": drafts, "accepted": accepted} for drafts, accepted in ((100, 80), (100, 90), (100, 100))]
    found = pooled_length(rows)
    # equal drafts: the t interval of the mean of 0.8, 0.9 and 1.0, whose deviation is 0.1
    assert found.length == pytest.approx(1.9) and (found.drafts, found.accepted) == (300, 270)
    assert found.interval == pytest.approx((1.9 - 4.302653 * 0.1 / 3**0.5, 1.9 + 4.302653 * 0.1 / 3**0.5), rel=1e-6)
    assert pooled_length(rows[:2]).interval is None
    assert pooled_length([{"drafts": 300, "accepted": 270}, {"drafts": 100, "accepted": 10}]).length == pytest.approx(1.7)
    assert pooled_length([{"drafts": None, "accepted": None}]) is None


@pytest.mark.parametrize(("successes", "trials"), [(48, 100), (0, 20), (20, 20), (1, 3)])
def test_wilson_interval_is_scipys(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(successes, trials)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-7)
    assert 0 <= low <= successes / trials <= high <= 1
