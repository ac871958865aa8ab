"""Whether a finished draft fits the target: looked at before an engine loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.artifacts import sha256_of
from raysd.checks.draft_config import count, family_of, flat_config, read_json, reads_aux_states, refuse, unreadable
from raysd.checks.draft_layers import LayerIds, entering_layers
from raysd.checks.draft_weights import check_shapes, check_vocabulary
from raysd.errors import StageError
from raysd.target.shape import TargetShape


@dataclass(frozen=True)
class DraftFit:
    """What was found out about a draft that fits."""

    layers: list[int]
    """The layers of the target that it reads, in vLLM's numbering; none if it reads what the last one hands to the head."""
    needless_d2t: bool
    """Whether it holds a `d2t` though its vocabulary is the target's."""


def identify_draft(folder: Path) -> dict[str, Any]:
    """What makes a finished draft this draft, for fingerprints: SHA-256 of its config.json and its weights.

    Raises ExperimentError if the folder, its config.json or its safetensors are absent.
    """
    read_json(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise unreadable(folder / "config.json", "has no safetensors file beside it")
    return {path.name: sha256_of(path) for path in (folder / "config.json", *weights)}


def check_draft_fit(folder: Path, target: TargetShape, stated: LayerIds | None = None, *, quantizes: bool = False) -> DraftFit:
    """Raises ExperimentError if the draft's config or its weights say that it was made for another target, that it is no Eagle3 draft, or that vLLM would
    load something else than was trained.

    Compared: architecture, widths, the layers that it reads, the vocabulary, every tensor's shape, d2t and t2d, and of a quantized draft what is said to be
    quantized. stated: the experiment's `draft.layer_ids`. quantizes: whether the experiment quantizes the draft.
    """
    config = flat_config(folder)
    family = family_of(folder, config)
    # A draft may be narrower than its target; then `target_hidden_size` says what it reads.
    reads = count(folder, config, "target_hidden_size", config.get("hidden_size"))
    if reads != target.hidden_size:
        refuse(folder, f"it reads hidden states of width {reads}, the target's are {target.hidden_size}")
    if config.get("vocab_size") != target.vocab_size:
        refuse(folder, f"its vocab_size is {config.get('vocab_size')!r:.60}, the target's is {target.vocab_size}")
    if type(config.get("model_type")) is not str:
        refuse(folder, f"its config.json has model_type = {config.get('model_type')!r:.60}, by which vLLM knows how to read it", "add it, `llama` say, to a copy of the draft")
    if family == "mla" and not reads_aux_states(config):
        refuse(folder, "its eagle_config has use_aux_hidden_state = false, and vLLM's MLA draft always reads several layers", "correct it in a copy of the draft")
    layers: list[int] = []
    if reads_aux_states(config):
        layers = entering_layers(folder, config, target, stated)
    elif stated is not None:
        refuse(folder, f"draft.layer_ids = {stated} has no effect, since it reads no layer but the last", "remove draft.layer_ids")
    elif config.get("hidden_size") != target.hidden_size:
        refuse(folder, f"its hidden_size is {config.get('hidden_size')}, and no fc brings the target's {target.hidden_size} to it")
    check_shapes(folder, config, family, len(layers), target)
    needless_d2t = check_vocabulary(folder, target)
    if config.get("quantization_config"):
        _check_quantized(folder, config["quantization_config"], quantizes)
    return DraftFit(layers, needless_d2t)


def _check_quantized(folder: Path, quantization: Any, quantizes: bool) -> None:
    """A quantized draft is served as it is, if it is of the one kind whose mistakes are known: Quark's FP8."""
    from raysd.quantization.audit import audit_draft

    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    fix = "name the draft that it was made from; `quantize:` makes the FP8 one"
    if quantizes:
        refuse(folder, f"it is quantized already, by {method!r:.60}, and `quantize:` would do it again", "remove `quantize:` and the arm fp8, or " + fix)
    if method != "quark":
        refuse(folder, f"it is quantized by {method!r:.60}, of which raysd cannot tell whether vLLM reads it as it was meant", fix)
    try:
        audit_draft(folder)
    except StageError as err:
        refuse(folder, f"vLLM would not read it as it was quantized: {err.what}", fix)
