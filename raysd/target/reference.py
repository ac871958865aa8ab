"""What Hugging Face's own model computes for some tokens: the reference that captured states are held against."""

from __future__ import annotations

from pathlib import Path

import torch

from raysd.experiment.target import TargetSection


def reference_states(folder: Path, section: TargetSection, token_ids: list[int], layer_ids: list[int]) -> torch.Tensor:
    """Residual stream [T, len(layer_ids), H], float32, entering each layer (id n: the last hidden state before the final norm), for T tokens.

    Hooks rather than `output_hidden_states`, whose last entry is the normed state (HF index n is not vLLM's id n).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, section.dtype), trust_remote_code=section.trust_remote_code)
    model.eval()
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
