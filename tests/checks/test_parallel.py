"""What tensor parallelism can share out."""

import pytest
from packaging.version import Version

from raysd.checks.kv_blocks import NotTold
from raysd.checks.parallel import experts_left_over, fitting_ranks, tabled_aiter_heads, uneven_heads, uneven_width, weight_block
from raysd.target.known import known_target, published
from tests.checks.test_model_bytes import KIMI, MINIMAX

LLAMA = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}


@pytest.mark.parametrize(("config", "ranks", "told"), [
    (LLAMA, 1, None), (LLAMA, 3, None), (LLAMA, 9, None), (LLAMA, 2, "9 query heads"),
    (LLAMA | {"num_attention_heads": 12}, 4, "3 key heads"),
    (LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 2}, 8, None),  # each key head is copied to four ranks
    (LLAMA | {"num_attention_heads": 8, "num_key_value_heads": None}, 8, None),
    ({"text_config": {"num_attention_heads": 64, "kv_lora_rank": 512, "num_key_value_heads": 3}}, 8, None),  # latent attention has no key heads to share
])
def test_heads_are_shared_or_copied_evenly(config: dict, ranks: int, told: str | None):
    found = uneven_heads(config, ranks)
    assert found is None if told is None else told in found


def test_minimax_is_shared_by_eight_only_with_whole_experts():
    config = known_target(MINIMAX).config
    assert weight_block(config) == 128
    assert "1536 / 8 = 192 is no multiple of 128" in uneven_width(config, 8, expert_parallel=False)
    assert uneven_width(config, 8, expert_parallel=True) is None
    assert fitting_ranks(config, 8, expert_parallel=False) == published()["minimax-m2.5"]["tensor_parallel_allowed"]
    assert fitting_ranks(config, 8, expert_parallel=True) == [1, 2, 4, 8]
    assert experts_left_over(config, 8) == 0 and experts_left_over(config, 6) == 4


def test_kimi_is_shared_by_any_power_of_two_of_a_node():
    config = known_target(KIMI).config
    assert weight_block(config) == 32
    assert fitting_ranks(config, 8, expert_parallel=False) == [1, 2, 4, 8]


@pytest.mark.parametrize(("config", "ranks", "told"), [
    (LLAMA, 8, None), (LLAMA, 5, "no multiple of 5"),
    (LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, 8, "192 is no multiple of 128"),
    (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, 8, None),
    (LLAMA | {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "group_size": None}}}}, 8, None),
])
def test_mlps_are_shared_in_whole_blocks(config: dict, ranks: int, told: str | None):
    found = uneven_width(config, ranks, expert_parallel=False)
    assert found is None if told is None else told in found


@pytest.mark.parametrize(("heads", "version", "taken"), [(16, "0.19.1", True), (8, "0.20.0", True), (8, "0.33.0", True), (64, "0.20.0", True), (24, "0.20.0", False),
                                                         (24, "0.33.0", True), (136, "0.33.0", False), (144, "0.33.0", True), (12, "0.32.0", True)])
def test_releases_pad_the_heads_of_aiter_mla(heads: int, version: str, taken: bool):
    assert tabled_aiter_heads(heads, Version(version)) is taken


@pytest.mark.parametrize(("heads", "version"), [(24, "0.27.1"), (12, "0.20.0"), (8, "0.19.1")])
def test_where_releases_differ_unknown_is_unknown(heads: int, version: str):
    with pytest.raises(NotTold, match=f"{heads} query heads"):
        tabled_aiter_heads(heads, Version(version))


def test_the_installed_vllm_pads_as_the_table_says():
    pytest.importorskip("vllm")
    from raysd.backends.vllm_probe import InstalledVllm

    vllm = InstalledVllm()
    for heads in (1, 2, 8, 12, 16, 24, 64, 100, 128, 130, 144):
        assert vllm.aiter_mla_takes_heads(heads) == tabled_aiter_heads(heads, Version(vllm.version)), heads
