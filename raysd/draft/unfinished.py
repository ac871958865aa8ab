"""A training on its way: what changes from step to step, and the checkpoints from which a later attempt goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.model import Eagle3Draft

NAMES = ("checkpoint-0.pt", "checkpoint-1.pt")
"""Written in turn: a kill in the middle of one leaves the other."""


@dataclass
class Training:
    """What a training has come to, beside the weights and the optimiser's state. Plain values and tensors: it goes to disk."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    """Of all attempts, without what a killed one did after its last checkpoint."""
    loss_sum: float = 0.0
    loss_count: int = 0
    """Steps since the last row of the curve; `loss_sum` is over them, in nat."""
    curve: list[dict[str, Any]] = field(default_factory=list)
    """step, elapsed_s, loss (summed over draft steps, in nat), lr, conversations, tokens."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """step, position, accuracy (teacher-forced), replay_acceptance_length, all on the choose split."""
    best_step: int = 0
    best_replay: dict[str, Any] = field(default_factory=dict)
    """Metrics of the replay with the longest acceptance length; empty before the first."""
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The draft's at that step, on the CPU."""
    resumed_steps: list[int] = field(default_factory=list)
    """Steps at which an attempt went on from a checkpoint."""

    def note_loss(self, lr: float, conversations: int) -> dict[str, Any]:
        """Adds a row to the curve and returns it."""
        row = {"step": self.steps, "elapsed_s": self.elapsed_s, "loss": self.loss_sum / self.loss_count, "lr": lr, "conversations": conversations, "tokens": self.tokens}
        self.curve.append(row)
        self.loss_sum, self.loss_count = 0.0, 0
        return row

    def evaluated(self) -> bool:
        """Whether the draft was evaluated as it is now."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.steps

    def note_evaluation(self, draft: Eagle3Draft, counts: AcceptanceCounts, accuracy: list[float]) -> bool:
        """Adds rows to the evaluations, and keeps the weights if none were better; returns whether it did."""
        for position, value in enumerate(accuracy, start=1):
            self.evaluations.append({"step": self.steps, "position": position, "accuracy": value, "replay_acceptance_length": counts.acceptance_length})
        better = not self.best_replay or counts.acceptance_length > self.best_replay["acceptance_length"]
        if better:
            self.best_step, self.best_replay = self.steps, counts.as_metrics()
            self.best_weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in draft.state_dict().items()}
        return better


class Checkpoints:
    """Keeps a training with its draft, its optimiser and torch's random numbers, and brings them back."""

    def __init__(self, run: StageRun, draft: Eagle3Draft, optimiser: torch.optim.Optimizer) -> None:
        self._run, self._draft, self._optimiser = run, draft, optimiser
        self._written = 0
        self._kept = (0, False)

    def resume(self) -> Training:
        """The training as the newest checkpoint left it, its draft, optimiser and random numbers set likewise; a new one if there is no checkpoint."""
        newest = None
        for path in filter(None, map(self._run.pieces.find, NAMES)):
            document = torch.load(path, map_location="cpu", weights_only=True)
            if newest is None or document["written"] > newest["written"]:
                newest = document
        if newest is None:
            return Training()
        training = Training(**newest["training"])
        self._draft.load_state_dict(newest["draft"])
        self._optimiser.load_state_dict(newest["optimiser"])
        torch.set_rng_state(newest["rng"])
        if self._on_gpu and newest["gpu_rng"] is not None:
            torch.cuda.set_rng_state(newest["gpu_rng"])
        self._written, self._kept = newest["written"], (training.steps, training.evaluated())
        training.resumed_steps.append(training.steps)
        return training

    def keep(self, training: Training) -> None:
        """Keeps the training, whole, unless it is kept already. Raises what Kept.keep raises."""
        if self._kept == (training.steps, training.evaluated()):
            return
        name, path = NAMES[self._written % 2], self._run.work / "checkpoint.pt"
        document = {"written": self._written + 1, "training": vars(training), "draft": self._draft.state_dict(), "optimiser": self._optimiser.state_dict(),
                    "rng": torch.get_rng_state(), "gpu_rng": torch.cuda.get_rng_state() if self._on_gpu else None}
        with self._run.whole():
            with path.open("wb") as file:  # not by its path: torch would then say of a full disk only that a position is unexpected
                torch.save(document, file)
            self._run.pieces.keep(name, path)
            self._written, self._kept = self._written + 1, (training.steps, training.evaluated())

    @property
    def _on_gpu(self) -> bool:
        return self._draft.embedding.device.type == "cuda"
