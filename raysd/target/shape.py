"""The target's shape, read from its config.json: what a draft must fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raysd.errors import ExperimentError
from raysd.target.locate import read_config

DERIVED = ("num_key_value_heads", "head_dim")
"""Sizes that follow from the others when they are null or absent."""
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", *DERIVED)


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder-only target."""

    layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As transformers 5 writes them: `rope_theta`, `rope_type` and what the type needs."""
    max_position_embeddings: int
    tie_word_embeddings: bool

    def aux_layers(self, asked: list[int] | None) -> list[int]:
        """Layers whose entering residual stream a draft reads (vLLM's numbering, below `layers`), ascending, as vLLM hands them out.

        asked: the experiment's, or None for 2, n // 2, n - 3 (EAGLE-3's reference code), brought inside a shallow target. Raises ExperimentError for an id that does not exist.
        """
        n = self.layers
        ids = sorted({min(2, n - 1), n // 2, max(n - 3, 0)}) if asked is None else asked
        if any(not 0 <= i < n for i in ids) or sorted(set(ids)) != list(ids):
            raise ExperimentError(what=f"{ids} are not ascending layer ids from 0 to {n - 1}", where="draft.aux_layers",
                                  fix=f"name layers of the target, which has {n}; id i is the residual stream entering layer i")
        return list(ids)


def read_shape(folder: Path) -> TargetShape:
    """The shape of the target in a folder; a multimodal target's text part. Raises ExperimentError if a size is not in its config."""
    config = read_config(folder, "target.model")
    config = config.get("text_config") or config
    if not isinstance(config, dict):
        _refuse(folder, f"text_config = {config!r:.60}, not an object")
    for name in SIZES:
        value = config.get(name)
        if name in config and (type(value) is not int or value < 1) and not (value is None and name in DERIVED):
            _refuse(folder, f"{name} = {value!r:.60}, not a count")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            _refuse(folder, f"{name} = {config[name]!r:.60}, not an object")
    if type(config.get("rms_norm_eps", 1e-6)) not in (int, float):
        _refuse(folder, f"rms_norm_eps = {config['rms_norm_eps']!r:.60}, not a number")
    try:
        heads = config["num_attention_heads"]
        return TargetShape(
            layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], vocab_size=config["vocab_size"],
            intermediate_size=config["intermediate_size"], attention_heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads, rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_parameters=_rope(config), max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)))
    except KeyError as err:
        raise ExperimentError(what=f"the target's config.json has no {err}", where=f"target.model: {folder}", fix="use a decoder-only model with a Llama-like config") from err


def _refuse(folder: Path, found: str) -> NoReturn:
    raise ExperimentError(what=f"the target's config.json has {found}", where=f"target.model: {folder}", fix="correct the file, or fetch the model again")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps all of it under rope_parameters; older checkpoints spread it over rope_theta and rope_scaling."""
    if config.get("rope_parameters"):
        return {"rope_type": "default", **config["rope_parameters"]}
    scaling = dict(config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return {"rope_type": "default", **scaling, "rope_theta": config.get("rope_theta", 10000.0)}
