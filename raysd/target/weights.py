"""The target's tensors that a draft starts from, read from safetensors without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from raysd.errors import TargetError
from raysd.target.shape import TargetShape

ELSEWHERE = {"layers", "mtp", "vision_tower", "visual"}
"""Parts of names of what lies below the model itself."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Checkpoint:
    """The tensors of a checkpoint folder, sharded or not, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the index, or the files' headers. Raises TargetError if a file is absent or damaged."""
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            else:
                self._file_of = {name: path.name for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}
        except Exception as err:  # safetensors has an error of its own, beside those of json and of the disk
            raise _unreadable(folder, err) from err

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def one(self, ending: str) -> str | None:
        """The name of the one tensor outside of layers and predictors that has this name or ends so, with whatever prefix; None if there is none.

        A model's own names differ by prefix only: `model.`, `language_model.model.`, `model.language_model.`; a multi-token predictor, which some checkpoints
        keep as one layer more, holds copies. Raises TargetError if several are left.
        """
        found = [name for name in self._file_of if f".{name}".endswith(f".{ending}") and not ELSEWHERE & set(name.split("."))]
        if len(found) > 1:
            raise TargetError(what=f"the target's checkpoint has several tensors {ending}: {', '.join(sorted(found))}", where=self.folder,
                              fix="this target's layout is not supported")
        return found[0] if found else None

    def read(self, names: list[str], fix: str = "this target's layout is not supported") -> dict[str, torch.Tensor]:
        """Tensors by name, in the dtype on disk. Raises TargetError, listing what is missing or quantized; fix: what to do then."""
        missing = [name for name in names if name not in self._file_of]
        if missing:
            raise TargetError(what=f"the target's checkpoint has no tensors {missing}", where=self.folder, fix=fix)
        found: dict[str, torch.Tensor] = {}
        for file_name in sorted({self._file_of[name] for name in names}):
            try:
                with safe_open(self.folder / file_name, "pt") as file:
                    found |= {name: file.get_tensor(name) for name in names if self._file_of[name] == file_name}
            except Exception as err:  # as above
                raise _unreadable(self.folder / file_name, err) from err
        quantized = [name for name, tensor in found.items() if tensor.dtype not in FLOATS]
        if quantized:
            raise TargetError(what=f"the target's tensors {quantized} are quantized ({found[quantized[0]].dtype})", where=self.folder, fix=fix)
        return found


def read_embedding_and_head(folder: Path, shape: TargetShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedding [V, H], final norm's weight [H] and head [V, H], wherever the checkpoint keeps them; tied weights give the embedding twice.

    Raises TargetError if one is absent, quantized, or of another shape than the config says.
    """
    checkpoint = Checkpoint(folder)
    embedding, head = _embedding(checkpoint), checkpoint.one("lm_head.weight")
    norm = f"{embedding.removesuffix('embed_tokens.weight')}norm.weight"
    if shape.tie_word_embeddings or (shape.tie_word_embeddings is None and head is None):
        head = embedding
    head = head or "lm_head.weight"
    tensors = checkpoint.read([embedding, norm, head], "name a checkpoint with these tensors in bfloat16, float16 or float32: a draft shares them with its target")
    for name, wanted in ((embedding, [shape.vocab_size, shape.hidden_size]), (norm, [shape.hidden_size]), (head, [shape.vocab_size, shape.hidden_size])):
        if list(tensors[name].shape) != wanted:
            raise TargetError(what=f"the target's tensor {name} is {list(tensors[name].shape)}, its config.json says {wanted}", where=folder, fix="fetch the model again")
    return tensors[embedding], tensors[norm], tensors[head]


LAYER_TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "input_layernorm", "post_attention_layernorm")


def read_layer(folder: Path, layer: int, names: tuple[str, ...] = LAYER_TENSORS) -> dict[str, torch.Tensor]:
    """Weights of one decoder layer by their names inside it, in the dtype on disk. Raises TargetError if one is absent, as in another kind of layer, or quantized."""
    checkpoint = Checkpoint(folder)
    prefix = f"{_embedding(checkpoint).removesuffix('embed_tokens.weight')}layers.{layer}."
    tensors = checkpoint.read([f"{prefix}{name}.weight" for name in names],
                              "set train.init: random; a draft can start only from a layer of its own kind that is not quantized")
    return {name: tensors[f"{prefix}{name}.weight"] for name in names}


def _embedding(checkpoint: Checkpoint) -> str:
    return checkpoint.one("embed_tokens.weight") or "model.embed_tokens.weight"


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _unreadable(path: Path, err: Exception) -> TargetError:
    return TargetError(what=f"the target's weights cannot be read: {err}", where=path, fix="fetch the model again")
