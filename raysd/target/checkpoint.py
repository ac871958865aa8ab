"""What a target's checkpoint holds, told from the headers of its safetensors files: `raysd plan` asks, so no tensor is read, and neither torch nor numpy imported.

Format: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.errors import ExperimentError, TargetError
from raysd.target.shape import TargetShape

ELSEWHERE = {"layers", "mtp", "vision_tower", "visual"}
"""Parts of names of what lies below the model itself."""
FLOATS = ("BF16", "F16", "F32")
"""As safetensors names them; a weight of another type is quantized, or of a precision that no model is served in."""


@dataclass(frozen=True)
class Header:
    """What a file says of one tensor."""

    dtype: str
    shape: list[int]


class Checkpoint:
    """The tensors of a checkpoint folder, sharded or not, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the index, or the files' headers. Raises TargetError if a file is absent or damaged."""
        self.folder = folder
        self._headers: dict[str, dict[str, Header]] = {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                self._file_of: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as err:
                raise unreadable(index, err) from err
        else:
            self._file_of = {name: path.name for path in sorted(folder.glob("*.safetensors")) for name in self._header(path.name)}

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

    def prefix(self) -> str:
        """What stands before the names of the model's own tensors."""
        return (self.one("embed_tokens.weight") or "model.embed_tokens.weight").removesuffix("embed_tokens.weight")

    def files(self, names: Sequence[str]) -> dict[Path, list[str]]:
        """The files that hold tensors, each with the names of its own; names that are absent are in none."""
        found: dict[Path, list[str]] = {}
        for name in names:
            if name in self._file_of:
                found.setdefault(self.folder / self._file_of[name], []).append(name)
        return found

    def headers(self, names: Sequence[str]) -> dict[str, Header]:
        """Of the tensors that are there. Raises TargetError if a file is absent or damaged."""
        found: dict[str, Header] = {}
        for path, inside in self.files(names).items():
            header = self._header(path.name)
            absent = [name for name in inside if name not in header]
            if absent:
                raise unreadable(path, ValueError(f"the index says that it holds {absent}"))
            found |= {name: header[name] for name in inside}
        return found

    def _header(self, file_name: str) -> dict[str, Header]:
        if file_name not in self._headers:
            path = self.folder / file_name
            try:
                self._headers[file_name] = _read_header(path)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
                raise unreadable(path, err) from err
        return self._headers[file_name]


def check_shared(folder: Path, shape: TargetShape) -> tuple[str, str, str]:
    """The names of embedding [V, H], final norm [H] and head [V, H], wherever the checkpoint keeps them; tied weights give the embedding twice.

    Raises ExperimentError if one is absent, quantized, or of another shape than the config says; TargetError if a file is absent or damaged.
    """
    checkpoint = Checkpoint(folder)
    prefix, head = checkpoint.prefix(), checkpoint.one("lm_head.weight")
    embedding, norm = f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"
    if shape.tie_word_embeddings or (shape.tie_word_embeddings is None and head is None):
        head = embedding
    head = head or "lm_head.weight"
    names = [embedding, norm, head]
    headers = checkpoint.headers(names)
    missing = [name for name in names if name not in headers]
    other = [name for name in headers if headers[name].dtype not in FLOATS]
    if missing or other:
        raise ExperimentError(what=f"the target's checkpoint has no tensors {missing}" if missing else f"the target's tensors {other} are stored as {headers[other[0]].dtype}",
                              where=f"target.model ({folder})", fix="name a checkpoint with these tensors in bfloat16, float16 or float32: a draft shares them with its target")
    for name, wanted in ((embedding, [shape.vocab_size, shape.hidden_size]), (norm, [shape.hidden_size]), (head, [shape.vocab_size, shape.hidden_size])):
        if headers[name].shape != wanted:
            raise ExperimentError(what=f"the target's tensor {name} is {headers[name].shape}, its config.json says {wanted}", where=f"target.model ({folder})",
                                  fix="name a checkpoint whose config.json is its own, or fetch the model again")
    return embedding, norm, head


def unreadable(path: Path, err: Exception) -> TargetError:
    """For a file of weights that is absent or damaged."""
    return TargetError(what=f"the target's weights cannot be read: {err}", where=path, fix="fetch the model again")


def _read_header(path: Path) -> dict[str, Header]:
    """By a tensor's name. Raises ValueError, TypeError, KeyError or AttributeError for a file that is cut off or of another format."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size_bytes - 8:
            raise ValueError("it is no safetensors file, or is cut off")
        entries: dict[str, Any] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    told_bytes = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if told_bytes != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, by its header {told_bytes}")
    return {name: Header(entry["dtype"], entry["shape"]) for name, entry in entries.items()}
