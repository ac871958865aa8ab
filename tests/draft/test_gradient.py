from __future__ import annotations

import threading
import time

import pytest
import torch

from raysd.draft.batch import pack
from raysd.draft.gradient import StepGradient, balanced
from raysd.draft.loss import counted_rows, unrolled_loss
from raysd.experiment.train import TrainSection
from tests.tiny_drafts import conversation, draft_and_target

CONVERSATIONS = [conversation(tokens, 5, seed=tokens) for tokens in (15, 40, 22, 9, 31)]
SECTION = TrainSection(conversations_per_step=5, ttt_steps=3, precision="float32")


def gradients_with(threads: int, section: TrainSection = SECTION) -> tuple[float, list[torch.Tensor]]:
    before = torch.get_num_threads()
    draft, head, token_to_draft = draft_and_target()
    try:
        with StepGradient(draft, head, token_to_draft, section, threads, min(threads, 5)) as step_gradient:
            return step_gradient(CONVERSATIONS, counted_rows(CONVERSATIONS, token_to_draft, 3)).loss, [parameter.grad for parameter in draft.parameters()]
    finally:
        torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_gradient_of_the_whole_step():
    draft, head, token_to_draft = draft_and_target()
    losses = unrolled_loss(draft, pack(CONVERSATIONS, 3), head, token_to_draft, SECTION, counted_rows(CONVERSATIONS, token_to_draft, 3))
    expected = torch.autograd.grad(losses.loss, list(draft.parameters()))
    for threads in (1, 2, 3, 8):
        loss, got = gradients_with(threads)
        torch.testing.assert_close(loss, float(losses.loss.detach()), rtol=1e-5, atol=1e-6)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_threads_give_the_same_bits_each_time():
    section = SECTION.model_copy(update={"precision": "bfloat16"})
    first, *more = (gradients_with(3, section)[1] for _ in range(20))
    assert all(torch.equal(one, other) for gradients in more for one, other in zip(first, gradients, strict=True))


def test_nothing_is_computed_by_two_threads_at_once_before_one_has_computed_all_of_it(monkeypatch: pytest.MonkeyPatch):
    """Torch's libraries choose their kernels at their first use: see StepGradient."""
    draft, head, token_to_draft = draft_and_target()
    part, at_work, most, guard = StepGradient._part, set(), [], threading.Lock()

    def watched(self: StepGradient, *arguments: object) -> object:
        with guard:
            at_work.add(threading.get_ident())
            most.append(len(at_work))
        time.sleep(0.05)  # long enough for another to begin, if it may
        try:
            return part(self, *arguments)
        finally:
            with guard:
                at_work.discard(threading.get_ident())

    monkeypatch.setattr(StepGradient, "_part", watched)
    before = torch.get_num_threads()
    try:
        with StepGradient(draft, head, token_to_draft, SECTION, 3, 3) as step_gradient:
            assert len(step_gradient._pool._threads) == 3  # all set up, too
            step_gradient(CONVERSATIONS, [90, 80, 70])
            first = max(most)
            step_gradient(CONVERSATIONS, [90, 80, 70])
    finally:
        torch.set_num_threads(before)
    assert first == 1 and max(most) > 1


def test_conversations_are_shared_out_by_length():
    assert balanced([10, 90, 40, 50, 10], 2) == [[1, 0], [3, 2, 4]]
    assert balanced([5], 4) == [[0]]
    assert sorted(sum(balanced(list(range(17)), 3), [])) == list(range(17))
