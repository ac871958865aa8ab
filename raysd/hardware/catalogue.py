"""The catalogue of machines: `cpu`, and what `hardware.yaml` lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raysd.errors import ExperimentError

CATALOGUE = Path(__file__).parent / "hardware.yaml"
CPU = "cpu"


@dataclass(frozen=True)
class Machine:
    """One kind of machine."""

    name: str
    gpus_per_node: int | None
    """None: not known here, so not checked."""
    accelerator_type: str | None = None
    """What Ray calls its accelerators; None for `cpu`."""
    gfx: str | None = None
    """What ROCm calls its GPUs' architecture, such as gfx950; None: none of AMD's, or not known here."""
    memory_bytes: int | None = None
    """Of one GPU; None: not known here."""


def find_machine(name: str) -> Machine:
    """The machine of a short name. Raises ExperimentError, listing the known names, for any other."""
    machines = _machines()
    if name not in machines:
        raise ExperimentError(
            what=f"the hardware {name!r} is not in the catalogue", where="hardware.name", fix=f"use one of: {', '.join(machines)}"
        )
    return machines[name]


@cache
def _machines() -> dict[str, Machine]:
    import yaml

    listed = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    machines = [Machine(name=facts["name"], gpus_per_node=facts.get("gpus_per_node"), accelerator_type=listed_as, gfx=facts.get("gfx"),
                        memory_bytes=None if facts.get("memory_bytes") is None else int(facts["memory_bytes"])) for listed_as, facts in listed.items()]
    return {CPU: Machine(CPU, gpus_per_node=0)} | {machine.name: machine for machine in machines}
