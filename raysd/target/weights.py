"""The target's tensors that a draft starts from, read from safetensors without loading the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from raysd.target.checkpoint import Checkpoint, check_shared, unreadable
from raysd.target.shape import TargetShape


def read_embedding_and_head(folder: Path, shape: TargetShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedding [V, H], final norm's weight [H] and head [V, H], wherever the checkpoint keeps them; tied weights give the embedding twice.

    Raises what `check_shared` raises.
    """
    names = check_shared(folder, shape)
    tensors = _read(Checkpoint(folder), list(dict.fromkeys(names)))
    embedding, norm, head = (tensors[name] for name in names)
    return embedding, norm, head


def _read(checkpoint: Checkpoint, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors by name, in the dtype on disk."""
    found: dict[str, torch.Tensor] = {}
    for path, inside in checkpoint.files(names).items():
        try:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in inside}
        except Exception as err:  # safetensors has an error of its own
            raise unreadable(path, err) from err
    return found
