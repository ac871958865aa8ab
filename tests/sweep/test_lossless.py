import math

import numpy as np
import pytest

from raysd.errors import MeasurementError
from raysd.sweep.lossless import Answer, Comparison, Difference, compare, counts, distribution_p_value, first_difference


def answer(*token_ids: int, reason: str = "length") -> Answer:
    return Answer("p", token_ids, reason)


def never(*asked):
    pytest.fail("the target is asked only where answers part")


def test_equal_answers_need_no_question():
    assert compare(answer(1, 2), answer(1, 2), [9], 0.25, never) == Comparison("p", "equal")


@pytest.mark.parametrize(("gap_nat", "verdict"), [(0.0, "near_tie"), (0.25, "near_tie"), (0.2501, "broken"), (math.inf, "broken"), (math.nan, "broken")])
def test_the_target_decides_at_the_first_different_token(gap_nat, verdict):
    asked = []

    def gap(*arguments):
        asked.append(arguments)
        return gap_nat

    comparison = compare(answer(1, 2, 3, 7), answer(1, 2, 4, 8), [9, 8], 0.25, gap)
    assert (comparison.verdict, comparison.difference) == (verdict, Difference(2, 3, 4))
    assert asked == [([9, 8, 1, 2], 3, 4)]


def test_an_end_token_against_another_token_is_a_difference_like_any_other():
    comparison = compare(answer(1, 2, 0, reason="stop"), answer(1, 2, 3, 4), [9], 0.25, lambda *asked: 0.1)
    assert (comparison.verdict, comparison.difference) == ("near_tie", Difference(2, 0, 3))


def test_an_answer_that_just_ends_is_broken():
    assert first_difference(answer(1, 2, 3), answer(1, 2)) == Difference(2, 3, None)
    assert compare(answer(1, 2, 3), answer(1, 2), [9], 0.25, never).verdict == "broken"
    assert compare(answer(), answer(1), [9], 0.25, never).verdict == "broken"


def test_verdicts_are_counted():
    assert counts([Comparison("a", "equal"), Comparison("b", "broken"), Comparison("c", "equal")]) == {"equal": 2, "near_tie": 0, "broken": 1}


def draws(probabilities, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).choice(len(probabilities), size=count, p=probabilities).tolist()


TALL = np.array([2.0**-rank for rank in range(1, 40)]) / sum(2.0**-rank for rank in range(1, 40))
"""Few likely tokens and many that come up once or never, as a model's are."""


@pytest.mark.parametrize("sizes", [(400, 400), (2000, 300)])
def test_samples_of_one_distribution_are_called_different_as_rarely_as_the_level_says(sizes):
    p_values = [distribution_p_value(draws(TALL, sizes[0], 2 * seed), draws(TALL, sizes[1], 2 * seed + 1)) for seed in range(400)]
    below = sum(p < 0.05 for p in p_values)
    assert 6 <= below <= 38, below  # 20 are expected; four standard deviations are 17
    assert 0.4 < np.median(p_values) < 0.6


def test_a_sampler_that_is_a_little_too_sharp_is_found():
    sharper = TALL**1.25 / sum(TALL**1.25)
    assert distribution_p_value(draws(TALL, 2000, 1), draws(sharper, 2000, 2)) < 1e-4


def test_a_difference_in_rare_tokens_together_is_found():
    rare = np.array([0.9] + [0.1 / 1000] * 1000)
    none, arm = draws(rare, 2000, 1), draws(np.array([0.97] + [0.03 / 1000] * 1000), 2000, 2)
    assert distribution_p_value(none, arm) < 1e-4
    assert distribution_p_value(none, draws(rare, 2000, 3)) > 1e-3


def test_outcomes_may_be_whole_answers_and_a_single_one_is_no_difference():
    assert distribution_p_value([(1, 2)] * 50, [(1, 2)] * 60) == 1.0
    assert distribution_p_value([(1, 2)] * 50, [(1, 3)] * 50) < 1e-9


def test_too_few_answers_are_no_agreement():
    with pytest.raises(MeasurementError, match="9 and 100 answers are too few"):
        distribution_p_value([1] * 9, [1] * 100)
