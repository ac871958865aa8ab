"""What one GPU of an engine holds."""

from raysd.checks.memory import size_gpu
from raysd.checks.model_bytes import draft_bytes, target_bytes
from raysd.hardware.catalogue import find_machine
from raysd.target.known import known_target
from tests.checks.test_model_bytes import KIMI, MINIMAX, published_draft

MI355X = find_machine("mi355x").memory_bytes


def sizing(model: str, name: str, ranks: int, draft_ranks: int, kv_dtype: str = "fp8", draft_kv_dtype: str = "auto"):
    known = known_target(model)
    target = target_bytes(known.config, "bfloat16", kv_dtype, known.weight_bytes)
    draft = draft_bytes(published_draft(name), known.config, "bfloat16", draft_kv_dtype)
    return size_gpu(MI355X, 0.9, ranks, target, draft, draft_ranks, known.config["hidden_size"])


def test_kimi_fits_four_gpus_of_an_mi355x_node_and_not_two():
    four, two = (sizing(KIMI, "kimi-k2.5", ranks, 1) for ranks in (4, 2))
    assert four.kv_tokens > 1_000_000 and four.sequences(9472) > 64
    assert two.kv_bytes < 0 and two.kv_tokens == 0


def test_minimax_fits_one_gpu():
    assert sizing(MINIMAX, "minimax-m2.5", 1, 1).kv_tokens > 0
    assert sizing(MINIMAX, "minimax-m2.5", 4, 1).kv_tokens > 1_000_000


def test_an_unshared_draft_of_many_heads_nearly_doubles_the_cache_of_a_target_with_latent_attention():
    whole, shared = (sizing(KIMI, "kimi-k2.5", 4, draft_ranks) for draft_ranks in (1, 4))
    assert whole.draft_kv_per_token / whole.target_kv_per_token > 0.9
    assert shared.draft_kv_per_token == whole.draft_kv_per_token / 4
    assert shared.kv_tokens > 1.5 * whole.kv_tokens
    assert whole.draft_weights > 3 * shared.draft_weights  # but for fc, which every rank holds


def test_the_parts_add_up_to_what_the_engine_may_take():
    found = sizing(KIMI, "kimi-k2.5", 4, 1)
    assert found.budget == int(MI355X * 0.9)
    assert found.target_weights + found.draft_weights + found.allowance + found.kv_bytes == found.budget
    assert found.kv_tokens * (found.target_kv_per_token + found.draft_kv_per_token) <= found.kv_bytes
