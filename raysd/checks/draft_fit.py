"""Whether a finished draft fits the target: looked at before an engine loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts import sha256_of
from raysd.checks.draft_config import count, family_of, flat_config, read_json, reads_aux_states, refuse
from raysd.checks.draft_fields import check_fields
from raysd.checks.draft_files import read_tensors, weight_files
from raysd.checks.draft_layers import LayerIds, entering_layers
from raysd.checks.draft_rope import check_rope
from raysd.checks.draft_weights import check_numbers, check_shapes, check_vocabulary
from raysd.errors import StageError
from raysd.target.shape import TargetShape

NAME_THE_SOURCE = "name the draft that it was made from; `quantize:` makes the FP8 one"


@dataclass(frozen=True)
class DraftFit:
    """What was found out about a draft that fits."""

    layers: list[int]
    """The layers of the target that it reads, in vLLM's numbering; none if it reads what the last one hands to the head."""
    needless_d2t: bool
    """Whether it holds a `d2t` though its vocabulary is the target's."""


def identify_draft(folder: Path) -> dict[str, Any]:
    """What makes a finished draft this draft, for fingerprints: SHA-256 of its config.json and of the files that hold its weights.

    Raises ExperimentError if the folder, its config.json or its weights are absent.
    """
    read_json(folder)
    return {path.name: sha256_of(path) for path in (folder / "config.json", *weight_files(folder))}


def check_draft_fit(folder: Path, target: TargetShape, stated: LayerIds | None = None, *, quantizes: bool = False) -> DraftFit:
    """Raises ExperimentError if the draft's config or its weights say that it was made for another target, that it is no Eagle3 draft, or that vLLM would
    load something else than was trained.

    Compared: architecture, widths, the layers that it reads, the vocabulary, rope, every tensor's shape, dtype and numbers, d2t and t2d, and of a quantized
    draft what is said to be quantized. stated: the experiment's `draft.layer_ids`. quantizes: whether the experiment quantizes the draft.
    """
    config = flat_config(folder)
    family = family_of(folder, config)
    # A draft may be narrower than its target; then `target_hidden_size` says what it reads.
    reads = count(folder, config, "target_hidden_size", config.get("hidden_size"))
    if reads != target.hidden_size:
        refuse(folder, f"it reads hidden states of width {reads}, the target's are {target.hidden_size}")
    if config.get("vocab_size") != target.vocab_size:
        refuse(folder, f"its vocab_size is {config.get('vocab_size')!r:.60}, the target's is {target.vocab_size}")
    check_fields(folder, config, family)
    if family == "mla" and not reads_aux_states(config):
        refuse(folder, "its eagle_config has use_aux_hidden_state = false, and vLLM's MLA draft always reads several layers", "correct it in a copy of the draft")
    layers: list[int] = []
    if reads_aux_states(config):
        layers = entering_layers(folder, config, target, stated)
    elif stated is not None:
        refuse(folder, f"draft.layer_ids = {stated} has no effect, since it reads no layer but the last", "remove draft.layer_ids")
    elif config.get("hidden_size") != target.hidden_size:
        refuse(folder, f"its hidden_size is {config.get('hidden_size')}, and no fc brings the target's {target.hidden_size} to it")
    if config.get("quantization_config"):
        _check_method(folder, config["quantization_config"], quantizes)
    check_rope(folder, config, family)
    tensors = read_tensors(folder)
    check_shapes(folder, config, family, len(layers), target, tensors)
    check_numbers(folder, config, tensors)
    needless_d2t = check_vocabulary(folder, target, tensors)
    if config.get("quantization_config"):
        _check_quantized(folder)
    return DraftFit(layers, needless_d2t)


def _check_method(folder: Path, quantization: Any, quantizes: bool) -> None:
    """A quantized draft is served as it is, if it is of the one kind whose mistakes are known: Quark's FP8."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantizes:
        refuse(folder, f"it is quantized already, by {method!r:.60}, and `quantize:` would do it again",
               f"remove `quantize:` and the arm fp8, or {NAME_THE_SOURCE}")
    if method != "quark":
        refuse(folder, f"it is quantized by {method!r:.60}, of which raysd cannot tell whether vLLM reads it as it was meant", NAME_THE_SOURCE)


def _check_quantized(folder: Path) -> None:
    from raysd.quantization.audit import audit_draft

    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        refuse(folder, f"it is quantized, in {files[0].name}, where Quark writes safetensors", NAME_THE_SOURCE)
    try:
        audit_draft(folder, files)
    except StageError as err:
        refuse(folder, f"vLLM would not read it as it was quantized: {err.what}", NAME_THE_SOURCE)
