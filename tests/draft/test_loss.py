from __future__ import annotations

import torch

from raysd.draft.batch import pack
from raysd.draft.loss import SoftCrossEntropy, counted_rows, unrolled_loss
from tests.tiny_drafts import conversation, draft_and_target


def test_each_step_is_scored_against_the_targets_distribution_one_token_further_on():
    draft, head, token_to_draft = draft_and_target()
    c = conversation(15, 5, seed=3)
    got = unrolled_loss(draft, pack([c], 2), head, token_to_draft, 2, 0.8, counted_rows([c], token_to_draft, 2))
    with torch.no_grad():
        batch = pack([c], 2)
        normed0, unrolling = draft.first(batch.rows)
        normed1, _ = draft.next(batch.rows, unrolling, c.token_ids[6:15])
        expected = []
        for step, normed in enumerate((normed0, normed1)):
            losses = []
            for i, t in enumerate(range(4, 13)):
                if t + 2 + step > 14 or token_to_draft[c.token_ids[t + 2 + step]] < 0:
                    continue
                state = c.states_TLH[t + 1 + step, -1]
                wanted = (head.head_VH @ (state / (state.pow(2).mean() + 1e-5).sqrt())).softmax(-1)
                losses.append(-(wanted * draft.lm_head(normed[i]).log_softmax(-1)).sum())
            expected.append(float(torch.stack(losses).mean()))
    torch.testing.assert_close(torch.tensor(got.per_step), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(float(got.loss.detach()), expected[0] + 0.8 * expected[1], rtol=1e-4, atol=1e-5)


def test_rows_that_only_round_a_batch_up_change_nothing():
    draft, head, token_to_draft = draft_and_target()
    conversations = [conversation(15, 5, seed=3), conversation(22, 4, seed=4)]
    counted = counted_rows(conversations, token_to_draft, 2)
    exact, rounded = (unrolled_loss(draft, pack(conversations, 2, row_bucket=bucket), head, token_to_draft, 2, 0.8, counted) for bucket in (1, 64))
    batch = pack(conversations, 2, row_bucket=64)
    assert len(batch.rows.tokens_N) % 64 == 0 and batch.ahead_SM.shape[1] % 64 == 0
    torch.testing.assert_close(rounded.loss, exact.loss)
    gradients = [torch.autograd.grad(losses.loss, list(draft.parameters())) for losses in (exact, rounded)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_falls_when_a_draft_is_fitted_to_one_conversation():
    draft, head, token_to_draft = draft_and_target()
    c = conversation(40, 5, seed=5)
    batch, counted = pack([c], 2), counted_rows([c], token_to_draft, 2)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = unrolled_loss(draft, batch, head, token_to_draft, 2, 0.8, counted).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_the_handwritten_gradient_is_autograds():
    torch.manual_seed(1)
    logits, wanted = torch.randn(6, 9, dtype=torch.float64, requires_grad=True), torch.rand(6, 9, dtype=torch.float64).softmax(-1)
    weights = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.0])
    expected = -((wanted * logits.log_softmax(-1)).sum(-1) * weights).sum()
    (expected_gradient,) = torch.autograd.grad(2 * expected, logits)
    with torch.autocast("cpu", torch.bfloat16):
        got = SoftCrossEntropy.apply(logits.float(), wanted.float(), weights)
    single = logits.detach().float().requires_grad_()
    (got_gradient,) = torch.autograd.grad(2 * SoftCrossEntropy.apply(single, wanted.float(), weights), single)
    torch.testing.assert_close(float(got.detach()), float(expected.detach()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)
