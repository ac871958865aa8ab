"""`hardware:` the kind of machine, and what each stage asks Ray for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raysd.experiment.section import Placement, Section

StageName = Literal["capture", "train", "quantize", "sweep", "report"]


class StageResources(Section):
    """What one stage's Ray job asks the scheduler for; what it does not ask for is not reserved."""

    cpus: Placement[float] = Field(0, ge=0)
    """CPU cores that Ray reserves."""
    gpus: Placement[float] = Field(0, ge=0)
    """GPUs that Ray reserves."""
    memory_bytes: Placement[int] = Field(0, ge=0)
    """Memory that Ray reserves."""
    custom: Placement[dict[str, Annotated[float, Field(ge=0)]]] = {}
    """Custom Ray resources, for instance `{accelerator_type:AMD-Instinct-MI355X-OAM: 0.001}`."""


class HardwareSection(Section):
    name: str = "cpu"
    """A short name of the catalogue (`raysd/hardware/hardware.yaml`), or `cpu` for vLLM's CPU build."""
    resources: Placement[dict[StageName, StageResources]] = {}
    """Stage name to resources; a stage that is not named asks for nothing and runs on the head node."""
