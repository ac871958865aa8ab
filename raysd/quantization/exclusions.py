"""Which layers of a draft stay in high precision, written so that vLLM finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def vllm_patterns(names: Iterable[str]) -> list[str]:
    """The exclusions for `quantization_config.exclude`, as patterns that match a layer wherever vLLM mounts it.

    Quark writes plain names ("fc"). vLLM compares them with its own ("model.fc"), finds no match, and loads the layer as if it were quantized, without
    an error and without its scale: measured, 104 of 32,085 drafted tokens accepted. AMD's card of Kimi-K2.5-Eagle3-FP8 asks for regular expressions.
    """
    return [name if name.startswith("re:") else rf"re:(?:.*\.)?{re.escape(name)}$" for name in names]


def is_excluded(module: str, patterns: Iterable[str]) -> bool:
    """Whether vLLM leaves a module unquantized: `re:` patterns match from its name's start, plain names the whole name."""
    return any(re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module for pattern in patterns)


def vllm_module_name(checkpoint_name: str) -> str:
    """Where vLLM mounts a module of an Eagle3 checkpoint (llama_eagle3.py): `midlayer` is a decoder layer, only `lm_head` is not below `model`."""
    name = checkpoint_name.replace("midlayer.", "layers.0.")
    return name if name.split(".")[0] == "lm_head" else f"model.{name}"
