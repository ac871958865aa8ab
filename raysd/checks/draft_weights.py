"""A finished draft's tensors: whether they are those that vLLM loads, in the shapes that config.json says, and whether its vocabulary is the target's.

vLLM 0.32 says nothing about a tensor that is absent from a draft, and drafts with what happened to be in memory; nor about a bias that it drops.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raysd.checks.draft_config import NAME_A_DRAFT, Family, count, head_size, reads_norm_before_fc, refuse, switch
from raysd.checks.draft_files import EXPONENT_BITS, WHOLE, StoredTensor
from raysd.target.shape import TargetShape

if TYPE_CHECKING:
    import numpy as np

UNREAD = ("t2d", "mask_hidden", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "rotary_pos_emb.inv_freq")
"""In the names of tensors that vLLM passes over, and a draft loses nothing. It passes over biases too, and a draft was trained with those."""
PASSED = ("fc.weight", "lm_head.weight", "embed_tokens.weight")
"""Beside the norms, what every proposal passes through; vLLM's norms multiply by their weights as they are."""
ANOTHER = "name an earlier checkpoint, or another draft"
BIASED = ("glm", "glm4", "glm4v_moe_text", "gpt_oss", "seed_oss")
"""Those of MODEL_TYPES with attention_bias = true where config.json does not say (transformers/models/*/configuration_*.py)."""


def check_shapes(folder: Path, config: dict[str, Any], family: Family, aux_count: int, target: TargetShape,
                 tensors: dict[str, StoredTensor]) -> None:
    """Raises ExperimentError for a tensor that is missing, has another shape than the config and the target say, or that vLLM has no place for.

    aux_count: how many hidden states `fc` reads; 0: there is no `fc`. tensors: what `read_tensors` gives.
    """
    last = f"layers.{count(folder, config, 'num_hidden_layers') - 1}.input_layernorm.weight"
    if last not in tensors:  # before a list is made of ever so many layers
        _refuse_without(folder, last)
    wanted = _layers(folder, config, family)
    width, rows = count(folder, config, "hidden_size"), _rows(folder, config, target)
    reads = count(folder, config, "target_hidden_size", width)
    if aux_count:
        wanted["fc.weight"] = [width, aux_count * reads]
        if config.get("fc_norm"):
            wanted |= {f"fc_norm.{index}.weight": [reads] for index in range(aux_count)}
        if family != "mla" and reads_norm_before_fc(config):
            wanted["input_norm.weight"] = [aux_count * reads]
    wanted["norm.weight"] = [width]
    if rows != target.vocab_size or width != target.hidden_size or "lm_head.weight" in tensors:  # otherwise vLLM shares the target's
        wanted["lm_head.weight"] = [rows, width]
    if width != target.hidden_size or "embed_tokens.weight" in tensors:
        wanted["embed_tokens.weight"] = [target.vocab_size, width]
    if rows != target.vocab_size or "d2t" in tensors:
        wanted["d2t"] = [rows]
    if "t2d" in tensors:
        wanted["t2d"] = [target.vocab_size]
    for name in (f"layers.{index}.hidden_norm.weight" for index in range(1, config["num_hidden_layers"])):
        if name in tensors:  # vLLM's later layers have one too, and make no use of it
            wanted[name] = [width]
    for name, shape in wanted.items():
        if name not in tensors:
            _refuse_without(folder, name)
        if tensors[name].shape != shape:
            refuse(folder, f"its {name.removesuffix('.weight')} is {tensors[name].shape}, not {shape}")
    scales = [f"{name}_scale" for name, shape in wanted.items() if len(shape) == 2] if config.get("quantization_config") else []
    known = {*wanted, *scales, *([] if aux_count else ["fc.weight"])}
    homeless = sorted(name for name in tensors if name not in known and not any(part in name for part in UNREAD))
    if homeless:
        refuse(folder, f"its weights hold {', '.join(homeless[:4])}, for which vLLM has no place in a draft of this config.json "
                       f"(num_hidden_layers = {config['num_hidden_layers']}, attention_bias = {config.get('attention_bias')})",
               f"correct config.json in a copy, if it does not say how the draft was trained, or {NAME_A_DRAFT}")


def _refuse_without(folder: Path, name: str) -> NoReturn:
    refuse(folder, f"its weights hold no {name}, and vLLM would draft without it",
           "say attention_bias = false (or mlp_bias, or bias) in a copy, if it was trained so" if name.endswith(".bias") else NAME_A_DRAFT)


def check_numbers(folder: Path, config: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
    """Raises ExperimentError for a tensor that holds NaN, an infinity, or anything but floating-point numbers of 16 bits or more, and for one of those that all
    proposals pass through, if it holds zeros alone.

    vLLM would copy int8 or FP8 as if it were those. In a quantized draft matrices may be FP8; its audit looks at them.
    """
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d") or (config.get("quantization_config") and tensor.dtype.startswith("F8_E4M3") and len(tensor.shape) == 2):
            continue
        if tensor.dtype not in EXPONENT_BITS:
            refuse(folder, f"its {name.removesuffix('.weight')} is of {tensor.dtype}, not of {', '.join(EXPONENT_BITS)}",
                   "name the draft as it was trained; `quantize:` makes the FP8 one")
        if not tensor.is_finite():
            refuse(folder, f"its {name.removesuffix('.weight')} holds NaN or infinite numbers", ANOTHER)
        if (name in PASSED or name.endswith("norm.weight") or name.startswith("fc_norm.")) and tensor.is_zero():
            refuse(folder, f"its {name.removesuffix('.weight')} holds nothing but zeros, with which no proposal depends on what it should", ANOTHER)


def check_vocabulary(folder: Path, target: TargetShape, tensors: dict[str, StoredTensor]) -> bool:
    """Whether the draft proposes every token of the target, token i at row i, though it holds a `d2t`, which vLLM 0.32 refuses beside a whole vocabulary.

    d2t: integers [rows], target token minus row. t2d: [target vocabulary], of any dtype, not zero for the target tokens of d2t.
    tensors: what `read_tensors` gives, of the right shapes. Raises ExperimentError if they are anything else.
    """
    import numpy as np  # late: `raysd plan` loads it only beside a finished draft

    if "d2t" not in tensors:
        return False
    if tensors["d2t"].dtype not in WHOLE:
        refuse(folder, f"its d2t is of {tensors['d2t'].dtype}, not of whole numbers",
               "write d2t in int64, as it was before the draft was cast: rounded, it leads to other tokens")
    offsets = tensors["d2t"].content.view(WHOLE[tensors["d2t"].dtype]).astype(np.int64)
    tokens = offsets + np.arange(len(offsets))
    if not _are_tokens(tokens, target):
        absolute = _are_tokens(offsets, target)
        refuse(folder, "its d2t holds the target's token ids, where vLLM expects offsets: token id minus row" if absolute
               else f"its d2t leads to tokens that do not ascend within the target's {target.vocab_size}",
               "write d2t as `token ids - arange(rows)`" if absolute else "correct the draft's d2t")
    if "t2d" in tensors:
        if len(tensors["t2d"].content) % target.vocab_size:
            refuse(folder, f"its t2d is of {tensors['t2d'].dtype}, of which a token has less than a byte", "write t2d as bool")
        marked = np.flatnonzero(tensors["t2d"].content.reshape(target.vocab_size, -1).any(axis=1))
        if not np.array_equal(marked, tokens):
            absolute = np.array_equal(marked, offsets)
            refuse(folder, "its d2t holds the target's token ids, where vLLM expects offsets: token id minus row" if absolute
                   else "its t2d marks other tokens than its d2t leads to",
                   "write d2t as `token ids - arange(rows)`, token ids where t2d is true, ascending")
    return len(offsets) == target.vocab_size


def _are_tokens(ids: np.ndarray, target: TargetShape) -> bool:
    return bool(len(ids) and ids[0] >= 0 and ids[-1] < target.vocab_size and (ids[1:] > ids[:-1]).all())


def _rows(folder: Path, config: dict[str, Any], target: TargetShape) -> int:
    rows = count(folder, config, "draft_vocab_size", target.vocab_size)
    if rows > target.vocab_size:
        refuse(folder, f"its draft_vocab_size is {rows}, above the target's {target.vocab_size}")
    return rows


def _layers(folder: Path, config: dict[str, Any], family: Family) -> dict[str, list[int]]:
    """Shapes of the decoder layers' weights, by plain name. Only the first reads the token's embedding beside the features."""
    width, inner = count(folder, config, "hidden_size"), count(folder, config, "intermediate_size")
    shapes: dict[str, list[int]] = {}
    for index in range(count(folder, config, "num_hidden_layers")):
        reads = 2 * width if index == 0 else width
        attention = _latent_attention(folder, config, reads, width) if family == "mla" else _attention(folder, config, family, reads, width)
        mlp = {"gate_proj": [inner, width], "up_proj": [inner, width], "down_proj": [width, inner]}
        shapes |= {f"layers.{index}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"layers.{index}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        for name in _biased(folder, config, family):
            shapes[f"layers.{index}.{'mlp' if name in mlp else 'self_attn'}.{name}.bias"] = (attention | mlp)[name][:1]
        norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if index == 0 else [])
        shapes |= {f"layers.{index}.{name}.weight": [width] for name in norms}
    return shapes


def _biased(folder: Path, config: dict[str, Any], family: Family) -> list[str]:
    """The projections for which vLLM makes a bias, in which stays what was in memory if the weights hold none.

    Sources: llama.py, llama_eagle3.py, qwen3_eagle3.py. deepseek_eagle3.py makes none, whatever the config says.
    """
    if family == "mla":
        return []
    attention = switch(folder, config, "attention_bias", config["model_type"] in BIASED)
    names = ["q_proj", "k_proj", "v_proj"] if attention else []
    if family == "llama" and (switch(folder, config, "bias") or attention):
        names.append("o_proj")
    if family == "llama" and switch(folder, config, "mlp_bias"):
        names += ["gate_proj", "up_proj", "down_proj"]
    return names


def _attention(folder: Path, config: dict[str, Any], family: Family, reads: int, width: int) -> dict[str, list[int]]:
    heads = count(folder, config, "num_attention_heads")
    head = head_size(folder, config, family)
    kv_heads = count(folder, config, "num_key_value_heads", 32 if family == "qwen3" else heads)  # the defaults of transformers' configs
    shapes = {"q_proj": [heads * head, reads], "k_proj": [kv_heads * head, reads], "v_proj": [kv_heads * head, reads], "o_proj": [width, heads * head]}
    return shapes | ({"q_norm": [head], "k_norm": [head]} if family == "qwen3" else {})


def _latent_attention(folder: Path, config: dict[str, Any], reads: int, width: int) -> dict[str, list[int]]:
    heads, rank = count(folder, config, "num_attention_heads"), count(folder, config, "kv_lora_rank")
    plain, rotated, value = (count(folder, config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes = {"kv_a_proj_with_mqa": [rank + rotated, reads], "kv_a_layernorm": [rank], "kv_b_proj": [heads * (plain + value), rank], "o_proj": [width, heads * value]}
    queries = count(folder, config, "q_lora_rank")
    return shapes | {"q_a_proj": [queries, reads], "q_a_layernorm": [queries], "q_b_proj": [heads * (plain + rotated), queries]}
