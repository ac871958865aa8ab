"""What vLLM is given of a finished draft: its folder as it is, or a copy beside which config.json or the tensors' names are put right."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysd.artifacts.stage import StageRun
from raysd.checks.draft_config import IDS, flat_config, read_json, reads_aux_states
from raysd.checks.draft_fit import check_draft_fit
from raysd.checks.draft_layers import LayerIds, named_layers
from raysd.checks.draft_weights import INDEX, plain_name, weight_files
from raysd.target.locate import resolve_target
from raysd.target.shape import TargetShape, read_shape

PASSED_OVER = "t2d.d2t"
"""A name for a tensor that vLLM shall not load: it passes over any with `t2d` in it."""


def with_served_draft(run: StageRun) -> StageRun:
    """The run of a stage with its finished draft, if it has one, checked against the target and as vLLM and Quark are to be given it.

    Raises ExperimentError as `check_draft_fit` does: the target may not have been on disk when the experiment was looked at.
    """
    draft = run.experiment.draft
    if draft.checkpoint is None:
        return run
    target = read_shape(resolve_target(run.experiment.target, run.progress))
    folder = served_draft(draft.checkpoint, target, draft.layer_ids, run.work / "finished-draft", quantizes=run.experiment.quantize is not None)
    return replace(run, experiment=run.experiment.model_copy(update={"draft": draft.model_copy(update={"checkpoint": folder})}))


def served_draft(folder: Path, target: TargetShape, stated: LayerIds | None, scratch: Path, *, quantizes: bool = False) -> Path:
    """The folder to give to vLLM and to Quark: the draft's own, or `scratch`, with links to its files and what they must not read as it stands put right.

    Put right: layer ids that name what leaves a layer; how many there are, where vLLM would count otherwise; the Speculators format, whose translation drops
    the quantization_config that Quark adds; a `model_type` that vLLM takes for a multi-token predictor; null sizes; names with `model.` in front; the `d2t` of a
    whole vocabulary. The draft's folder is only read; stated, quantizes, and what is raised: as `check_draft_fit` says.
    """
    fit = check_draft_fit(folder, target, stated, quantizes=quantizes)
    config, renamed = served_config(folder, fit.layers), _renamed(folder, fit.needless_d2t)
    if config == read_json(folder) and not renamed:
        return folder
    scratch.mkdir(parents=True)
    files = weight_files(folder)
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("config.json", INDEX) and path.suffix != ".safetensors":
            (scratch / path.name).symlink_to(path.resolve())
    for path in files:
        if renamed:
            _write_renamed(path, scratch / path.name, renamed)
        else:
            (scratch / path.name).symlink_to(path.resolve())
    (scratch / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return scratch


def served_config(folder: Path, layers: list[int]) -> dict[str, Any]:
    """config.json as vLLM 0.32 must find it. layers: those that the draft reads, in vLLM's numbering; none if it reads no aux states."""
    config = flat_config(folder)
    if config.get("target_hidden_size", 0) is None:  # vLLM multiplies it
        del config["target_hidden_size"]
    if config["model_type"] == "deepseek_v3":  # vLLM makes an MTP model of it; kimi_k2 is the same config under another name
        config["model_type"] = "kimi_k2"
    if not reads_aux_states(config):
        return config
    eagle = config.get("eagle_config") or {}
    if named_layers(folder, config) not in ([], layers):
        config |= {IDS: layers, "eagle_config": {**eagle, IDS: layers, "layer_ids": "entering"}}
    # llama_eagle3.py and deepseek_eagle3.py do not count the ids at the top; qwen3_eagle3.py asks num_aux_layers before all else.
    counted = len((config.get("eagle_config") or {}).get(IDS) or ()) or 3
    if (counted if config.get("num_aux_hidden_states") is None else config["num_aux_hidden_states"]) != len(layers):
        config["num_aux_hidden_states"] = len(layers)
    if config.get("num_aux_layers", len(layers)) != len(layers):
        del config["num_aux_layers"]
    return config


def _renamed(folder: Path, needless_d2t: bool) -> dict[str, str]:
    """Tensor names that vLLM would stumble over, each with another."""
    from safetensors import safe_open

    renamed = {}
    for path in weight_files(folder):
        with safe_open(path, "np") as file:
            names = list(file.keys())
        renamed |= {name: name.removeprefix("model.") for name in names if name.startswith("model.")}
        renamed |= {name: PASSED_OVER for name in names if needless_d2t and plain_name(name) == "d2t"}
    return renamed


def _write_renamed(source: Path, out: Path, renamed: dict[str, str]) -> None:
    """The same tensors, byte for byte, under other names: only the header is written anew. Format: huggingface.co/docs/safetensors."""
    with source.open("rb") as file, out.open("wb") as new:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        text = json.dumps({renamed.get(name, name): entry for name, entry in header.items()}).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(file, new, 2**24)
