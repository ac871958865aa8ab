"""The cells of a sweep in run order: pure, so that a plan can be printed before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysd.experiment.sweep import SweepSection

Engine = tuple[str, int | None]
"""Arm and k; the baseline has no k."""
NONE: Engine = ("none", None)
"""The baseline."""


@dataclass(frozen=True)
class Cell:
    """One point to measure."""

    arm: str
    workload: str
    osl: int
    concurrency: int
    k: int | None
    """None for the arm `none`, which drafts nothing: one cell of it is the baseline of every k."""
    block: int
    """From 0."""
    requests: int

    @property
    def engine(self) -> Engine:
        return self.arm, self.k

    @property
    def compared(self) -> tuple[int, str, int]:
        """The same for all cells that are compared with each other: block, workload and concurrency."""
        return self.block, self.workload, self.concurrency

    def label(self) -> str:
        """A few words for progress and messages."""
        drafting = f", k {self.k}" if self.k is not None else ""
        return f"{self.arm}{drafting}, {self.workload}, concurrency {self.concurrency}, block {self.block + 1}"

    def identity(self) -> dict[str, Any]:
        """The values that make this cell this cell, JSON-ready."""
        return {"arm": self.arm, "workload": self.workload, "osl": self.osl, "concurrency": self.concurrency, "k": self.k,
                "block": self.block, "requests": self.requests}


def plan_engines(sweep: SweepSection) -> list[Engine]:
    """Every engine that the sweep needs."""
    return [(arm, k) for arm in sweep.arms for k in ([None] if arm == "none" else sweep.k)]


def engine_name(engine: Engine) -> str:
    """A name for logs and tables: `none`, `bf16-k3`."""
    arm, k = engine
    return arm if k is None else f"{arm}-k{k}"


def plan_block(sweep: SweepSection, block: int, together: bool) -> list[Cell]:
    """The cells of one block in run order; blocks go A B C, C B A, ..., so that drift hits all arms alike.

    together: all engines are up at once. Then the arms take turns at each workload and concurrency, and what is compared is measured within minutes of each
    other. Otherwise an arm does all of its cells before the next one's engine starts, and the last engine of a block is the first of the next.
    """
    engines = plan_engines(sweep)
    in_turn = engines if block % 2 == 0 else engines[::-1]
    points = [(workload, concurrency) for workload in sweep.workloads for concurrency in sweep.concurrency]
    order = ([(engine, point) for point in points for engine in in_turn] if together
             else [(engine, point) for engine in in_turn for point in points])
    return [Cell(arm=arm, workload=workload.name, osl=workload.osl, concurrency=concurrency, k=k, block=block,
                 requests=concurrency * sweep.requests_per_slot_of(workload))
            for (arm, k), (workload, concurrency) in order if concurrency in sweep.concurrency_of(arm)]
