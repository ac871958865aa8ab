"""Where the draft's weights start."""

from __future__ import annotations

import torch

from raysd.draft.model import Eagle3Draft

NORM = 0.3
"""Scale of the target's norm before the head. Nothing has been learned yet, and at the target's own scale the draft is surer of what is wrong: on the demo 23 nat a
token at the first step instead of 16, where guessing is 8, and learning that takes the first tenth of the steps."""


def initialise(draft: Eagle3Draft, norm_H: torch.Tensor, head_VH: torch.Tensor) -> None:
    """Sets norm and head, in place: the target's, the norm smaller by NORM and of the head (the target's whole) the rows of the draft's vocabulary.

    All else stays as torch starts it. A decoder layer that starts as the target's last, with `fc` passing the last aux layer through, learns no better: on the
    demo, with three seeds, replayed acceptance lengths of 2.05, 2.06 and 2.01, where these starts gave 2.09, 2.09 and 2.05.
    """
    with torch.no_grad():
        draft.norm.weight.copy_(norm_H).mul_(NORM)
        draft.lm_head.weight.copy_(head_VH[draft.draft_to_target.to(head_VH.device)])
