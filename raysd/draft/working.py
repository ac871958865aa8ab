"""The draft as its products read it in mixed precision: matrices rounded to bf16 once a step, where autocast would round them at every use."""

from __future__ import annotations

import torch
from torch import nn

from raysd.draft.model import Eagle3Draft


class WorkingCopy:
    """A draft whose matrices are in bf16, beside the one that is trained. Its vectors, which norms read in float32, are not rounded."""

    def __init__(self, draft: Eagle3Draft) -> None:
        with torch.random.fork_rng(devices=[]):  # the copy's own first weights are thrown away, and must not use up random numbers
            self.draft = Eagle3Draft(draft.shape, draft.embedding, draft.draft_to_target).to(draft.embedding.device)
        for module in self.draft.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2:
                    setattr(module, name, nn.Parameter(parameter.detach().to(torch.bfloat16)))

    @torch.no_grad()
    def follow(self, draft: Eagle3Draft) -> None:
        """Takes over the weights of the draft that is trained, rounded."""
        for mine, weights in zip(self.draft.parameters(), draft.parameters(), strict=True):
            mine.copy_(weights)
