"""Whether a finished draft fits the target: its shape is compared before an engine loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raysd.artifacts import sha256_of
from raysd.errors import ExperimentError
from raysd.target.shape import TargetShape

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM")
"""Architectures that vLLM loads as an Eagle3 draft."""


def identify_draft(folder: Path) -> dict[str, Any]:
    """What makes a finished draft this draft, for fingerprints: SHA-256 of its config.json and its weights.

    Raises ExperimentError if the folder, its config.json or its safetensors are absent.
    """
    _read_config(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ExperimentError(
            what=f"{folder} holds no safetensors file", where="draft.checkpoint", fix="name a folder that vLLM loads as a draft"
        )
    return {path.name: sha256_of(path) for path in (folder / "config.json", *weights)}


def check_draft_fit(folder: Path, target: TargetShape) -> None:
    """Raises ExperimentError if the draft's config or its weights say that it was made for another target, or that it is no Eagle3 draft.

    Compared: architecture, the width of the target's hidden states, the layers that it reads, the vocabulary that its tokens come from, and the shapes of
    `fc`, `lm_head` and `d2t`.
    """
    config = _read_config(folder)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _refuse(folder, f"its config.json has architectures = {names!r}, not a list of names")
    if not any(name in ARCHITECTURES for name in names):
        _refuse(folder, f"its architecture is {', '.join(names) or 'not named'}, not one of {', '.join(ARCHITECTURES)}")
    # A draft may be narrower than its target; then `target_hidden_size` says what it reads.
    reads = config.get("target_hidden_size") or config.get("hidden_size")
    if reads != target.hidden_size:
        _refuse(folder, f"it reads hidden states of width {reads}, the target's are {target.hidden_size}")
    if config.get("vocab_size") != target.vocab_size:
        _refuse(folder, f"its vocab_size is {config.get('vocab_size')}, the target's is {target.vocab_size}")
    draft_vocabulary = config.get("draft_vocab_size")
    if draft_vocabulary is not None and type(draft_vocabulary) is not int:
        _refuse(folder, f"its draft_vocab_size is {draft_vocabulary!r}, not a count")
    if draft_vocabulary is not None and draft_vocabulary > target.vocab_size:
        _refuse(folder, f"its draft_vocab_size is {draft_vocabulary}, above the target's {target.vocab_size}")
    eagle = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or (eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None) or []
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i <= target.layers for i in layers):
        _refuse(folder, f"it reads the layers {layers!r} of a target that has {target.layers}")
    shapes, width, rows = _shapes(folder), config.get("hidden_size"), draft_vocabulary or target.vocab_size
    fc = shapes.get("fc.weight")
    if fc is None:
        _refuse(folder, "its weights hold no fc, which every Eagle3 draft has")
    if len(fc) != 2 or fc[0] != width or fc[1] % reads:
        _refuse(folder, f"its weight fc is {fc}, not [{width}, a multiple of {reads}]")
    if layers and fc[1] != len(layers) * reads:
        _refuse(folder, f"its weight fc is {fc}, and it reads {len(layers)} layers of width {reads}")
    for name, wanted in (("lm_head.weight", [rows, width]), ("d2t", [rows])):
        if shapes.get(name, wanted) != wanted:
            _refuse(folder, f"its {name.removesuffix('.weight')} is {shapes[name]}, not {wanted}")


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor of the draft, by its name without `model.` in front. Raises ExperimentError if a file is not whole."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                shapes |= {name.removeprefix("model."): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no iterator)
        except (SafetensorError, OSError) as err:
            raise ExperimentError(what=f"{path} cannot be read: {err}", where="draft.checkpoint", fix="fetch or train the draft again") from err
    return shapes


def _refuse(folder: Path, reason: str) -> None:
    raise ExperimentError(
        what=f"the draft in {folder} does not fit the target: {reason}",
        where="draft.checkpoint",
        fix="name a draft that was trained for this target, or remove the field and train one",
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ExperimentError(
            what=f"{folder / 'config.json'} cannot be read: {err}", where="draft.checkpoint", fix="name a folder that vLLM loads as a draft"
        ) from err
    if not isinstance(config, dict):
        raise ExperimentError(
            what=f"{folder / 'config.json'} holds no object", where="draft.checkpoint", fix="name a folder that vLLM loads as a draft"
        )
    return config
