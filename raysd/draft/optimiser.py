"""The optimiser of a draft: AdamW alone, or Muon for its inner matrices and AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch

from raysd.draft.model import Eagle3Draft
from raysd.draft.schedule import lr_factor
from raysd.experiment.train import TrainSection

BETAS = (0.9, 0.95)
"""AdamW's, as EAGLE-3's reference code has them."""


class DraftOptimiser:
    """Steps all parameters of a draft, with the learning rate of the step."""

    def __init__(self, draft: Eagle3Draft, section: TrainSection) -> None:
        self._section, self._parameters = section, list(draft.parameters())
        norms = [each for each in self._parameters if each.ndim < 2]
        head = [draft.lm_head.weight]
        inner = [each for each in self._parameters if each.ndim == 2 and each is not draft.lm_head.weight]
        decay = section.weight_decay
        if section.optimiser == "adamw":
            self._optimisers = [self._adamw([*inner, *head], norms, section.lr)]
        else:
            # `match_rms_adamw` scales a step with a matrix's longer side, so that one rate suits fc, attention and MLP (arXiv 2502.16982).
            muon = torch.optim.Muon(inner, lr=section.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            self._optimisers = [muon, self._adamw(head, norms, section.adamw_lr or section.lr)]
        self._peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in self._optimisers]

    def _adamw(self, decayed: list[torch.Tensor], undecayed: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        groups = [{"params": decayed, "weight_decay": self._section.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)

    def step(self, step: int) -> float:
        """Takes step number `step` (0-based) with the gradients that are set, clipped, and clears them. Returns their norm before clipping; if that is no
        number, no step was taken and the draft is as it was."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._section.grad_clip))
        if not math.isfinite(norm):
            return norm
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * self.factor(step)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return norm

    def factor(self, step: int) -> float:
        """Share of the peak learning rates at a step."""
        section = self._section
        return lr_factor(step, section.steps, section.warmup_frac, section.decay_frac)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self._optimisers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimiser, state in zip(self._optimisers, states, strict=True):
            optimiser.load_state_dict(state)
