"""What Hugging Face's own model computes for some tokens: the reference that captured states are held against."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from raysd.experiment.target import TargetSection
from raysd.target.locate import read_config

LARGEST_MEMORY_FRAC = 0.25
"""Of the node's memory, for the weights of a model that is loaded beside an engine."""


def why_no_reference(folder: Path, memory_bytes: int | None = None) -> str | None:
    """Why Hugging Face's own model cannot serve as a reference for the target in a folder; None if it can.

    memory_bytes: the node's; None: asked from the system.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(folder, "target.model")
    if config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no language model of type {config.get('model_type')} without code from elsewhere"
    if config.get("quantization_config"):
        return f"the target's weights are quantized ({config['quantization_config'].get('quant_method')})"
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if weights_bytes > LARGEST_MEMORY_FRAC * memory_bytes:
        return f"the target's weights are {weights_bytes / 2**30:.0f} GiB, the node's memory is {memory_bytes / 2**30:.0f} GiB"
    return None


def reference_states(folder: Path, section: TargetSection, token_ids: list[int], layer_ids: list[int]) -> torch.Tensor:
    """`entered_states` of the model in a folder. Not beside a training in the same process: loading changes torch's default dtype for a while."""
    from transformers import AutoModelForCausalLM

    return entered_states(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, section.dtype)).eval(), token_ids, layer_ids)


def entered_states(model: Any, token_ids: list[int], layer_ids: list[int]) -> torch.Tensor:
    """Residual stream [T, len(layer_ids), H], float32, entering each layer (id n: the last hidden state before the final norm), for T tokens.

    model: Hugging Face's, for causal language modelling. Hooks rather than `output_hidden_states`, whose last entry is the normed state (HF index n is not
    vLLM's id n).
    """
    decoder = model.get_decoder()
    entered: dict[int, torch.Tensor] = {}

    def keep(layer_id: int):
        def hook(module, args, kwargs):
            entered[layer_id] = (args[0] if args else kwargs["hidden_states"])[0].float()
        return hook

    modules = list(decoder.layers) + [decoder.norm]
    handles = [modules[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in layer_ids]
    try:
        with torch.no_grad():
            decoder(input_ids=torch.tensor([token_ids]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([entered[i] for i in layer_ids], dim=1)
