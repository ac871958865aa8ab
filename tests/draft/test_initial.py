from __future__ import annotations

import pytest
import torch

from raysd.draft.initial import initialise
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import draft_shape
from raysd.errors import ExperimentError
from raysd.experiment.draft import DraftSection
from raysd.target import read_shape
from raysd.target.weights import read_embedding_and_head, read_layer
from tests.tiny_models import tiny_deepseek, tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def latent_target(tmp_path_factory):
    return tiny_deepseek(tmp_path_factory.mktemp("latent"), layers=4)


def new_draft(target, method: str, **section) -> Eagle3Draft:
    shape = read_shape(target)
    embedding, norm, head = read_embedding_and_head(target, shape)
    torch.manual_seed(0)
    draft = Eagle3Draft(draft_shape(DraftSection(vocab_size=64, **({"aux_layers": [1, 2, 3]} | section)), shape), embedding, torch.arange(3, 67))
    initialise(draft, method, target, shape.layers - 1, norm, head)
    return draft


def test_a_draft_starts_as_the_targets_last_layer_on_its_last_aux_state(target):
    draft, layer = new_draft(target, "target"), read_layer(target, 3)
    aux = torch.randn(200, 3, 64)
    error = (draft.fc(aux.flatten(1)) - aux[:, -1]).norm() / aux[:, -1].norm()
    assert 0.01 < error < 0.2  # passed through, with a little noise that breaks the symmetry between aux layers
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(draft.midlayer["self_attn"], name).weight
        torch.testing.assert_close(weight[:, 64:], layer[f"self_attn.{name}"].float())
        assert 0.4 < float((weight[:, :64].std() / weight[:, 64:].std()).detach()) < 0.6
    torch.testing.assert_close(draft.midlayer["mlp"]["down_proj"].weight, layer["mlp.down_proj"].float())


@pytest.mark.parametrize("method", ["target", "random"])
def test_norm_and_head_are_the_targets_and_the_draft_is_not_sure_of_anything_yet(target, method):
    draft = new_draft(target, method)
    _, norm, head = read_embedding_and_head(target, read_shape(target))
    torch.testing.assert_close(draft.norm.weight, 0.3 * norm.float())
    torch.testing.assert_close(draft.lm_head.weight, head[3:67].float())


ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")


def test_latent_attention_starts_as_the_targets_and_an_mlp_beside_experts_at_random(latent_target):
    draft, other = new_draft(latent_target, "target"), new_draft(latent_target, "random")
    layer = read_layer(latent_target, 3, tuple(f"self_attn.{name}" for name in ATTENTION))
    for name in ATTENTION:
        weight = getattr(draft.midlayer["self_attn"], name).weight
        torch.testing.assert_close(weight[:, 64:] if "_a_proj" in name else weight, layer[f"self_attn.{name}"].float())
    for name, weight in draft.midlayer["mlp"].state_dict().items():
        torch.testing.assert_close(weight, other.midlayer["mlp"].state_dict()[name])


def test_a_dense_mlp_of_a_latent_target_is_taken(tmp_path):
    target = tiny_deepseek(tmp_path, layers=1)
    draft, layer = new_draft(target, "target", aux_layers=[0]), read_layer(target, 0, ("mlp.up_proj",))
    torch.testing.assert_close(draft.midlayer["mlp"]["up_proj"].weight, layer["mlp.up_proj"].float())


@pytest.mark.parametrize(("section", "named"), [({"head_dim": 16}, "q_proj"), ({"attention_heads": 1, "kv_heads": 1}, "q_proj"), ({"kv_heads": 1}, "k_proj")])
def test_a_layer_of_other_sizes_is_no_start_for_this_draft(target, section, named):
    with pytest.raises(ExperimentError, match=f"(?s)self_attn.{named}.*train.init: random") as caught:
        new_draft(target, "target", **section)
    assert caught.value.where == "train.init"
    new_draft(target, "random", **section)


def test_a_layer_of_another_kind_is_no_start_for_this_draft(latent_target):
    with pytest.raises(ExperimentError, match="(?s)q_proj.*train.init: random") as caught:
        new_draft(latent_target, "target", attention="grouped")
    assert caught.value.where == "train.init"
