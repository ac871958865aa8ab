from __future__ import annotations

import pytest

from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import MeasurementError


def test_acceptance_length_counts_the_bonus_token():
    assert AcceptanceCounts(10, 30, 8, (5, 2, 1)).acceptance_length == 1.8


def test_counts_add_and_subtract_by_position():
    later, earlier = AcceptanceCounts(10, 30, 8, (5, 2, 1)), AcceptanceCounts(4, 12, 3, (3,))
    assert later - earlier == AcceptanceCounts(6, 18, 5, (2, 2, 1))
    assert (later - earlier) + earlier == AcceptanceCounts(10, 30, 8, (5, 2, 1))


def test_no_drafts_is_an_error_and_not_an_acceptance_of_one():
    with pytest.raises(MeasurementError, match="no draft was counted"):
        _ = AcceptanceCounts(0, 0, 0, ()).acceptance_length
