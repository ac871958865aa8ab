"""Against the rules as they are written in the papers, in float64 and one parameter at a time."""

from __future__ import annotations

import math

import pytest
import torch

from raysd.draft.optimiser import DraftOptimiser
from raysd.draft.schedule import lr_factor
from raysd.experiment.train import TrainSection
from tests.tiny_drafts import small_draft

STEPS = 6
NORM = 3.0
"""Of the gradient, over all parameters."""


def steps(section: TrainSection, seed: int = 0) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The draft's weights before, the gradients of each step, and the weights after, all in float64."""
    draft = small_draft()
    before = {name: weight.detach().double().clone() for name, weight in draft.named_parameters()}
    optimiser, generator, gradients = DraftOptimiser(draft, section), torch.Generator().manual_seed(seed), []
    for step in range(STEPS):
        drawn = {name: torch.randn(weight.shape, generator=generator) for name, weight in draft.named_parameters()}
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in drawn.values()))
        gradients.append({name: each * (NORM / norm) for name, each in drawn.items()})
        for name, weight in draft.named_parameters():
            weight.grad = gradients[-1][name].clone()
        assert optimiser.step(step) == pytest.approx(NORM, rel=1e-5)
        assert all(weight.grad is None for weight in draft.parameters())
    return before, [{name: each.double() for name, each in row.items()} for row in gradients], {name: weight.detach().double() for name, weight in draft.named_parameters()}


def adamw(weight: torch.Tensor, gradients: list[torch.Tensor], lrs: list[float], decay: float) -> torch.Tensor:
    """Decoupled weight decay (arXiv 1711.05101), betas 0.9 and 0.95, epsilon 1e-8."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, (gradient, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        weight = weight * (1 - lr * decay) - lr * (first / (1 - 0.9**number)) / ((second / (1 - 0.95**number)).sqrt() + 1e-8)
    return weight


def rates(section: TrainSection, peak: float) -> list[float]:
    return [peak * lr_factor(step, section.steps, section.warmup_frac, section.decay_frac) for step in range(STEPS)]


def test_adamw_decays_matrices_alone_and_follows_the_schedule_on_clipped_gradients():
    section = TrainSection(steps=STEPS, lr=1e-2, weight_decay=0.5, grad_clip=1.5, warmup_frac=0.4, decay_frac=0.5)
    before, gradients, after = steps(section)
    assert len(set(rates(section, section.lr))) > 3
    for name, weight in before.items():
        clipped = [row[name] * section.grad_clip / NORM for row in gradients]
        expected = adamw(weight, clipped, rates(section, section.lr), 0.5 if weight.ndim == 2 else 0.0)
        assert float((after[name] - expected).abs().max()) < 1e-6, name


def test_muon_has_the_inner_matrices_and_adamw_the_head_and_the_norms():
    section = TrainSection(steps=STEPS, lr=2e-2, adamw_lr=3e-3, optimiser="muon", weight_decay=0.1, grad_clip=10.0, warmup_frac=0.0, decay_frac=0.0)
    before, gradients, after = steps(section)
    for name, weight in before.items():
        rows = [row[name] for row in gradients]
        if weight.ndim == 2 and name != "lm_head.weight":
            expected, close = muon(weight, rows, section.lr, section.weight_decay), 0.1
        else:
            expected, close = adamw(weight, rows, rates(section, section.adamw_lr), 0.1 if weight.ndim == 2 else 0.0), 1e-3
        assert float((after[name] - expected).norm() / (expected - weight).norm()) < close, name


def muon(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Nesterov momentum 0.95, five Newton-Schulz steps to an orthogonal matrix, as large as AdamW's steps (arXiv 2502.16982, equation 4)."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        step = 0.95 * momentum + 0.05 * gradient
        wide = step if step.shape[0] <= step.shape[1] else step.T
        wide = wide / wide.norm()
        for _ in range(5):
            square = wide @ wide.T
            wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
        step = wide if step.shape[0] <= step.shape[1] else wide.T
        weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * step
    return weight


def test_a_gradient_that_is_no_number_takes_no_step():
    draft = small_draft()
    optimiser = DraftOptimiser(draft, TrainSection(lr=1e-2))
    before = [weight.detach().clone() for weight in draft.parameters()]
    for weight in draft.parameters():
        weight.grad = torch.ones_like(weight)
    draft.norm.weight.grad[0] = float("nan")
    assert math.isnan(optimiser.step(0)) and all(torch.equal(a, b) for a, b in zip(before, draft.parameters(), strict=True))
