"""A training on its way: what changes from step to step, beside the weights and the optimiser's state."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from raysd.artifacts.stage import Progress, StageRun
from raysd.draft.acceptance import AcceptanceCounts
from raysd.experiment.train import TrainSection

NAMES = ("checkpoint-0.pt", "checkpoint-1.pt")
"""Written in turn: a kill in the middle of one leaves the other."""


@dataclass
class Training:
    """What a training has come to. Plain values and tensors: it goes to disk."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    """Of all attempts, without what a killed one did after its last checkpoint."""
    data_wait_s: float = 0.0
    """Of that, what the first worker waited for conversations."""
    loss_sum: float = 0.0
    loss_count: int = 0
    """Steps since the last row of the curve; `loss_sum` is over them, in nat."""
    curve: list[dict[str, Any]] = field(default_factory=list)
    """step, elapsed_s, loss (of the steps since the last row: summed over draft steps with their weights, in nat), lr, conversations, tokens, tokens_s,
    data_wait_s, memory_bytes, workers; of the row's own step: grad_norm, loss_1, loss_2, ... (nat) and the figures of `Hits`."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """step, position, accuracy (teacher-forced), replay_acceptance_length, all on the choose split."""
    candidates: list[dict[str, Any]] = field(default_factory=list)
    """The last evaluated checkpoints, the newest last: step, replay (metrics of its walk), weights (the draft's, on the CPU)."""
    resumed_steps: list[int] = field(default_factory=list)
    """Steps at which an attempt went on from a checkpoint."""

    def note(self, **row: Any) -> dict[str, Any]:
        """Adds a row to the curve and returns it."""
        whole = {"step": self.steps, "elapsed_s": self.elapsed_s, "loss": self.loss_sum / self.loss_count, "tokens": self.tokens,
                 "tokens_s": self.tokens / self.elapsed_s, "data_wait_s": self.data_wait_s, **row}
        self.curve.append(whole)
        self.loss_sum, self.loss_count = 0.0, 0
        return whole

    def expected_steps(self, section: TrainSection) -> int:
        """At which step it will end: the last, or the one that the time budget allows at the speed so far."""
        if section.time_budget_s is None or not self.elapsed_s:
            return section.steps
        return min(section.steps, max(self.steps, round(self.steps * section.time_budget_s / self.elapsed_s)))

    def evaluated(self) -> bool:
        """Whether the draft was evaluated as it is now."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.steps

    def note_evaluation(self, weights: dict[str, torch.Tensor], counts: AcceptanceCounts, accuracy: list[float], keep: int) -> None:
        """Adds rows to the evaluations, and the weights to the candidates, of which `keep` stay."""
        for position, value in enumerate(accuracy, start=1):
            self.evaluations.append({"step": self.steps, "position": position, "accuracy": value, "replay_acceptance_length": counts.acceptance_length})
        candidate = {"step": self.steps, "replay": counts.as_metrics(), "weights": {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}}
        self.candidates = [*self.candidates, candidate][-keep:]


class Desk(Protocol):
    """Where a training reports to and keeps its checkpoints."""

    progress: Progress

    def note(self, row: dict[str, Any]) -> None:
        """Takes a row of the training curve, for whoever watches."""

    def keep(self, document: dict[str, Any]) -> None:
        """Keeps a checkpoint, whole, in the place of the older of the two last ones."""

    def newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole, on the CPU; None if there is none."""


class Writes(Protocol):
    """What a checkpoint is written to."""

    def write(self, content: Any, /) -> int: ...

    def flush(self) -> None: ...


def save(document: dict[str, Any], file: Writes) -> None:
    """torch.save. Raises what a write raised, of which torch itself says only that a position in the file is unexpected."""
    outspoken = _Outspoken(file)
    try:
        torch.save(document, outspoken)
    except Exception:
        if outspoken.error is not None:
            raise outspoken.error from None
        raise


class _Outspoken:
    """A file that keeps what was raised first."""

    def __init__(self, file: Writes) -> None:
        self._file = file
        self.error: Exception | None = None

    def write(self, content: Any) -> int:
        try:
            return self._file.write(content)
        except Exception as err:
            self.error = self.error or err
            raise

    def flush(self) -> None:
        self._file.flush()


class StageDesk:
    """The desk in the stage's own process: checkpoints are pieces of the artifact, and the curve goes to TensorBoard, if that is installed."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self.progress = run.progress
        self._board = _board(run.out / "tensorboard")

    def note(self, row: dict[str, Any]) -> None:
        """Writes a row at once, so that it is seen while the training goes on."""
        if self._board is not None:
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(f"train/{name}", value, row["step"])
            self._board.flush()

    def keep(self, document: dict[str, Any]) -> None:
        """Raises what Kept.keep raises."""
        path = self._run.work / "checkpoint.pt"
        with self._run.whole():
            with path.open("wb") as file:
                save(document, file)
            self._run.pieces.keep(NAMES[document["written"] % 2], path)

    def newest(self) -> dict[str, Any] | None:
        documents = [torch.load(path, map_location="cpu", weights_only=True) for path in map(self._run.pieces.find, NAMES) if path is not None]
        return max(documents, key=lambda document: document["written"], default=None)


def _board(folder: Path) -> Any:
    """TensorBoard's writer; None if it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
