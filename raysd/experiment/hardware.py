"""`hardware:` the kind of machine, and what each stage asks Ray for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from packaging.version import InvalidVersion, Version
from pydantic import Field, field_validator

from raysd.experiment.section import Placement, Section

SECRET_NAME = re.compile(r"SECRET|(^|_)(TOKEN|PASSWORD|CREDENTIALS?|ACCESS_KEY(_ID)?|API_KEY)$", re.IGNORECASE)
"""Names of variables that hold a secret."""

StageName = Literal["capture", "train", "quantize", "sweep", "report"]


def read_version(text: str) -> Version:
    """A version as Python packages have it. Raises ValueError for anything else."""
    try:
        return Version(text)
    except InvalidVersion:
        raise ValueError(f"{text!r} is no version; write it as 0.24.0, 0.24.1rc1.dev12 or 0.24.0+rocm722") from None


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

    def words(self) -> str:
        """What is asked for, in a few words."""
        asked = [f"{amount:g} {name}" for name, amount in (("cpu", self.cpus), ("gpu", self.gpus), ("GB", self.memory_bytes / 1e9), *self.custom.items()) if amount]
        return ", ".join(asked) or "none"


class HardwareSection(Section):
    name: str = "cpu"
    """A short name of the catalogue (`raysd/hardware/hardware.yaml`), or `cpu` for vLLM's CPU build."""
    vllm: Placement[str | None] = None
    """The vLLM version on the cluster, for instance `0.24.0`, which `raysd doctor` checks the experiment against; null: the installed one."""
    resources: Placement[dict[StageName, StageResources]] = {}
    """Stage name to resources; a stage that is not named asks for nothing and runs on the head node."""
    env: Placement[dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], str]] = {}
    """Environment variables of every stage's job, on top of the node's own: what the machines need, such as HF_HOME. What changes the answers of
    engines belongs into sweep.engine.env."""

    usd_per_hour: float | None = Field(None, gt=0)
    """Price of what one engine of the sweep runs on, all its GPUs together: the report then says what a million tokens of output cost."""

    def of_stage(self, stage: str) -> StageResources:
        """What a stage's job asks for."""
        return self.resources.get(stage, StageResources())

    @field_validator("vllm")
    @classmethod
    def _a_version(cls, vllm: str | None) -> str | None:
        if vllm is not None:
            read_version(vllm)
        return vllm

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        secret = [name for name in env if SECRET_NAME.search(name)]
        if secret:
            raise ValueError(f"{secret[0]}: the experiment is stored beside every result, and a secret must not be; set it in the nodes' own environment")
        return env
