"""Drafts as other trainers leave them, with the tensors that vLLM loads and any numbers in them: what a check looks at is their shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from raysd.target.shape import TargetShape, read_shape

LAYERS, HIDDEN, VOCAB, ROWS = 8, 64, 256, 128
ENTERING, LEAVING = [2, 4, 5], [1, 3, 4]
"""The usual three layers of a target of eight, counted in either way."""
TOKENS = np.sort(np.random.default_rng(1).permutation(VOCAB)[:ROWS])
"""The target's tokens that the drafts propose."""
IDS = "eagle_aux_hidden_state_layer_ids"

TARGET = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
          "max_position_embeddings": 512, "rope_theta": 10000.0, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "draft_vocab_size": ROWS, IDS: ENTERING}
LATENT = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 12}
ATTENTION = {"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128), "o_proj": (64, 64)}
LATENT_ATTENTION = {"q_a_proj": (24, 128), "q_a_layernorm": (24,), "q_b_proj": (48, 24), "kv_a_proj_with_mqa": (20, 128), "kv_a_layernorm": (16,),
                    "kv_b_proj": (80, 16), "o_proj": (64, 48)}
SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": ROWS,
               "norm_before_residual": False, "speculators_config": {"algorithm": "eagle3"}, IDS: ENTERING,
               "transformer_layer_config": {name: CONFIG[name] for name in CONFIG if name not in ("architectures", "draft_vocab_size", IDS)}}


def tensors(attention: dict[str, tuple[int, ...]] = ATTENTION, layer: str = "midlayer", aux: int = 3) -> dict[str, np.ndarray]:
    """A draft's tensors under the names of SpecForge and raysd."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, aux * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (ROWS, HIDDEN)}
    shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in (("gate", (96, HIDDEN)), ("up", (96, HIDDEN)), ("down", (HIDDEN, 96)))}
    shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    generator = np.random.default_rng(0)
    made = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"d2t": TOKENS - np.arange(ROWS), "t2d": np.isin(np.arange(VOCAB), TOKENS)}


def biases(attention: dict[str, tuple[int, ...]] = ATTENTION, mlp: bool = False) -> dict[str, np.ndarray]:
    """A bias for each projection, of which vLLM has a place for the attention's with `attention_bias`, for the MLP's with `mlp_bias`."""
    rows = {f"self_attn.{name}": shape[0] for name, shape in attention.items()} | ({"mlp.gate_proj": 96, "mlp.up_proj": 96, "mlp.down_proj": HIDDEN} if mlp else {})
    return {f"midlayer.{name}.bias": np.ones(size, np.float32) for name, size in rows.items()}


def cast(made: dict[str, np.ndarray], dtype: str, *names: str) -> dict[str, Any]:
    """As torch tensors, those with the names, or all, in another of torch's dtypes."""
    import torch

    return {name: torch.from_numpy(value).to(getattr(torch, dtype)) if name in (names or made) else torch.from_numpy(value) for name, value in made.items()}


def write_bin(folder: Path, config: dict[str, Any], made: Any = None, name: str = "pytorch_model.bin") -> Path:
    """A draft in PyTorch's own format. made: anything that torch can save; None: the tensors."""
    import torch

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({name: torch.from_numpy(value) for name, value in tensors().items()} if made is None else made, folder / name)
    return folder


def write(folder: Path, config: dict[str, Any], made: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = tensors() if made is None else made
    if all(isinstance(value, np.ndarray) for value in made.values()):
        save_file(made, folder / "model.safetensors")
    else:
        from safetensors.torch import save_file as save_torch

        save_torch(made, folder / "model.safetensors")
    return folder


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def target_shape(folder: Path, **changes: Any) -> TargetShape:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    return read_shape(folder)
