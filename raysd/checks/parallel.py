"""Whether a model's sizes can be shared out by tensor parallelism, as vLLM does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from raysd.checks.attention import kind_of, text_part
from raysd.checks.kv_blocks import NotTold
from raysd.checks.model_bytes import count, expert_count, expert_width, grouped_heads

MLA_HEADS, LARGEST_PADDED = 16, 128
"""AITER's MLA kernels work on multiples of 16 query heads, and vLLM pads other counts, up to the second."""
PADS_DIVISORS, PADS_ALL = Version("0.20.0"), Version("0.32.0")
"""The first releases known to pad the divisors of 16, and every count. https://github.com/vllm-project/vllm/pull/39616 , /pull/51647"""


def uneven_heads(config: Mapping[str, Any], ranks: int) -> str | None:
    """Why the heads of a model cannot be shared by so many ranks; None: they can. Raises NotTold.

    Query heads are shared evenly; key heads are shared, or copied to several ranks, evenly. Latent attention has none of the latter.
    """
    text = text_part(config)
    heads = count(text, "num_attention_heads")
    if heads % ranks:
        return f"its {heads} query heads are no multiple of {ranks}"
    if kind_of(text) in ("latent", "latent_sparse"):
        return None
    kv_heads, _ = grouped_heads(text)
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        return f"its {kv_heads} key heads can be neither shared nor copied evenly by {ranks}"
    return None


def fitting_ranks(config: Mapping[str, Any], largest: int, *, expert_parallel: bool) -> list[int]:
    """Powers of two, up to the GPUs of a node, that share a model evenly. Raises NotTold."""
    counts = [2**power for power in range(largest.bit_length()) if 2**power <= largest]
    return [ranks for ranks in counts if uneven_heads(config, ranks) is None and uneven_width(config, ranks, expert_parallel=expert_parallel) is None]


def weight_block(config: Mapping[str, Any]) -> int | None:
    """Numbers that share a scale in a quantized weight's rows: no rank may hold a part of them. None: weights have no blocks. Raises NotTold for an unknown form."""
    quantization = config.get("quantization_config") or text_part(config).get("quantization_config")
    if not quantization:
        return None
    if quantization.get("weight_block_size"):
        return int(quantization["weight_block_size"][0])
    weight = (quantization.get("global_quant_config") or {}).get("weight")
    weight = weight[0] if isinstance(weight, list) and weight else weight
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    sizes = [part["group_size"] for part in (weight or {}, *groups) if isinstance(part.get("group_size"), int) and part["group_size"] > 0]
    return max(sizes) if sizes else None


def uneven_width(config: Mapping[str, Any], ranks: int, *, expert_parallel: bool) -> str | None:
    """Why the MLPs of a model cannot be shared by so many ranks; None: they can. Raises NotTold.

    expert_parallel: whole experts are given to ranks instead of a slice of each to all.
    """
    text, block = text_part(config), weight_block(config)
    widths = []
    if expert_count(text):
        if not expert_parallel:
            widths.append(("an expert's intermediate size", expert_width(text)))
        if text.get("first_k_dense_replace"):
            widths.append(("intermediate_size", count(text, "intermediate_size")))
    else:
        widths.append(("intermediate_size", count(text, "intermediate_size")))
    for name, width in widths:
        if width % ranks:
            return f"{name} is {width}, no multiple of {ranks}"
        if block is not None and width // ranks % block:
            return f"{name} is {width}: {width} / {ranks} = {width // ranks} is no multiple of {block}, the block that its quantized weights share a scale in"
    return None


def experts_left_over(config: Mapping[str, Any], ranks: int) -> int:
    """With expert parallelism, how many ranks hold an expert more than the others. Raises NotTold."""
    return expert_count(text_part(config)) % ranks


def tabled_aiter_heads(heads: int, vllm: Version) -> bool:
    """Whether AITER's MLA takes so many query heads of one rank, in a release that is not installed. Raises NotTold where it is not known which release has what."""
    release = Version(vllm.base_version)
    if heads % MLA_HEADS == 0 or (MLA_HEADS % heads == 0 and release >= PADS_DIVISORS):
        return True
    if heads > LARGEST_PADDED or release >= PADS_ALL:
        return heads <= LARGEST_PADDED
    if heads > MLA_HEADS and release < Version("0.24.0"):
        return False
    raise NotTold(f"whether AITER's MLA kernels take {heads} query heads of one rank in vLLM {vllm}")
