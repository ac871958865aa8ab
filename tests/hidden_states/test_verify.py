from __future__ import annotations

import dataclasses

import pytest
import torch

from raysd.errors import StageError
from raysd.hidden_states.verify import check_conversation, compare_with_reference
from tests.tiny_drafts import conversation


def changed(states_change) -> object:
    c = conversation(12, 4)
    return dataclasses.replace(c, states_TLH=states_change(c.states_TLH.clone()))


def zero_slot(states):
    states[:, 2] = 0
    return states


def one_nan(states):
    states[3, 1, 5] = float("nan")
    return states


def test_states_as_they_should_be_pass():
    check_conversation(conversation(12, 4), 4, 32)


@pytest.mark.parametrize("change, message", [
    (zero_slot, "all zero"), (one_nan, "NaN or infinity"), (lambda s: s[:-1], "for 12 tokens"), (lambda s: s[:, :3], "not \\[11, 4, 32\\]")],
    ids=["zero", "nan", "token missing", "layer missing"])
def test_states_that_cannot_be_right_are_refused(change, message):
    with pytest.raises(StageError, match=message):
        check_conversation(changed(change), 4, 32)


def test_an_answer_without_tokens_is_refused():
    with pytest.raises(StageError, match="leave no answer"):
        check_conversation(conversation(12, 12), 4, 32)


def test_the_neighbouring_layer_is_told_from_rounding():
    torch.manual_seed(0)
    stream = torch.randn(20, 5, 32).cumsum(1)  # a residual stream: each layer adds to the one before
    right, off_by_one = stream[:, [1, 2, 3]], stream[:, [2, 3, 4]]
    errors = compare_with_reference(right.to(torch.bfloat16), right, [1, 2, 3], "here")
    assert max(errors.values()) < 0.01
    with pytest.raises(StageError, match="another convention"):
        compare_with_reference(off_by_one, right, [1, 2, 3], "here")
