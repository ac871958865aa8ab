import math

import pytest

from raysd.sweep.lossless import Answer, Comparison, Difference, compare, counts, first_difference


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
