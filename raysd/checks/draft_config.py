"""A finished draft's config.json as vLLM reads it, whichever trainer wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from raysd.errors import ExperimentError

Family = Literal["llama", "qwen3", "mla"]
"""Which of vLLM's Eagle3 models a draft is: llama_eagle3.py, qwen3_eagle3.py, deepseek_eagle3.py."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama", "Eagle3MiniMaxM2ForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "Eagle3Qwen3ForCausalLM": "qwen3", "Eagle3DeepseekV2ForCausalLM": "mla", "Eagle3DeepseekV3ForCausalLM": "mla",
    # vLLM puts `Eagle3` before these (transformers_utils/configs/eagle.py), so the drafts of EAGLE's authors, which name no more than this, load.
    "LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "DeepseekV2ForCausalLM": "mla", "DeepseekV3ForCausalLM": "mla"}
"""What vLLM 0.32 loads as an Eagle3 draft (model_executor/models/registry.py)."""

SPECULATORS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""`model_type` of a Speculators draft's layers to the architecture that vLLM makes of it (transformers_utils/configs/speculators/algos.py)."""

IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NAME_A_DRAFT = "name a draft that was trained for this target, or remove the field and train one"


def refuse(folder: Path, reason: str, fix: str = NAME_A_DRAFT) -> NoReturn:
    """Raises ExperimentError for the draft in a folder."""
    raise ExperimentError(what=f"the draft in {folder} cannot be used: {reason}", where=f"draft.checkpoint: {folder}", fix=fix)


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """An object from a file of the draft's folder. Raises ExperimentError if it is absent or holds none."""
    if not folder.exists():
        name = f"{folder.parent.name}/{folder.name}" if not folder.parent.exists() else "ORG/NAME"
        raise ExperimentError(what=f"there is no folder {folder}", where=f"draft.checkpoint: {folder}",
                              fix="name the folder of a draft. A Hugging Face id is not taken here: download the draft with "
                                  f"`hf download {name} --local-dir DIR`, and name DIR")
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise unreadable(folder / name, f"cannot be read: {err}") from err
    if not isinstance(found, dict):
        raise unreadable(folder / name, "holds no object")
    return found


def unreadable(path: Path, reason: str) -> ExperimentError:
    """For a folder that is no draft at all, or one that is damaged."""
    return ExperimentError(what=f"{path} {reason}", where=f"draft.checkpoint: {path.parent}", fix="name a folder that vLLM loads as a draft")


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is in the format of vLLM's Speculators."""
    return "speculators_model_type" in config


def flat_config(folder: Path) -> dict[str, Any]:
    """config.json with everything at the top, translated from the Speculators format as vLLM translates it.

    Raises ExperimentError if it is no Eagle3 draft's.
    """
    config = read_json(folder)
    if is_speculators(config):
        config = _from_speculators(folder, config)
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        refuse(folder, f"its config.json has eagle_config = {eagle!r:.60}, not an object")
    for part, names in ((config, SWITCHES), (eagle, ("use_aux_hidden_state", "norm_before_fc"))):
        for name in names:
            switch(folder, part, name)
    return config


def _from_speculators(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3":
        refuse(folder, f"its speculators_model_type is {kind!r:.60}, not eagle3")
    if not isinstance(layer, dict):
        refuse(folder, f"its config.json has transformer_layer_config = {layer!r:.60}, not an object")
    model_type = layer.get("model_type", "llama")
    if model_type not in tuple(SPECULATORS):  # it need not be hashable
        refuse(folder, f"its layers have the model_type {model_type!r:.60}; of a Speculators draft vLLM loads {', '.join(SPECULATORS)}")
    named = {name: config[name] for name in (IDS, "target_hidden_size") if config.get(name) is not None}
    switches = {name: config.get(name, default) for name, default in
                (("norm_before_residual", True), ("norm_before_fc", False), ("fc_norm", False), ("norm_output", False))}  # vLLM's defaults
    return {**layer, "model_type": model_type, "architectures": [SPECULATORS[model_type]], "draft_vocab_size": config.get("draft_vocab_size"), **switches,
            **named} | ({"quantization_config": config["quantization_config"]} if config.get("quantization_config") else {})


def family_of(folder: Path, config: dict[str, Any]) -> Family:
    """Which of vLLM's models loads the draft. Raises ExperimentError if none does."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(folder, f"its config.json has architectures = {names!r:.60}, not a list of names")
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        refuse(folder, f"its architecture is {', '.join(names) or 'not named'}, not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[known[0]]


def count(folder: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A size in the config; null and absent are the default, if there is one. Raises ExperimentError if it is no count."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 1:
        refuse(folder, f"its {name} is {value!r:.60}, not a count")
    return value


def switch(folder: Path, config: dict[str, Any], name: str, default: bool = False) -> bool:
    """A yes or no in the config; null is no, as vLLM reads it. Raises ExperimentError for anything else: to vLLM "false" is a yes."""
    value = config.get(name, default)
    if value is not None and type(value) is not bool:
        refuse(folder, f"its {name} is {value!r:.60}, neither true nor false", "correct it in a copy of the draft")
    return bool(value)


def reads_aux_states(config: dict[str, Any]) -> bool:
    """Whether the draft reads several layers of the target, as nearly all do; if not, it reads what the last layer hands to the head."""
    return bool((config.get("eagle_config") or {}).get("use_aux_hidden_state", True))


def reads_norm_before_fc(config: dict[str, Any]) -> bool:
    """Whether one norm over all that `fc` reads stands before it; what eagle_config says comes first."""
    return bool((config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc")))


def head_size(folder: Path, config: dict[str, Any], family: Family) -> int:
    """Width of what is rotated of a head, or may be. Raises ExperimentError if the config does not say."""
    if family == "mla":
        return count(folder, config, "qk_rope_head_dim")
    width, heads = count(folder, config, "hidden_size"), count(folder, config, "num_attention_heads")
    return count(folder, config, "head_dim", 128 if family == "qwen3" else width // heads)  # the defaults of transformers' configs
