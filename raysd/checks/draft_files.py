"""A finished draft's weight files, as vLLM picks them, and the tensors in them: dtype, shape and bytes, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysd.checks.draft_config import read_json, refuse, unreadable

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
"""What trainers leave beside the weights; vLLM passes over files that end so (model_loader/weight_utils.py)."""
EXPONENT_BITS = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F80_0000), "F64": ("<u8", 0x7FF0_0000_0000_0000)}
"""By dtype, in safetensors' words: the unsigned integer of its width, and the bits that are all set in infinities and NaN alone."""
WHOLE = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"}
"""numpy's names of the integers."""
PART = 2**24
"""Numbers looked at together: memory does not grow with the tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    dtype: str
    """In safetensors' words: BF16, F8_E4M3, I64, ..."""
    shape: list[int]
    content: np.ndarray
    """uint8, its bytes in row-major order, little endian; mapped from the disk, where it lies there as such."""

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite, for a dtype of EXPONENT_BITS."""
        unsigned, exponent = EXPONENT_BITS[self.dtype]
        bits = self.content.view(unsigned)
        return not any(((bits[start:start + PART] & exponent) == exponent).any() for start in range(0, len(bits), PART))

    def is_zero(self) -> bool:
        """Whether every number is 0 or -0, for a dtype of EXPONENT_BITS."""
        bits = self.content.view(EXPONENT_BITS[self.dtype][0])
        return not any((bits[start:start + PART] << 1).any() for start in range(0, len(bits), PART))  # without the sign


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the draft: safetensors, those of the index if it has one; without any, PyTorch's own *.bin.

    Raises ExperimentError if there are none.
    """
    if (folder / INDEX).is_file():
        named = read_json(folder, INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(_is_beside(folder, name) for name in named.values()):
            raise unreadable(folder / INDEX, "names weight files that are not beside it")
        files = [folder / name for name in sorted(set(named.values()))]
    else:
        files = _found(folder, "*.safetensors") or [path for path in _found(folder, "*.bin") if not path.name.endswith(NO_WEIGHTS)]
    if not files:
        raise unreadable(folder / "config.json", "has no weights beside it, neither *.safetensors nor *.bin")
    if len({path.name.startswith("consolidated") for path in files}) > 1:
        names = ", ".join(path.name for path in files)
        refuse(folder, f"its weights are {names}, and vLLM would load those alone that are called consolidated", "name a copy without one of the two kinds")
    return files


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor, by `plain_name`. Raises ExperimentError if a file is not whole, or if a tensor is there twice."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        content = read_content(path)
        header, start = _header(content)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if plain_name(name) in tensors:
                refuse(folder, f"its weights hold {plain_name(name)} twice")
            begin, end = entry["data_offsets"]
            tensors[plain_name(name)] = StoredTensor(entry["dtype"], entry["shape"], content[start + begin:start + end])
    return tensors


def plain_name(name: str) -> str:
    """A tensor's name without what trainers differ in: `model.` in front, `midlayer.` for the first layer."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def read_content(path: Path) -> np.ndarray:
    """uint8: a weight file as safetensors lays it out (huggingface.co/docs/safetensors), mapped from the disk or made of PyTorch's.

    Raises ExperimentError if it is not whole.
    """
    import numpy as np  # late: `raysd plan` loads it only beside a finished draft
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".bin":
            from raysd.draft.pickled import as_safetensors  # late: it loads torch

            return np.frombuffer(as_safetensors(path), np.uint8)
        with safe_open(path, "np"):  # looks at the header and the file's size
            return np.memmap(path, np.uint8, "r")
    except (SafetensorError, OSError, ValueError) as err:
        raise unreadable(path, f"cannot be read: {err}") from err


def write_renamed(content: np.ndarray, out: Path, renamed: dict[str, str]) -> None:
    """The same tensors as a safetensors file, byte for byte, some under other names: only the header is written anew."""
    header, start = _header(content)
    text = json.dumps({renamed.get(name, name): entry for name, entry in header.items()}).encode()
    text += b" " * (-len(text) % 8)
    with out.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(content[start:])


def names_in(content: np.ndarray) -> list[str]:
    """The tensors' names as they stand in a file."""
    return [name for name in _header(content)[0] if name != "__metadata__"]


def _header(content: np.ndarray) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    return json.loads(content[8:start].tobytes()), start


def _is_beside(folder: Path, name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and (folder / name).is_file()


def _found(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file())
