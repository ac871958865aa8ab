"""What vLLM is given of a finished draft: its folder as it is, or a copy beside which config.json or the tensors' names are put right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysd.artifacts.stage import StageRun
from raysd.checks.draft_config import IDS, flat_config, read_json, reads_aux_states
from raysd.checks.draft_files import INDEX, names_in, plain_name, read_content, weight_files, write_renamed
from raysd.checks.draft_fit import check_draft_fit
from raysd.checks.draft_layers import LayerIds, named_layers
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
    whole vocabulary; PyTorch's own format, which Quark does not read; safetensors that are no part of the draft, for which vLLM
    takes what is called `consolidated`, and Quark all. The draft's folder is only read; stated, quantizes, and what is raised: as `check_draft_fit` says.
    """
    fit = check_draft_fit(folder, target, stated, quantizes=quantizes)
    config, contents = served_config(folder, fit.layers), {path: read_content(path) for path in weight_files(folder)}
    renamed = {path: _renamed(names_in(content), fit.needless_d2t) for path, content in contents.items()}
    strays = any(path not in contents for path in (*folder.glob("*.safetensors"), *folder.rglob("consolidated*.safetensors")))
    as_it_is = [path for path in contents if path.suffix == ".safetensors" and not renamed[path]]
    if config == read_json(folder) and len(as_it_is) == len(contents) and not strays:
        return folder
    scratch.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("config.json", INDEX) and path.suffix not in (".safetensors", ".bin"):
            (scratch / path.name).symlink_to(path.resolve())
    for path, content in contents.items():
        if path in as_it_is:
            (scratch / path.name).symlink_to(path.resolve())
        else:
            write_renamed(content, scratch / f"{path.stem}.safetensors", renamed[path])
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


def _renamed(names: list[str], needless_d2t: bool) -> dict[str, str]:
    """Those of a file's tensor names that vLLM would stumble over, each with another."""
    renamed = {name: name.removeprefix("model.") for name in names if name.startswith("model.")}
    return renamed | {name: PASSED_OVER for name in names if needless_d2t and plain_name(name) == "d2t"}
