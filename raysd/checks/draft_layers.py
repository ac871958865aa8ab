"""Which layers of the target a finished draft reads: two ways to count them are about, one apart, and a draft served with the wrong one is never accepted.

vLLM, Speculators, EAGLE's authors and raysd name the residual stream *entering* a layer: 2, n // 2, n - 3 of n layers. SpecForge, TorchSpec and
Lumen-RL name the layer whose *output* is read: 1, n // 2 - 1, n - 4 for the same three streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from raysd.checks.draft_config import IDS, is_speculators, read_json, refuse
from raysd.target.shape import TargetShape

LayerIds = Literal["entering", "leaving"]


def entering_layers(folder: Path, config: dict[str, Any], target: TargetShape, stated: LayerIds | None) -> list[int]:
    """The layers that the draft reads, in vLLM's numbering: id i is the residual stream entering layer i, ascending.

    config: what `flat_config` gives. stated: the experiment's `draft.layer_ids`. Raises ExperimentError if the layers are not there, or if nothing says how they are counted.
    """
    ids = named_layers(folder, config)
    if not ids:
        if stated is not None:
            refuse(folder, f"draft.layer_ids = {stated} has no effect, since its config.json names no layers, and vLLM's default for it is one and the same "
                           "in either reading", "remove draft.layer_ids")
        return _in_target(folder, sorted({2, target.layers // 2, target.layers - 3}), target, "names no layers, for which vLLM takes")  # SupportsEagle3
    said = _said(folder, config)
    if stated is not None and said is not None and stated != said:
        whose = "is in the format of Speculators, whose" if is_speculators(read_json(folder)) else "says that its"
        refuse(folder, f"draft.layer_ids = {stated}, and its config.json {whose} layer ids name what is {said} a layer", "remove draft.layer_ids")
    reading = stated or said or _well_known(ids, target)
    if reading is None:
        refuse(folder, f"its layer ids {ids} can be read in two ways: as the residual streams entering the layers {ids} (vLLM, Speculators, EAGLE) or as leaving them, which "
                       f"vLLM calls {_shifted(ids)} (SpecForge, TorchSpec, Lumen-RL); nothing in it says which",
               "say `draft.layer_ids: entering` or `draft.layer_ids: leaving`, after the trainer that made it")
    return _in_target(folder, _shifted(ids) if reading == "leaving" else ids, target, f"reads the layers {ids}, counted as {reading}: in vLLM's numbering")


def named_layers(folder: Path, config: dict[str, Any]) -> list[int]:
    """The ids in the config, at its top or in `eagle_config`, as they stand there; none if it names none. Raises ExperimentError if the two differ."""
    top, inner = config.get(IDS) or [], (config.get("eagle_config") or {}).get(IDS) or []
    for ids in (top, inner):
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            refuse(folder, f"its config.json has {IDS} = {ids!r:.60}, not a list of layers")
    if top and inner and top != inner:
        refuse(folder, f"its config.json names two sets of layers, {top} and, in eagle_config, {inner}", "correct one of the two in its config.json")
    return top or inner


def _in_target(folder: Path, ids: list[int], target: TargetShape, how: str) -> list[int]:
    if not all(0 <= each <= target.layers for each in ids):
        refuse(folder, f"it {how} {ids}, of a target that has {target.layers} layers")
    if ids != sorted(set(ids)):
        refuse(folder, f"it {how} {ids}; vLLM hands out each layer once and in ascending order")
    return ids


def _said(folder: Path, config: dict[str, Any]) -> LayerIds | None:
    """How the draft says that its ids are counted: by its format, or in the field that raysd writes into its own."""
    said = (config.get("eagle_config") or {}).get("layer_ids", "entering" if is_speculators(read_json(folder)) else None)
    if said not in ("entering", "leaving", None):
        refuse(folder, f"its eagle_config has layer_ids = {said!r:.60}, neither entering nor leaving", "correct it in a copy of the draft")
    return said


def _well_known(ids: list[int], target: TargetShape) -> LayerIds | None:
    usual = target.aux_layers(None)
    return "entering" if ids == usual else "leaving" if _shifted(ids) == usual else None


def _shifted(ids: list[int]) -> list[int]:
    return [each + 1 for each in ids]
