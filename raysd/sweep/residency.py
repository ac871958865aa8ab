"""Whether the engines of all arms are up at once, or one after the other: decided from what a node has and what engines take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raysd.errors import ExperimentError
from raysd.sweep.engine import EngineSpec

Asked = Literal["auto", "together", "alone"]

ENGINE_BYTES = 2 * 2**30
"""Of memory, for an engine on a CPU beside its weights and its KV cache: two Python processes with torch, and what a step of a small model works on."""
MEMORY_FRAC = 0.85
"""Of the memory that is available, for engines."""
GPU_FRAC = 0.95
"""Of a GPU's memory, for all engines on it: more than vLLM finds free, with what the first engine's context takes beside its share, would end the last start."""


@dataclass(frozen=True)
class Residency:
    """How the engines of a node are held."""

    together: bool
    why: str
    """For the report and the log: the numbers that decided."""


def decide_residency(asked: Asked, specs: Sequence[EngineSpec], available_bytes: int) -> Residency:
    """Together where all fit, unless asked otherwise. available_bytes: of the node's memory, before any engine is up.

    On GPUs all arms use the same devices, so that no arm has the better ones: they are together if their shares (`gpu_memory_frac`) fit beside each
    other. Raises ExperimentError if `together` is asked for and cannot be.
    """
    if specs[0].hardware == "cpu":
        need_bytes = sum(need_of(spec) for spec in specs)
        fits = need_bytes <= MEMORY_FRAC * available_bytes
        words = f"{len(specs)} engines take about {need_bytes / 1e9:.1f} GB, of {available_bytes / 1e9:.1f} GB of memory that are available"
        remedy = "lower sweep.engine.kv_cache_bytes"
    else:
        share = sum(spec.settings.gpu_memory_frac for spec in specs)
        fits = share <= GPU_FRAC
        words = f"{len(specs)} engines take {share:.2f} of each GPU's memory (sweep.engine.gpu_memory_frac), and {GPU_FRAC:g} is the most"
        remedy = f"lower sweep.engine.gpu_memory_frac to {GPU_FRAC / len(specs):.2f}"
    if asked == "together" and not fits:
        raise ExperimentError(what=f"the engines of all arms do not fit beside each other: {words}", where="sweep.residency: together",
                              fix=f"{remedy}, or use auto or alone")
    return Residency(asked == "together" or asked == "auto" and fits, words if asked == "auto" else f"asked for; {words}")


def need_of(spec: EngineSpec) -> int:
    """Memory of one engine on a CPU, in bytes."""
    return ENGINE_BYTES + spec.settings.kv_cache_bytes + weight_bytes(spec.target) + (0 if spec.draft is None else weight_bytes(spec.draft))


def weight_bytes(folder: Path) -> int:
    """The size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or sum(path.stat().st_size for path in folder.glob("*.bin"))
