"""The target's shape, read from its config.json: what a draft must fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raysd.errors import ExperimentError
from raysd.target.locate import read_config

SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL = ("num_key_value_heads", "head_dim", "q_lora_rank", "num_experts_per_tok")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "deepseek_v2"), {"rope_theta": 1e4, "rms_norm_eps": 1e-6}),
    "deepseek_v3": {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "num_key_value_heads": 128},
    "mistral": {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "num_key_value_heads": 8},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen2": {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "qwen3": {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "num_key_value_heads": 4},
    "minimax_m2": {"rope_theta": 5e6, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128},
}
"""What transformers' class of a model type, and with it vLLM, takes for a field that config.json leaves out. Importing the class would import torch."""
LOGIT_FIELDS: dict[str, str | None] = {
    **dict.fromkeys(("final_logit_softcapping", "output_soft_cap_temp", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier",
                     "output_multiplier_scale", "logits_mup_width_multiplier")),
    "dim_model_base": "hidden_size", "output_mult": "mup_scale_factor"}
"""How configs name a change of the logits, or of the normed state before the head: Gemma, Muse Glimmer, Cohere, Granite, Falcon-H1, Grok, Inkling; MiniCPM and TeleFLM
divide by a second field, given here, and change nothing where the two are equal. Null changes nothing, and 1 neither where there is no second field."""
LOGIT_DEFAULTS: dict[str, dict[str, float]] = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), {"logit_scale": 0.0625}),
    **dict.fromkeys(("gemma2", "gemma3n_text"), {"final_logit_softcapping": 30.0}),
    **dict.fromkeys(("muse_glimmer", "muse_glimmer_text"), {"output_multiplier": 0.19611613513818404}),
    "minicpm": {"dim_model_base": 1}, "minicpm3": {"dim_model_base": 256}}
"""What the class of a model type takes for one that config.json leaves out."""
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""The rope types that a draft can have too, and what each needs (transformers/modeling_rope_utils.py)."""
ROPE_NUMBERS = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor", "beta_fast", "beta_slow",
                "attention_factor", "alpha", "max_trained_positions"}
"""What can only be a positive number, in a rotation of any type."""
MSCALES = ("mscale", "mscale_all_dim")
"""Positive numbers too, or 0 for none."""


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one small vector per token."""

    q_lora_rank: int | None
    """Width of the queries' own bottleneck; None: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Of a head's query and key, the part without a position."""
    qk_rope_head_dim: int
    """The rotated part; of the key, one for all heads."""
    v_head_dim: int


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder-only target."""

    layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """Width of the MLP that a token passes: the dense one, or in a target of experts alone that of the experts of one token together."""
    attention_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As transformers 5 writes them: `rope_theta`, `rope_type`, what the type needs, and `partial_rotary_factor` if only a part of a head is rotated."""
    max_position_embeddings: int
    tie_word_embeddings: bool | None
    """Whether the head is the embedding; None: the config does not say, and what the checkpoint holds decides."""
    latent: LatentSizes | None = None
    """Of a target with MLA; then `kv_heads` and `head_dim` say nothing."""

    def aux_layers(self, asked: list[int] | None) -> list[int]:
        """Layers whose entering residual stream a draft reads (vLLM's numbering, below `layers`), ascending, as vLLM hands them out.

        asked: the experiment's, or None for 2, n // 2, n - 3 (EAGLE-3's reference code), brought inside a shallow target. Raises ExperimentError for an id that does not exist.
        """
        n = self.layers
        ids = sorted({min(2, n - 1), n // 2, max(n - 3, 0)}) if asked is None else asked
        if any(not 0 <= i < n for i in ids) or sorted(set(ids)) != list(ids):
            raise ExperimentError(what=f"{ids} are not ascending layer ids from 0 to {n - 1}", where="draft.aux_layers",
                                  fix=f"name layers of the target, which has {n}; id i is the residual stream entering layer i")
        return list(ids)


def read_shape(folder: Path) -> TargetShape:
    """The shape of the target in a folder; a multimodal target's text part. Raises ExperimentError, naming the field, for a config that lacks one or has another kind of value."""
    whole = read_config(folder, "target.model")
    config = whole.get("text_config") or whole
    if not isinstance(config, dict):
        _refuse(folder, f"text_config = {config!r:.60}, not an object")
    for name in (*SIZES, *LATENT_SIZES, *OPTIONAL):
        value = config.get(name)
        if name in config and (type(value) is not int or value < 1) and not (value is None and name not in SIZES):
            _refuse(folder, f"{name} = {value!r:.60}, not a count")
    heads = _field(folder, config, "num_attention_heads")
    head_dim = config.get("head_dim", _default(config, "head_dim")) or _field(folder, config, "hidden_size") // heads
    latent = _latent(folder, config)
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    return TargetShape(
        layers=_field(folder, config, "num_hidden_layers"), hidden_size=_field(folder, config, "hidden_size"), vocab_size=_field(folder, config, "vocab_size"),
        intermediate_size=_mlp_width(folder, config), attention_heads=heads,
        kv_heads=config.get("num_key_value_heads", _default(config, "num_key_value_heads")) or heads, head_dim=head_dim,
        rms_norm_eps=_number(folder, "rms_norm_eps", _field(folder, config, "rms_norm_eps")),
        rope_parameters=_rope(folder, config, latent.qk_rope_head_dim if latent else head_dim),
        max_position_embeddings=_field(folder, config, "max_position_embeddings"), tie_word_embeddings=None if tied is None else bool(tied), latent=latent)


def check_plain_logits(folder: Path) -> None:
    """Raises ExperimentError if the target's logits are more than its head times the normed state: a draft would be trained on those, and no answer shows a scale."""
    whole = read_config(folder, "target.model")
    config = {**whole, **(whole.get("text_config") or {})}
    for name, divisor in LOGIT_FIELDS.items():
        value = config.get(name, LOGIT_DEFAULTS.get(str(config.get("model_type")), {}).get(name))
        if value is not None and value != (1 if divisor is None else config.get(divisor)):
            told = "" if name in config else f" (what model_type {config['model_type']} has where it is absent)"
            equal = "" if divisor is None else f" beside {divisor} = {config.get(divisor)!r:.60}"
            _refuse(folder, f"{name} = {value!r:.60}{told}{equal}, which changes the logits after the head", "use a target without it")


def _latent(folder: Path, config: dict[str, Any]) -> LatentSizes | None:
    if config.get("kv_lora_rank") is None:
        return None
    return LatentSizes(q_lora_rank=config.get("q_lora_rank"), **{name: _field(folder, config, name) for name in LATENT_SIZES})


def _mlp_width(folder: Path, config: dict[str, Any]) -> int:
    width = _field(folder, config, "intermediate_size")
    # With `moe_intermediate_size` beside it, `intermediate_size` is the dense layers' (DeepSeek, Kimi, Qwen3-MoE); without, it is an expert's (MiniMax-M2, Mixtral).
    if any(config.get(name) for name in EXPERTS) and config.get("moe_intermediate_size") is None:
        return width * _field(folder, config, "num_experts_per_tok")
    return width


def _rope(folder: Path, config: dict[str, Any], rotated: int) -> dict[str, Any]:
    """All of it in one dict. transformers 5 keeps it in `rope_parameters`; older checkpoints spread it over `rope_theta`, `rope_scaling`, and
    `partial_rotary_factor` or MiniMax's `rotary_dim`. rotated: width of what is rotated of a head, where nothing says that it is less.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            _refuse(folder, f"{name} = {config[name]!r:.60}, not an object")
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}  # transformers' order
    rope = {name: value for name, value in written.items() if value is not None}
    rope_type = rope.pop("type", "default")
    rope.setdefault("rope_type", rope_type)
    if any(isinstance(value, dict) for value in rope.values()):
        _refuse(folder, f"another rope for each kind of layer ({', '.join(map(str, rope))}); a draft has one layer and one rope", "use a target with one rope for all layers")
    if not isinstance(rope["rope_type"], str) or rope["rope_type"] not in ROPE_FIELDS:
        _refuse(folder, f"rope_type = {rope['rope_type']!r:.60}; a draft can have {', '.join(ROPE_FIELDS)}", "use a target with one of these")
    if "rope_theta" not in rope:
        rope["rope_theta"] = _field(folder, config, "rope_theta")
    if "partial_rotary_factor" not in rope and config.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if "partial_rotary_factor" not in rope and config.get("rotary_dim") is not None:
        rope["partial_rotary_factor"] = _number(folder, "rotary_dim", config["rotary_dim"]) / rotated
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            rope["original_max_position_embeddings"] = outside
        rope.setdefault("original_max_position_embeddings", _field(folder, config, "max_position_embeddings"))
    for name in ROPE_FIELDS[rope["rope_type"]]:
        if name not in rope:
            raise _absent(folder, name, f"which rope_type {rope['rope_type']} needs")
    _check_rope(folder, rope, rotated, _field(folder, config, "max_position_embeddings"))
    return rope


def _check_rope(folder: Path, rope: dict[str, Any], rotated: int, max_positions: int) -> None:
    """Of each value that a rotation is computed from, whether it is of the kind and size that it can be."""
    for name, value in rope.items():
        if name in ROPE_NUMBERS or (name in MSCALES and value != 0):
            _number(folder, name, value)
    for name in ("rope_theta", "original_max_position_embeddings"):  # whose logarithm something is divided by
        if rope.get(name, 2) <= 1:
            _refuse(folder, f"{name} = {rope[name]!r:.60}, not above 1")
    if not isinstance(rope.get("truncate", True), bool):
        _refuse(folder, f"truncate = {rope['truncate']!r:.60}, neither true nor false")
    if not rope.get("partial_rotary_factor", 1) <= 1:
        _refuse(folder, f"partial_rotary_factor = {rope['partial_rotary_factor']}, not a share of a head")
    if rope.get("max_trained_positions", 0) > max_positions:
        _refuse(folder, f"max_trained_positions = {rope['max_trained_positions']}, more than max_position_embeddings = {max_positions}")
    pairs = int(rotated * rope.get("partial_rotary_factor", 1)) // 2
    for name in ("short_factor", "long_factor") if rope["rope_type"] == "longrope" else ():
        factors = rope[name]
        if not isinstance(factors, list) or len(factors) != pairs:
            _refuse(folder, f"{name} = {factors!r:.60}, not a list of {pairs} numbers, one for each pair of the {2 * pairs} that are rotated of a head")
        for number, factor in enumerate(factors):
            _number(folder, f"{name}[{number}]", factor)


def _default(config: dict[str, Any], name: str) -> Any:
    return DEFAULTS.get(str(config.get("model_type", "llama")), {}).get(name)


def _field(folder: Path, config: dict[str, Any], name: str) -> Any:
    value = config.get(name)
    value = _default(config, name) if value is None else value
    if value is None:
        raise _absent(folder, name, f"and model_type {config.get('model_type')} has no default for it")
    return value


def _number(folder: Path, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        _refuse(folder, f"{name} = {value!r:.60}, not a positive number")
    return value


def _absent(folder: Path, name: str, why: str) -> ExperimentError:
    return ExperimentError(what=f"the target's config.json has no {name}, {why}", where=f"target.model: {folder}",
                           fix="add the field as the model was trained, or use a decoder-only model with a Llama-like config")


def _refuse(folder: Path, found: str, fix: str = "correct the file, or fetch the model again") -> NoReturn:
    raise ExperimentError(what=f"the target's config.json has {found}", where=f"target.model: {folder}", fix=fix)
