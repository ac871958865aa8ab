"""Bytes of a model's weights and of its KV cache, from its config.json: whole, and as tensor parallelism shares them out."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysd.checks.attention import kind_of, text_part
from raysd.checks.kv_blocks import NotTold

DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "auto": 2.0}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
IN_FRONT = re.compile(r"^(language_model\.)?(model\.)?(layers\.\d+\.)?")
"""Of a module's whole name, what says where it stands."""
FP4_GROUP = 32
"""Numbers that share a scale byte in MXFP4 (OCP microscaling formats, 1.0)."""


@dataclass(frozen=True)
class Part:
    """Some weights of a model that are stored alike."""

    modules: tuple[str, ...]
    """Of a layer's modules, as checkpoints name them; empty: never quantized."""
    parameters: int
    sharded: bool = True
    """Whether tensor parallelism shares it out; if not, every rank holds it whole."""


@dataclass(frozen=True)
class ModelBytes:
    """What a model takes. Divided among ranks, a part that does not divide evenly is rounded up."""

    weights: int
    """All of them, once."""
    replicated: int
    """Of these, what every rank holds whole."""
    kv_per_token: int
    """KV cache of a token, of all layers and heads."""
    kv_shards: int
    """Into how many parts the KV cache of a token can be shared: key heads, and 1 for latent attention, which every rank holds whole."""

    def weights_of_rank(self, ranks: int) -> int:
        """Weights on each of so many devices."""
        return -(-(self.weights - self.replicated) // ranks) + self.replicated

    def kv_of_rank(self, ranks: int) -> int:
        """KV cache of a token on each of so many devices; more devices than key heads hold copies."""
        return -(-self.kv_per_token // min(ranks, self.kv_shards))


def target_bytes(config: Mapping[str, Any], dtype: str, kv_dtype: str, stored: int | None = None) -> ModelBytes:
    """Of a target. stored: bytes of its weight files where they are known; otherwise they are counted from the config. Raises NotTold for what the config does not tell.

    dtype: of what is not quantized. kv_dtype: vLLM's `kv-cache-dtype`. Counted is the text part: a vision tower is not.
    """
    text = text_part(config)
    parts = target_parts(text)
    element = element_bytes(config.get("quantization_config") or text.get("quantization_config"), dtype)
    weights = stored if stored is not None else sum(_bytes(part, element, dtype) for part in parts)
    replicated = sum(_bytes(part, element, dtype) for part in parts if not part.sharded)
    extra = _latent_copies(text, dtype)
    return ModelBytes(weights + extra, replicated, *_kv(text, count(text, "num_hidden_layers"), kv_dtype, dtype))


def draft_bytes(config: Mapping[str, Any], target: Mapping[str, Any], dtype: str, kv_dtype: str, stored: int | None = None, own_embedding: bool = True) -> ModelBytes:
    """Of an Eagle3 draft. own_embedding: whether it brings the target's embedding along; vLLM shares the target's if it does not. Raises NotTold."""
    parts = draft_parts(config, text_part(target), own_embedding)
    element = element_bytes(config.get("quantization_config"), dtype)
    weights = stored if stored is not None else sum(_bytes(part, element, dtype) for part in parts)
    replicated = sum(_bytes(part, element, dtype) for part in parts if not part.sharded)
    return ModelBytes(weights + _latent_copies(config, dtype), replicated, *_kv(config, count(config, "num_hidden_layers", 1), kv_dtype, dtype))


def target_parts(text: Mapping[str, Any]) -> list[Part]:
    """The weights of a decoder-only model with gated MLPs, from its config. Raises NotTold for a layout that has others."""
    _refuse_other_layers(text)
    layers, hidden, vocab = (count(text, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    parts = [Part((), vocab * hidden), Part((), layers * 2 * hidden, sharded=False)]
    if not text.get("tie_word_embeddings"):
        parts.append(Part(("lm_head",), vocab * hidden))
    parts += [Part(part.modules, part.parameters * layers, part.sharded) for part in attention_parts(text, hidden)]
    experts = expert_count(text)
    if not experts:
        return [*parts, _mlp(hidden * layers, count(text, "intermediate_size"))]
    width, dense = expert_width(text), count(text, "first_k_dense_replace", 0)
    sparse = layers - dense
    parts.append(_mlp(hidden * sparse * experts, width, "mlp.experts.1."))
    parts.append(Part((), sparse * hidden * experts, sharded=False))  # the router
    if dense:
        parts.append(_mlp(hidden * dense, count(text, "intermediate_size")))
    shared = count(text, "shared_expert_intermediate_size", width * count(text, "n_shared_experts", 0))
    return [*parts, _mlp(hidden * sparse, shared, "mlp.shared_experts.")] if shared else parts


def draft_parts(config: Mapping[str, Any], target: Mapping[str, Any], own_embedding: bool) -> list[Part]:
    """The weights of an Eagle3 draft of one layer (vllm/model_executor/models/llama_eagle3.py, deepseek_eagle3.py)."""
    hidden, vocab = count(config, "hidden_size"), count(config, "vocab_size")
    reads = count(config, "target_hidden_size", count(target, "hidden_size"))
    named = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    aux = count(config, "num_aux_hidden_states", len(named) if named else 3)
    parts = [Part(("fc",), aux * reads * hidden, sharded=False), Part(("lm_head",), count(config, "draft_vocab_size", vocab) * hidden),
             Part((), 4 * hidden, sharded=False), *attention_parts(config, 2 * hidden, hidden), _mlp(hidden, count(config, "intermediate_size"))]
    return [*parts, Part((), vocab * hidden)] if own_embedding else parts


def attention_parts(text: Mapping[str, Any], reads: int, writes: int | None = None) -> list[Part]:
    """One layer's attention. reads, writes: width of what comes in (of a draft two vectors beside each other) and goes out."""
    heads, writes = count(text, "num_attention_heads"), writes or reads
    if kind_of(text) in ("latent", "latent_sparse"):
        kv_rank, nope, rope, v = (count(text, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries = heads * (nope + rope)
        if text.get("q_lora_rank") is None:
            asking = [Part(("self_attn.q_proj",), reads * queries)]
        else:
            q_rank = count(text, "q_lora_rank")
            asking = [Part(("self_attn.q_a_proj",), reads * q_rank, sharded=False), Part(("self_attn.q_b_proj",), q_rank * queries)]
        return [*asking, Part(("self_attn.kv_a_proj_with_mqa",), reads * (kv_rank + rope), sharded=False),
                Part(("self_attn.kv_b_proj",), kv_rank * heads * (nope + v)), Part(("self_attn.o_proj",), heads * v * writes)]
    kv_heads, head_dim = grouped_heads(text)
    return [Part(tuple(f"self_attn.{name}_proj" for name in "qkv"), reads * (heads + 2 * kv_heads) * head_dim), Part(("self_attn.o_proj",), heads * head_dim * writes)]


def grouped_heads(text: Mapping[str, Any]) -> tuple[int, int]:
    """Key heads, and the size of one. Raises NotTold if the config leaves open what its model type's class takes for it."""
    heads = count(text, "num_attention_heads")
    if text.get("num_key_value_heads") is None and text.get("model_type") not in (None, "llama"):
        raise NotTold(f"num_key_value_heads: the config of model_type {text['model_type']!r} does not say")
    return count(text, "num_key_value_heads", heads), count(text, "head_dim", count(text, "hidden_size") // heads)


def expert_count(text: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0: none."""
    return next((count(text, name) for name in EXPERTS if text.get(name)), 0)


def expert_width(text: Mapping[str, Any]) -> int:
    """Width of one expert's MLP: where only one width is named, it is the experts' (MiniMax-M2, Mixtral)."""
    return count(text, "moe_intermediate_size", count(text, "intermediate_size"))


def element_bytes(quantization: Mapping[str, Any] | None, dtype: str) -> Callable[[str], float]:
    """How many bytes a number takes, as a function of its module's name. Raises NotTold for a quantization that is not known here."""
    if dtype not in DTYPE_BYTES:
        raise NotTold(f"bytes of the dtype {dtype!r}")
    plain = DTYPE_BYTES[dtype]
    if not quantization:
        return lambda module: plain
    method = quantization.get("quant_method")
    quantized, left = {"fp8": _fp8, "quark": _quark, "compressed-tensors": _compressed, "mxfp4": _mxfp4, "gptq": _integers, "awq": _integers}.get(
        str(method), _unknown)(quantization)
    return lambda module: plain if is_left(module, left) else quantized


def is_left(module: str, patterns: Sequence[str]) -> bool:
    """Whether a module of a layer, or the head, is excluded from quantization: by an expression after `re:`, a wildcard, or its name or a whole part of it. Who excludes
    one layer's is taken to exclude every layer's."""
    name = f"model.layers.1.{module}" if "." in module else module

    def excludes(pattern: str) -> bool:
        if pattern.startswith("re:"):
            return any(re.match(pattern[3:], f"{front}{name}") for front in ("", "language_model."))
        return fnmatch.fnmatch(name, pattern) or IN_FRONT.sub("", pattern) in _names(module)

    return any(excludes(pattern) for pattern in patterns)


def kv_element_bytes(kv_dtype: str, dtype: str) -> float:
    """Bytes of one number of the cache. Raises NotTold."""
    if kv_dtype.startswith("fp8") and kv_dtype != "fp8_ds_mla":  # the latter carries scales beside it
        return 1.0
    wanted = dtype if kv_dtype == "auto" else kv_dtype
    if wanted not in DTYPE_BYTES:
        raise NotTold(f"bytes of a number of a KV cache of {kv_dtype!r}")
    return DTYPE_BYTES[wanted]


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size in a config. Raises NotTold if it is absent, and has no default, or is no count."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 0:
        raise NotTold(f"{name}: the config says {config.get(name)!r:.60}")
    return value


def _kv(text: Mapping[str, Any], layers: int, kv_dtype: str, dtype: str) -> tuple[int, int]:
    """Bytes of a token, and into how many parts they can be shared."""
    _refuse_other_layers(text)
    element = kv_element_bytes(kv_dtype, dtype)
    kind = kind_of(text)
    if kind == "latent":
        return round(layers * (count(text, "kv_lora_rank") + count(text, "qk_rope_head_dim")) * element), 1
    if kind != "grouped":
        raise NotTold("the KV cache of sparse attention, which holds an index beside keys and values")
    kv_heads, head_dim = grouped_heads(text)
    return round(layers * 2 * kv_heads * head_dim * element), kv_heads


def _latent_copies(text: Mapping[str, Any], dtype: str) -> int:
    """vLLM keeps kv_b_proj once more, unquantized and turned for decoding (W_UK_T and W_UV, vllm/model_executor/layers/attention/mla_attention.py)."""
    if kind_of(text) not in ("latent", "latent_sparse"):
        return 0
    rank, heads, nope, v = (count(text, name) for name in ("kv_lora_rank", "num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    return round(count(text, "num_hidden_layers", 1) * rank * heads * (nope + v) * DTYPE_BYTES[dtype])


def _refuse_other_layers(text: Mapping[str, Any]) -> None:
    kinds = {str(kind) for kind in text.get("layer_types") or ()} - {"full_attention"}
    if kinds:
        raise NotTold(f"weights and KV cache of layers of {', '.join(sorted(kinds))}")


def _mlp(rows: int, width: int, place: str = "mlp.") -> Part:
    return Part(tuple(f"{place}{name}_proj" for name in ("gate", "up", "down")), 3 * rows * width)


def _bytes(part: Part, element: Callable[[str], float], dtype: str) -> int:
    return round(part.parameters * (max(element(module) for module in part.modules) if part.modules else DTYPE_BYTES[dtype]))


def _names(module: str) -> set[str]:
    """A module's name and every whole part of it, in front and behind: `self_attn.q_proj`, `self_attn`, `q_proj`."""
    pieces = module.split(".")
    return {".".join(pieces[start:end]) for start in range(len(pieces)) for end in range(start + 1, len(pieces) + 1)}


def _fp8(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    block = quantization.get("weight_block_size")
    scales = 4 / (block[0] * block[1]) if block else 0.0
    return 1 + scales, [*(quantization.get("modules_to_not_convert") or []), *(quantization.get("ignored_layers") or []), "lm_head"]


def _mxfp4(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    return 0.5 + 1 / FP4_GROUP, [*(quantization.get("modules_to_not_convert") or []), "lm_head"]


def _quark(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    weight = (quantization.get("global_quant_config") or {}).get("weight")
    weight = weight[0] if isinstance(weight, list) and weight else weight
    kind = str((weight or {}).get("dtype"))
    left = [str(pattern) for pattern in quantization.get("exclude") or []]
    if kind == "fp4":
        return 0.5 + 1 / (weight.get("group_size") or FP4_GROUP), left
    if kind.startswith("fp8"):
        return 1.0, left
    raise NotTold(f"bytes of weights that Quark has quantized to {kind!r}")


def _compressed(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    sizes = {(weights.get("num_bits"), weights.get("group_size")) for weights in groups}
    if len(sizes) != 1 or not isinstance(bits := next(iter(sizes))[0], int):
        raise NotTold("bytes of weights of several quantizations (compressed-tensors)")
    group = next(iter(sizes))[1]
    return bits / 8 + (2 / group if group else 0.0), [str(pattern) for pattern in quantization.get("ignore") or []]


def _integers(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int):
        raise NotTold(f"bits or group_size of {quantization.get('quant_method')!r}")
    return bits / 8 + (2 + bits / 8) / group if group > 0 else bits / 8, [*(quantization.get("modules_to_not_convert") or []), "lm_head"]


def _unknown(quantization: Mapping[str, Any]) -> tuple[float, list[str]]:
    raise NotTold(f"bytes of weights quantized by {quantization.get('quant_method')!r}")
