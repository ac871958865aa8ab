from __future__ import annotations

import dataclasses

import pytest
import torch

from raysd.errors import StageError
from raysd.hidden_states.verify import check_conversation, check_head, compare_with_reference
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


def test_a_few_tokens_whose_experts_differ_do_not_hide_agreement_and_many_do():
    torch.manual_seed(0)
    reference = torch.randn(20, 3, 32)
    captured = reference.clone()
    captured[3:6] = torch.randn(3, 3, 32)
    assert max(compare_with_reference(captured, reference, [1, 2, 3], "here").values()) == 0
    captured[3:12] = torch.randn(9, 3, 32)
    with pytest.raises(StageError, match="another convention"):
        compare_with_reference(captured, reference, [1, 2, 3], "here")


def greedy(tokens: int, prompt_tokens: int, norm, head, eps: float = 1e-5):
    """A conversation whose answer is the most likely token of each last state."""
    c = conversation(tokens, prompt_tokens)
    last = c.states_TLH[:, -1]
    best = ((last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + eps) * norm) @ head.T).argmax(-1)
    token_ids = c.token_ids.clone()
    token_ids[prompt_tokens:] = best[prompt_tokens - 1:]
    return dataclasses.replace(c, token_ids=token_ids)


def test_greedy_answers_follow_from_the_last_state_by_the_right_norm_and_head_alone():
    torch.manual_seed(0)
    norm, head = 1 + 0.5 * torch.randn(32), torch.randn(20_000, 32)
    c = greedy(60, 10, norm, head)
    assert check_head(c, norm, head, 1e-5) == 1
    rounded = dataclasses.replace(c, states_TLH=c.states_TLH.to(torch.bfloat16))
    assert check_head(rounded, norm.to(torch.bfloat16), head.to(torch.bfloat16), 1e-5) > 0.9
    for wrong in ((1 + norm, head), (norm, head.roll(1, 0)), (norm.roll(1), head)):
        with pytest.raises(StageError, match="by the target's norm and head"):
            check_head(c, *wrong, 1e-5)


def test_the_head_is_checked_on_the_answer_and_not_on_the_prompt():
    torch.manual_seed(0)
    norm, head = torch.ones(32), torch.randn(96, 32)
    c = greedy(60, 50, norm, head)
    c.token_ids[:50] = 0
    assert check_head(c, norm, head, 1e-5) == 1
    c.states_TLH[49, -1] = float("nan")
    c.states_TLH[52, -1] = float("nan")
    with pytest.raises(StageError, match="80% of the tokens"):
        check_head(c, norm, head, 1e-5)
