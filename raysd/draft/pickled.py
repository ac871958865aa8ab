"""Weights in PyTorch's own format, as EAGLE's authors publish their drafts."""

from __future__ import annotations

from pathlib import Path
from zipfile import is_zipfile


def as_safetensors(path: Path) -> bytes:
    """The tensors of a file that `torch.save` wrote (`pytorch_model.bin`), as a safetensors file holds them. Runs no code of the file.

    They are in memory all together. Raises ValueError, with the reason, for a file that is damaged or holds anything but tensors by name.
    """
    from pickle import UnpicklingError

    import torch
    from safetensors.torch import save

    try:
        # What PyTorch wrote before 1.6 is no zip, and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        # Copied one by one: what shares memory, or is a part of something larger, cannot be saved as it is.
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        return save(tensors, metadata={"format": "pt"})
    except UnpicklingError as err:  # torch's own words advise to run the file's code
        raise ValueError("it is damaged, or holds more than tensors") from err
    except Exception as err:  # torch raises many kinds for a damaged file, and so does what has no tensors at its top
        raise ValueError(f"it holds no tensors by name: {err}") from err
