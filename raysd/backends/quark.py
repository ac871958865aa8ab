"""AMD Quark: file-to-file quantization of a draft checkpoint."""

from __future__ import annotations

from pathlib import Path

from raysd.errors import StageError


def quantize_checkpoint(draft: Path, out: Path, scheme: str, exclude: list[str]) -> None:
    """Writes the quantized checkpoint of a draft folder into `out` (a Quantizer). On CPU, weights only: a draft takes seconds and no calibration data.

    The template is made here because Quark has none for an Eagle3 draft: it trains such drafts and refuses to quantize them.
    Raises StageError with Quark's own reason.
    """
    from quark.torch import LLMTemplate, ModelQuantizer

    template = LLMTemplate(model_type="eagle3_draft", exclude_layers_name=exclude)
    try:
        ModelQuantizer(template.get_config(scheme=scheme, exclude_layers=exclude)).direct_quantize_checkpoint(str(draft), str(out), device="cpu")
    except Exception as err:  # Quark raises many kinds; what it says is what the user needs
        raise StageError(what=f"Quark could not quantize the draft: {err}", where=draft, fix="check that the draft is an Eagle3 checkpoint in safetensors") from err
