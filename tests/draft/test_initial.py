from __future__ import annotations

import torch

from raysd.draft.initial import initialise
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import draft_shape
from raysd.experiment.draft import DraftSection
from raysd.target import read_shape
from raysd.target.weights import read_embedding_and_head
from tests.tiny_models import tiny_llama


def test_norm_and_head_are_the_targets_and_the_draft_is_not_sure_of_anything_yet(tmp_path):
    target = tiny_llama(tmp_path)
    shape = read_shape(target)
    embedding, norm, head = read_embedding_and_head(target, shape)
    draft = Eagle3Draft(draft_shape(DraftSection(vocab_size=64, aux_layers=[1, 2, 3]), shape), embedding, torch.arange(3, 67))
    initialise(draft, norm, head)
    torch.testing.assert_close(draft.norm.weight, 0.3 * norm.float())
    torch.testing.assert_close(draft.lm_head.weight, head[3:67].float())
