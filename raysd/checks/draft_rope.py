"""A finished draft's rope: a type that vLLM knows, with the numbers that it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from raysd.checks.draft_config import Family, head_size, refuse

NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""vLLM's rope types of language models, and what each needs (get_rope in layers/rotary_embedding) that transformers does not fill in."""
OLD_NAMES = {"su": "longrope", "mrope": "default"}
"""vLLM's patch_legacy_rope_type."""
LATENT = ("default", "yarn")
"""An MLA draft's: vLLM takes every other type for YaRN (deepseek_v2.py)."""
LISTS = ("short_factor", "long_factor")
TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""What may stand beside the rope's own object."""
POSITIVE = (*TOP, "factor", "low_freq_factor", "high_freq_factor", "alpha", "beta_fast", "beta_slow", "attention_factor")
ANY = ("mscale", "mscale_all_dim", "short_mscale", "long_mscale")
"""0 is a value of these."""


def check_rope(folder: Path, config: dict[str, Any], family: Family) -> None:
    """Raises ExperimentError for a rope that vLLM would refuse, or take for another. config: what `flat_config` gives."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            refuse(folder, f"its {name} is {config[name]!r:.60}, not an object")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # transformers' order
    if any(isinstance(value, dict) for value in rope.values()):
        refuse(folder, f"its rope is another one for each kind of layer ({', '.join(map(str, rope))}), of which vLLM's drafts read none")
    named = rope.get("rope_type", rope.get("type", "default"))
    kind, known = OLD_NAMES.get(str(named), named), LATENT if family == "mla" else tuple(NEEDS)
    if kind not in known:
        refuse(folder, f"its rope_type is {named!r:.60}, not one of {', '.join(known)}")
    values = {name: config[name] for name in TOP if config.get(name) is not None} | rope
    missing = [name for name in NEEDS[kind] if values.get(name) is None and not (kind == "dynamic" and values.get("alpha") is not None)]
    if missing:
        refuse(folder, f"its rope is of the type {named} and has no {missing[0]}", "add it, as it was in training, to a copy of the draft")
    for name, value in values.items():
        allowed = _is_number(value) and (name in ANY or value > 0)
        if name in (*POSITIVE, *ANY) and value is not None and not allowed:
            refuse(folder, f"its {name} is {value!r:.60}, not a {'' if name in ANY else 'positive '}number")
    share = values.get("partial_rotary_factor") or 1
    if share > 1:
        refuse(folder, f"its partial_rotary_factor is {share}, not a share of a head")
    pairs = int(head_size(folder, config, family) * share) // 2
    for name in LISTS if kind == "longrope" else ():
        factors = values[name]
        if not isinstance(factors, list) or len(factors) != pairs or not all(_is_number(each) and each > 0 for each in factors):
            refuse(folder, f"its {name} is {factors!r:.60}, not a positive number for each of the {pairs} pairs that are rotated")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
