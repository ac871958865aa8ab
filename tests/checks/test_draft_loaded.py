"""What a draft that fits is to vLLM: all of it reaches a parameter, and no parameter keeps what was in memory. So the check of the tensors agrees with vLLM's own loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysd.backends.cpu_engine import cpu_environment
from raysd.checks.draft_fit import check_draft_fit
from raysd.checks.draft_served import served_draft
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import (
    ATTENTION,
    CONFIG,
    HIDDEN,
    LATENT,
    LATENT_ATTENTION,
    ROWS,
    VOCAB,
    biases,
    cast,
    target_shape,
    tensors,
    without,
    write,
    write_bin,
)

BIG = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's CPU attention has no smaller heads."""
QWEN3 = CONFIG | BIG | {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_TENSORS = tensors(ATTENTION | {"q_norm": (32,), "k_norm": (32,)})


def random(made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {name: generator.standard_normal(value.shape).astype(np.float32) for name, value in made.items()}


OUTPUT = "midlayer.self_attn.o_proj.bias"
FIT: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "plain": (CONFIG | BIG, tensors()),
    "with_its_embedding": (CONFIG | BIG, tensors() | random({"embed_tokens.weight": np.zeros((VOCAB, HIDDEN))})),
    "eagle_3.1": (CONFIG | BIG | {"fc_norm": True}, tensors() | random({f"fc_norm.{index}.weight": np.zeros(HIDDEN) for index in range(3)})),
    "norm_before_fc": (CONFIG | BIG | {"norm_before_fc": True}, tensors() | random({"input_norm.weight": np.zeros(3 * HIDDEN)})),
    "attention_bias": (CONFIG | BIG | {"attention_bias": True}, tensors() | random(biases())),
    "all_biases": (CONFIG | BIG | {"attention_bias": True, "mlp_bias": True}, tensors() | random(biases(mlp=True))),
    "bias": (CONFIG | BIG | {"bias": True}, tensors() | random({OUTPUT: np.zeros(HIDDEN)})),
    "qwen3": (QWEN3, QWEN3_TENSORS),
    "qwen3_bias": (QWEN3 | {"attention_bias": True}, QWEN3_TENSORS | random(without(biases(), OUTPUT))),
    "mla": (CONFIG | LATENT, tensors(LATENT_ATTENTION)),
    "mla_attention_bias": (CONFIG | LATENT | {"attention_bias": True}, tensors(LATENT_ATTENTION)),
}
UNFIT: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "biases_untold": (CONFIG | BIG, tensors() | random(biases())),
    "norm_bias": (CONFIG | BIG, tensors() | random({"norm.bias": np.zeros(HIDDEN), "fc.bias": np.zeros(HIDDEN), "lm_head.bias": np.zeros(ROWS)})),
    "input_norm_untold": (CONFIG | BIG, tensors() | random({"input_norm.weight": np.zeros(3 * HIDDEN)})),
    "qwen3_output_bias": (QWEN3 | {"attention_bias": True, "mlp_bias": True}, QWEN3_TENSORS | random(biases(mlp=True))),
    "mla_bias": (CONFIG | LATENT | {"attention_bias": True}, tensors(LATENT_ATTENTION) | random({OUTPUT: np.zeros(HIDDEN)})),
    "no_biases": (CONFIG | BIG | {"attention_bias": True, "mlp_bias": True}, tensors()),
    "no_output_bias": (CONFIG | BIG | {"attention_bias": True}, tensors() | random(without(biases(), OUTPUT))),
    "gpt_oss": (CONFIG | BIG | {"model_type": "gpt_oss"}, tensors()),
}
UNTAKEN: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    **{name: (CONFIG | BIG | changes, tensors()) for name, changes in {
        "gelu": {"hidden_act": "gelu"}, "no_eps": {"rms_norm_eps": None}, "whole_eps": {"rms_norm_eps": 1}, "negative_length": {"max_position_embeddings": -5},
        "wordy_length": {"model_max_length": "x"}, "unknown_dtype": {"torch_dtype": "nonsense"}, "unknown_layers": {"layer_types": "x"},
        "no_window": {"layer_types": ["sliding_attention"]}, "null_bias": {"attention_bias": None}, "wordy_cache": {"use_cache": "false"}, "wordy_eos": {"eos_token_id": ["2"]},
        "compressed": {"compression_config": {"quant_method": "fp8"}}, "unknown_type": {"model_type": "nonsense"}, "predictor": {"model_type": "qwen3_next"},
        "gemma2": {"model_type": "gemma2"}, "nested": {"model_type": "qwen2_vl"}, "latent_type": {"model_type": "deepseek_v2"}}.items()},
    "odd_heads": (CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 3}, tensors()),
    "no_bottleneck": (CONFIG | LATENT | {"q_lora_rank": None}, without(tensors(LATENT_ATTENTION | {"q_proj": (48, 128)}), "midlayer.self_attn.q_a_proj.weight",
                                                                         "midlayer.self_attn.q_a_layernorm.weight", "midlayer.self_attn.q_b_proj.weight")),
}
"""What vLLM refuses, or dies of, once an engine starts."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `draft_loading` says of every draft: of one that fits, as it is served; of one that does not, as it is."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("drafts")
    target = target_shape(folder / "target", **BIG)
    drafts = [served_draft(write(folder / name, *case), target, None, folder / "served" / name) for name, case in FIT.items()]
    config, made = FIT["all_biases"]
    pickled = write_bin(folder / "pickled", config, cast({f"model.{name}": value for name, value in made.items()}, "float32", "fc.weight"))
    drafts += [served_draft(pickled, target, None, folder / "served" / "pickled"), *(write(folder / name, *case) for name, case in (UNFIT | UNTAKEN).items())]
    environment = cpu_environment({**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}, sorted(os.sched_getaffinity(0)), 1)
    done = subprocess.run([sys.executable, "-m", "tests.checks.draft_loading", str(folder / "target"), *map(str, drafts)], env=environment,
                          cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def written(made: dict[str, np.ndarray]) -> tuple[int, float]:
    weights = [value for name, value in made.items() if name not in ("d2t", "t2d")]
    return sum(value.size for value in weights), pytest.approx(sum(float(value.astype(np.float64).sum()) for value in weights), abs=1e-6)


@pytest.mark.parametrize("name", [*FIT, "pickled"])
def test_vllm_loads_all_of_a_draft_that_fits_and_leaves_nothing_as_it_was(results, name: str):
    made = FIT["all_biases" if name == "pickled" else name][1]
    found = results[name]
    assert found["empty"] == ([] if "embed_tokens.weight" in made else ["model.embed_tokens.weight"])  # it shares the target's
    assert (found["numbers"], found["sum"]) == written(made)


@pytest.mark.parametrize("name", UNFIT)
def test_vllm_says_nothing_of_what_it_drops_or_lacks_and_raysd_does(results, tmp_path: Path, name: str):
    config, made = UNFIT[name]
    with pytest.raises(ExperimentError, match="for which vLLM has no place|vLLM would draft without it"):
        check_draft_fit(write(tmp_path / "draft", config, made), target_shape(tmp_path / "target", **BIG))
    assert results[name]["empty"] != ["model.embed_tokens.weight"] or results[name]["numbers"] < written(made)[0]


@pytest.mark.parametrize("name", UNTAKEN)
def test_vllm_takes_no_draft_that_raysd_refuses_for_its_fields(results, tmp_path: Path, name: str):
    with pytest.raises(ExperimentError):
        check_draft_fit(write(tmp_path / "draft", *UNTAKEN[name]), target_shape(tmp_path / "target", **BIG))
    assert "error" in results[name], results[name]
