"""The audit of a quantized draft as written: what vLLM would read from it must be what was meant."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.errors import StageError
from raysd.quantization.exclusions import FUSED, is_excluded, vllm_module_names

SCALE = "_scale"


@dataclass(frozen=True)
class Audit:
    """What the audit found, if it found no fault."""

    quantized: list[str]
    """Modules in FP8, each with its scale."""
    high_precision: list[str]
    """Linear modules left in the draft's own precision."""


def audit_draft(folder: Path, files: list[Path] | None = None) -> Audit:
    """Checks config.json and the weights of a quantized draft against each other. files: those with its weights; None: all of the folder's safetensors.

    Raises StageError if a quantized weight lacks its scale or the scale has the wrong length or is not a positive number; if an excluded module has a scale or FP8 values; if a
    module is in high precision without an exclusion that vLLM matches (vLLM would load it without its scale); if the head or the embedding, to which vLLM gives no quantization, is in
    FP8; if an exclusion matches nothing; or if nothing is quantized. An embedding needs no exclusion: neither Quark nor vLLM takes it for a linear layer.
    """
    import torch
    from safetensors import safe_open

    patterns = _exclusions(folder / "config.json")
    files = sorted(folder.glob("*.safetensors")) if files is None else files
    if not files:
        raise StageError(what="the quantized draft has no safetensors file", where=folder, fix="run the stage again; Quark wrote no weights")
    tensors: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    quantized, high_precision = [], []
    mounted = vllm_module_names(name.removesuffix(".weight") for name, weight in sorted(tensors.items()) if name.endswith(".weight") and weight.ndim == 2)
    for module, place in mounted.items():
        weight, scale = tensors[f"{module}.weight"], tensors.get(f"{module}.weight{SCALE}")
        embedding = module.split(".")[-1] == "embed_tokens"
        excluded = embedding or is_excluded(place, patterns)
        in_fp8 = weight.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        called = f"vLLM calls it {place}{', of which it is a part' if place.split('.')[-1] in FUSED else ''}; the exclusions are {patterns}"
        if (embedding or module == "lm_head") and in_fp8:
            raise StageError(what=f"{module} is in FP8, and vLLM reads a draft's head and embedding in high precision only", where=folder, fix=f"add {module} to quantize.exclude")
        if excluded and (scale is not None or in_fp8):
            raise StageError(what=f"{module} is excluded, yet the file holds it {'in FP8' if in_fp8 else 'with a scale'} ({called})", where=folder, fix="check quantize.exclude")
        if not excluded and not in_fp8:
            raise StageError(what=f"{module} is in {weight.dtype} and no exclusion that vLLM matches names it ({called}): vLLM would read it as FP8 without a scale, "
                                  "and nothing would be accepted", where=folder / "config.json", fix="write the exclusion as a pattern, `re:(?:.*\\.)?NAME$`")
        if in_fp8:
            _check_scale(module, weight, scale, folder)
        (high_precision if excluded else quantized).append(module)
    unmatched = [pattern for pattern in patterns if not any(is_excluded(place, [pattern]) for place in mounted.values())]
    if unmatched:
        raise StageError(what=f"the exclusions {unmatched} match no layer of the draft", where=folder / "config.json",
                         fix=f"correct quantize.exclude; the draft's layers are {', '.join(mounted)}")
    orphans = [name for name in tensors if name.endswith(".weight" + SCALE) and name.removesuffix(SCALE) not in tensors]
    if orphans:
        raise StageError(what=f"the file holds the scales {orphans} without their weights", where=folder, fix="run the stage again; Quark wrote only a part")
    if not quantized:
        raise StageError(what="no weight of the draft is quantized", where=folder, fix="check quantize.exclude: it names every layer")
    return Audit(quantized, high_precision)


def _check_scale(module: str, weight: Any, scale: Any, folder: Path) -> None:
    if not bool(weight.float().isfinite().all()) or not bool(weight.float().any()):
        raise StageError(what=f"the weight of {module} holds NaN or is all zero", where=folder, fix="check that the BF16 draft's weights are finite")
    if scale is None:
        raise StageError(what=f"{module} is in FP8 without its scale", where=folder, fix="run the stage again; if it stays so, this Quark version is not supported")
    if scale.numel() != weight.shape[0]:
        raise StageError(what=f"the scale of {module} has {scale.numel()} values for {weight.shape[0]} output channels", where=folder,
                         fix="use the scheme ptpc_fp8: one scale per output channel")
    if not bool((scale.float() > 0).all()) or not bool(scale.float().isfinite().all()):
        raise StageError(what=f"the scale of {module} is not a positive number everywhere", where=folder, fix="check that the BF16 draft's weights are finite")


def _exclusions(config_path: Path) -> list[str]:
    config = json.loads(config_path.read_text(encoding="utf-8"))
    try:
        exclusions = config["quantization_config"]["exclude"]
    except KeyError as err:
        raise StageError(what=f"the quantized draft's config has no {err}", where=config_path, fix="run the stage again; Quark wrote no quantization_config") from err
    if not isinstance(exclusions, list) or not all(isinstance(pattern, str) and _compiles(pattern) for pattern in exclusions):
        raise StageError(what=f"the quantized draft's config has exclude = {exclusions!r:.60}, not a list of names and patterns", where=config_path,
                         fix="correct it in a copy of the draft, or quantize the draft again")
    return exclusions


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error:
        return not pattern.startswith("re:")
    return True
