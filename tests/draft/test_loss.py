from __future__ import annotations

import torch

from raysd.draft.batch import TargetHead, pack
from raysd.draft.loss import LK_ETA, Hits, RowsLoss, counted_rows, lk_hybrid, soft_cross_entropy, unrolled_loss
from raysd.draft.replay import proposals
from raysd.experiment.train import TrainSection
from tests.tiny_drafts import conversation, draft_and_target

SECTION = TrainSection(ttt_steps=2, ttt_decay=0.8)


def test_each_step_is_scored_against_the_targets_distribution_one_token_further_on():
    draft, head, token_to_draft = draft_and_target()
    c = conversation(15, 5, seed=3)
    got = unrolled_loss(draft, pack([c], 2), head, token_to_draft, SECTION, counted_rows([c], token_to_draft, 2))
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
    exact, rounded = (unrolled_loss(draft, pack(conversations, 2, row_bucket=bucket), head, token_to_draft, SECTION, counted) for bucket in (1, 64))
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
        loss = unrolled_loss(draft, batch, head, token_to_draft, SECTION, counted).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def wanted_and_logits(rows: int = 130) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """More rows than the loss takes at once, of a target a tenth of whose probability is outside of the draft's vocabulary; and the weights, some of them 0."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    probabilities = 0.9 * (2 * torch.randn(rows, 9, dtype=torch.float64, generator=generator)).softmax(-1)
    return logits, probabilities, torch.rand(rows, generator=generator) * (torch.arange(rows) % 3 > 0)


def check_against_autograd(kind, expected_of) -> None:
    logits, probabilities, weights = wanted_and_logits()
    probabilities = probabilities * (1.0 if kind is lk_hybrid else 1 / 0.9)
    ahead, rows = 3, len(weights)
    weights[-ahead:] = 0
    expected = (expected_of(logits[:rows - ahead], probabilities[ahead:]) * weights[:rows - ahead]).sum()
    (expected_gradient,) = torch.autograd.grad(2 * expected, logits)
    single = logits.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = RowsLoss.apply(kind, single, probabilities.float(), ahead, weights)
    (got_gradient,) = torch.autograd.grad(2 * got, single)
    torch.testing.assert_close(float(got.detach()), float(expected.detach()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)


def test_the_handwritten_gradient_of_the_cross_entropy_is_autograds():
    check_against_autograd(soft_cross_entropy, lambda logits, wanted: -(wanted * logits.log_softmax(-1)).sum(-1))


def test_the_lk_loss_is_the_blend_of_the_paper_and_its_gradient_is_autograds():
    def blend(logits, wanted):
        overlap = torch.minimum(logits.softmax(-1), wanted).sum(-1)
        weight = torch.exp(-LK_ETA * overlap).detach()
        return weight * -(wanted * logits.log_softmax(-1)).sum(-1) + (1 - weight) * (1 - overlap)

    check_against_autograd(lk_hybrid, blend)


def test_the_lk_loss_wants_probabilities_among_all_tokens():
    draft, head, _ = draft_and_target()
    whole_VH = torch.randn(96, 32, generator=torch.Generator().manual_seed(3))
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    among_all = TargetHead(torch.ones(32), whole_VH, 1e-5, draft.draft_to_target).probabilities(states)
    restricted = TargetHead(torch.ones(32), whole_VH[draft.draft_to_target], 1e-5).probabilities(states)
    torch.testing.assert_close(restricted.sum(-1), torch.ones(5))
    assert bool((among_all.sum(-1) < 1).all())
    torch.testing.assert_close(among_all / among_all.sum(-1, keepdim=True), restricted)


def test_hits_count_what_a_server_would_accept_from_every_row():
    draft, head, token_to_draft = draft_and_target()
    c = conversation(30, 5, seed=6)
    for row in range(4, 24, 2):  # make some proposals right: at the first step, at both, at the second alone
        own = proposals(draft, pack([c], 2), 2)
        for step in range(2):
            if row % (3 + step):
                c.token_ids[row + 2 + step] = int(own[step, row - 4])
    hits = unrolled_loss(draft, pack([c], 2), head, token_to_draft, SECTION, [20, 20], count_hits=True).hits
    # The second step is given the captured token; where the first is right, that is the draft's own, and the step is the roll-out's.
    first, second = (proposals(draft, pack([c], 2), 2) == pack([c], 2).ahead_SM[1:]) & pack([c], 2).known_SM[1:]
    known = pack([c], 2).known_SM[1:].sum(-1).tolist()
    assert hits.known == tuple(known) and hits.right[0] == hits.through[0] == int(first.sum()) > 0
    assert hits.reached == (known[0], int((first & pack([c], 2).known_SM[2]).sum())) and hits.through[1] == int((first & second).sum()) > 0


def test_figures_of_hits():
    figures = (Hits((10, 8), (6, 5), (10, 5), (6, 3)) + Hits((10, 8), (4, 3), (10, 3), (4, 1))).figures()
    assert figures == {"accuracy_1": 0.5, "conditional_1": 0.5, "cumulative_1": 0.5, "accuracy_2": 0.5, "conditional_2": 0.5, "cumulative_2": 0.25,
                       "simulated_acceptance_length": 1.75}
