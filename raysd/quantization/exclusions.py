"""Which layers of a draft stay in high precision, written so that vLLM finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that vLLM makes one of, where a draft has all of them (llama_eagle3.py, deepseek_eagle3.py)."""


def vllm_patterns(modules: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """The exclusions for `quantization_config.exclude`, as patterns that match the excluded of a draft's modules wherever vLLM mounts them.

    Quark writes plain names ("fc"). vLLM compares them with its own ("model.fc"), finds no match, and loads the layer as if it were quantized, without
    an error and without its scale: measured, 104 of 32,085 drafted tokens accepted. AMD's card of Kimi-K2.5-Eagle3-FP8 asks for regular expressions.
    A fused layer must be named itself: of a draft's configuration vLLM does not know what it fuses (get_draft_quant_config in models/utils.py sets no
    packed_modules_mapping), so patterns for the parts match nothing.
    """
    mounted = vllm_module_names(modules)
    tails = dict.fromkeys(re.sub(r"^model\.(layers\.\d+\.)?", "", mounted[module]) for module in excluded)
    return [rf"re:(?:.*\.)?{re.escape(tail)}$" for tail in tails]


def excluded_modules(modules: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Those of a draft's modules that Quark leaves in high precision: its patterns are globs over whole names."""
    patterns = list(patterns)
    return [module for module in modules if any(fnmatch(module, pattern) for pattern in patterns)]


def is_excluded(module: str, patterns: Iterable[str]) -> bool:
    """Whether vLLM leaves a module unquantized: `re:` patterns match from its name's start, plain names the whole name."""
    return any(re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module for pattern in patterns)


def vllm_module_names(modules: Iterable[str]) -> dict[str, str]:
    """Where vLLM mounts the modules of an Eagle3 checkpoint: `midlayer` is a decoder layer, only `lm_head` is not below `model`, and parts are fused.

    The layer's number is the target's count of layers, which a draft does not say; 0 stands for it.
    """
    modules, fused = set(modules), {}
    for whole, parts in FUSED.items():
        for parent in {module.removesuffix(parts[0]) for module in modules if module.endswith(f".{parts[0]}")}:
            if all(f"{parent}{part}" in modules for part in parts):
                fused |= {f"{parent}{part}": f"{parent}{whole}" for part in parts}
    names = {module: fused.get(module, module).replace("midlayer.", "layers.0.") for module in sorted(modules)}
    return {module: name if name.split(".")[0] == "lm_head" else f"model.{name}" for module, name in names.items()}


def check_exclusions(modules: list[str], patterns: Iterable[str]) -> str | None:
    """What is wrong with Quark's exclusions for a draft with these modules; None if nothing is.

    vLLM gives its head no quantization (ParallelLMHead in both files), so it must be excluded; of a fused layer either all parts or none are.
    """
    patterns = list(patterns)
    idle = [pattern for pattern in patterns if not excluded_modules(modules, [pattern])]
    if idle:
        return f"{', '.join(idle)} match no layer of the draft, which has {', '.join(modules)}"
    excluded = excluded_modules(modules, patterns)
    if "lm_head" in modules and "lm_head" not in excluded:
        return "lm_head is not excluded, and vLLM reads a draft's head in high precision only"
    if len(excluded) == len(modules):
        return "they name every layer of the draft"
    by_place: dict[str, list[str]] = {}
    for module, place in vllm_module_names(modules).items():
        by_place.setdefault(place, []).append(module)
    for place, parts in by_place.items():
        if 0 < len(set(parts) & set(excluded)) < len(parts):
            return f"vLLM makes one layer ({place.split('.')[-1]}) of {', '.join(parts)}, and only {', '.join(part for part in parts if part in excluded)} is excluded"
    return None
