"""The training loop: steps, evaluations and checkpoints, the same for one worker and for many."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.batch import TargetHead
from raysd.draft.gradient import Share, StepGradient, parts_of
from raysd.draft.initial import initialise
from raysd.draft.loss import Hits, counted_rows
from raysd.draft.model import Eagle3Draft
from raysd.draft.optimiser import DraftOptimiser
from raysd.draft.replay import replay, teacher_forced_accuracy
from raysd.draft.shape import draft_shape
from raysd.draft.source import Source
from raysd.draft.unfinished import Desk, Training
from raysd.draft.workers import Workers
from raysd.draft.working import WorkingCopy
from raysd.errors import StageError
from raysd.experiment import Experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation
from raysd.target import read_shape
from raysd.target.weights import read_embedding_and_head

CURVE_EVERY = 10
"""Steps between rows of the training curve, which has one of the first step, too."""
EVALUATED_AT_ONCE = 8
"""Conversations, at most."""
SHOWN_IDS = 4
"""Prompts of a batch, in an error."""

Whole = Callable[[], AbstractContextManager[None]]


@dataclass
class Learner:
    """A draft with what its training needs, on one worker."""

    draft: Eagle3Draft
    target_head: TargetHead
    token_to_draft: torch.Tensor
    """int64 [target vocabulary]: the draft's row of a target token, -1 outside."""
    optimiser: DraftOptimiser
    threads: int


def new_learner(experiment: Experiment, target: Path, vocabulary: torch.Tensor, workers: Workers) -> Learner:
    """A draft at its starting point, the same on every worker. vocabulary: int64, ascending, the target ids that it can propose."""
    section, target_shape = experiment.train, read_shape(target)
    shape = draft_shape(experiment.draft, target_shape)
    embedding, norm, head = read_embedding_and_head(target, target_shape)
    torch.manual_seed(section.seed)
    draft = Eagle3Draft(shape, embedding, vocabulary)
    initialise(draft, norm, head)
    device = workers.device
    draft.to(device)
    workers.join(draft)
    token_to_draft = torch.full((shape.target_vocab_size,), -1)
    token_to_draft[vocabulary] = torch.arange(len(vocabulary))
    if section.loss == "lk":
        target_head = TargetHead(norm.to(device), head.to(device), shape.rms_norm_eps, vocabulary.to(device))
    else:
        target_head = TargetHead(norm.to(device), head[vocabulary].to(device), shape.rms_norm_eps)
    # Said outright: Ray starts a job's driver with OMP_NUM_THREADS=1.
    threads = section.threads or max(1, len(os.sched_getaffinity(0)) // workers.beside)
    return Learner(draft, target_head, token_to_draft.to(device), DraftOptimiser(draft, section), threads)


def learn(section: TrainSection, learner: Learner, source: Source, choose: Sequence[Conversation], workers: Workers, desk: Desk,
          whole: Whole = contextlib.nullcontext, clock: Callable[[], float] = time.monotonic) -> Training:
    """Takes the draft through the steps that are left, from the newest checkpoint on, and returns what came of it.

    choose: conversations of the choose split, to evaluate on. whole: what changes the training is done within it, so that an interruption finds the
    training between two changes, and keeps a checkpoint on its way out. clock: seconds that only grow.
    Raises StageError for a loss or weights that are no numbers, after a checkpoint of the last step that was good.
    """
    draft, optimiser, device = learner.draft, learner.optimiser, workers.device
    token_to_draft = learner.token_to_draft.cpu()  # to count with: on a GPU every count would wait for the device
    checkpoints = _Checkpoints(learner, workers, desk)
    training = checkpoints.resume()
    for row in training.curve:
        desk.note(row)
    due = {max(1, section.steps * (i + 1) // section.evaluations) for i in range(section.evaluations)}
    kept_s = clock()
    started_s = kept_s - training.elapsed_s
    # Fewer workers than asked for, where a node has died, cut their larger shares into more parts: a part must fit into memory.
    section = section.model_copy(update={"gradient_accumulation": -(-section.gradient_accumulation * section.workers // workers.count)})
    share_of_step = max(1, section.conversations_per_step // (workers.count * section.gradient_accumulation))
    beside = min(EVALUATED_AT_ONCE, share_of_step)  # an evaluation holds no more than a part of a step does: who lowers the one lowers both
    with StepGradient(draft, learner.target_head, learner.token_to_draft, section, learner.threads, parts_of(share_of_step, learner.threads, device)) as step_gradient:
        try:
            while True:
                out_of_time = section.time_budget_s is not None and training.steps > 0 and training.elapsed_s >= section.time_budget_s
                last = training.steps == section.steps or workers.first_says(out_of_time)
                evaluates = (training.steps in due or last or _due_by_time(training, section, workers)) and not training.evaluated()
                if evaluates:
                    checkpoints.check()
                    with workers.whole(draft):
                        counts, accuracy = evaluate(draft, choose, section, beside)
                    weights = checkpoints.weights()
                    with whole():
                        training.note_evaluation(weights, counts, accuracy, section.served_checkpoints)
                    desk.progress("training", training.steps, training.expected_steps(section), "steps", replay_acceptance_length=counts.acceptance_length)
                if last or evaluates or workers.first_says(clock() - kept_s >= section.checkpoint_every_s):
                    training.elapsed_s = clock() - started_s
                    checkpoints.keep(training)
                    kept_s = clock()
                if last:
                    return training
                asked_s = clock()
                conversations = source.step(training.steps)  # which may wait long, on a stream: an interruption need not
                with whole():
                    training.data_wait_s += clock() - asked_s
                    curve = training.steps % CURVE_EVERY == CURVE_EVERY - 1 or training.steps + 1 in due or training.steps in (0, section.steps - 1)
                    totals, grad_norm = _step(learner, step_gradient, conversations, token_to_draft, section, training.steps, workers, curve)
                    training.steps += 1
                    training.tokens += totals.tokens
                    training.loss_sum, training.loss_count = training.loss_sum + totals.loss, training.loss_count + 1
                    training.elapsed_s = clock() - started_s
                    if curve:
                        row = training.note(lr=section.lr * optimiser.factor(training.steps - 1), conversations=training.steps * section.conversations_per_step,
                                            grad_norm=grad_norm, memory_bytes=memory_bytes(device), workers=workers.count,
                                            **totals.figures())
                if curve:
                    desk.note(row)
                    desk.progress("training", training.steps, training.expected_steps(section), "steps", loss_nat=row["loss"], tokens_s=row["tokens_s"],
                                  simulated_acceptance_length=row["simulated_acceptance_length"])
        except (KeyboardInterrupt, StageError):
            if workers.count == 1:  # of several one may be alone with its error, and the others wait for it in the middle of something else
                checkpoints.keep(training)
            raise


def _due_by_time(training: Training, section: TrainSection, workers: Workers) -> bool:
    """Whether an evaluation is due by the time budget, whose share of them has passed: it may end long before the steps do, and leaves as many candidates."""
    if section.time_budget_s is None or training.steps == 0:
        return False
    evaluated = len({row["step"] for row in training.evaluations})
    return workers.first_says(training.elapsed_s >= section.time_budget_s * (evaluated + 1) / section.evaluations)


@dataclass(frozen=True)
class _Totals:
    """A step of all workers."""

    loss: float
    per_step: tuple[float, ...]
    tokens: int
    hits: Hits | None

    def figures(self) -> dict[str, float]:
        """Loss of each draft step, and what the hits say."""
        return {f"loss_{i}": loss for i, loss in enumerate(self.per_step, start=1)} | (self.hits.figures() if self.hits is not None else {})


def _step(learner: Learner, step_gradient: StepGradient, conversations: list[Conversation], token_to_draft: torch.Tensor, section: TrainSection, step: int,
          workers: Workers, count_hits: bool) -> tuple[_Totals, float]:
    """One optimiser step, 0-based; returns what it came to and the norm of its gradient. Raises StageError, the draft as it was, if either is no number."""
    rows = [*counted_rows(conversations, token_to_draft, section.ttt_steps), sum(len(each.token_ids) for each in conversations)]
    *counted, tokens = (int(value) for value in workers.sum(rows))
    with workers.summing_gradients(learner.draft):
        share = step_gradient(conversations, counted, count_hits)
    totals = _sum(share, tokens, workers)
    grad_norm = learner.optimiser.step(step) if math.isfinite(totals.loss) else math.nan
    if not math.isfinite(grad_norm):
        shares = workers.gather(([each.prompt_id for each in conversations], math.isfinite(share.loss)))
        mine = [ids for ids, sound in shares if not sound] or [ids for ids, _ in shares]  # where no worker's own share is at fault, any may be
        ids = sum(mine, [])
        what = f"the loss is {totals.loss}" if not math.isfinite(totals.loss) else f"the norm of the gradient is {grad_norm}"
        raise StageError(what=f"{what} at step {step + 1}, in the batch of the prompts {', '.join(ids[:SHOWN_IDS])}{', ...' if len(ids) > SHOWN_IDS else ''}"
                         + (f"; the checkpoint of step {step} is kept" if step else ", which is the first"), where="train.lr",
                         fix="lower train.lr, train.weight_decay or train.grad_clip; if one batch alone does it, look at its captured states")
    return totals, grad_norm


def _sum(share: Share, tokens: int, workers: Workers) -> _Totals:
    hits = [float(count) for part in share.hits.parts() for count in part] if share.hits is not None else []
    steps = len(share.per_step)
    loss, *values = workers.sum([share.loss, *share.per_step, *hits])
    counts = [int(value) for value in values[steps:]]
    summed = Hits(*(tuple(counts[i * steps:(i + 1) * steps]) for i in range(4))) if hits else None
    return _Totals(loss, tuple(values[:steps]), tokens, summed)


def evaluate(draft: Eagle3Draft, choose: Sequence[Conversation], section: TrainSection, beside: int) -> tuple[AcceptanceCounts, list[float]]:
    """Counts of a replay of the choose split, and the teacher-forced accuracy by position; `beside` conversations at once."""
    if section.precision == "bfloat16":
        copy = WorkingCopy(draft)
        copy.follow(draft)
        draft = copy.draft
    return replay(draft, choose, section.served_k, beside), teacher_forced_accuracy(draft, choose, section.served_k)


def memory_bytes(device: torch.device) -> int:
    """Of this worker now: the most that torch has reserved on a GPU, the process's resident memory on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().rss


class _Checkpoints:
    """Keeps a training with its draft, its optimiser and torch's random numbers, and brings them back. Only the first worker writes."""

    def __init__(self, learner: Learner, workers: Workers, desk: Desk) -> None:
        self._learner, self._workers, self._desk = learner, workers, desk
        self._written = 0
        self._kept = (0, False)

    def weights(self) -> dict[str, torch.Tensor]:
        """The draft's, whole; empty but for the first worker."""
        weights = {name: self._workers.all_of(tensor) for name, tensor in self._learner.draft.state_dict().items()}
        return weights if self._workers.rank == 0 else {}

    def resume(self) -> Training:
        """The training as the newest checkpoint left it, its draft, optimiser and random numbers set likewise; a new one if there is no checkpoint."""
        newest = self._desk.newest()
        if newest is None:
            return Training()
        training = Training(**newest["training"])
        self._learner.draft.load_state_dict({name: self._workers.mine_of(tensor) for name, tensor in newest["draft"].items()})
        self._learner.optimiser.load_state_dict(_of_moments(newest["optimiser"], self._workers.mine_of))
        torch.set_rng_state(newest["rng"])
        if self._on_gpu and newest["gpu_rng"] is not None:
            torch.cuda.set_rng_state(newest["gpu_rng"])
        self._written, self._kept = newest["written"], (training.steps, training.evaluated())
        training.resumed_steps.append(training.steps)
        return training

    def check(self) -> None:
        """Raises StageError unless every weight is a number: a step whose loss and gradient were numbers may have gone too far."""
        mine = [each.to_local() if hasattr(each, "to_local") else each for each in self._learner.draft.parameters()]
        (wrong,) = self._workers.sum([sum(not bool(torch.isfinite(each).all()) for each in mine)])
        if wrong:
            raise StageError(what="the draft's weights have become NaN or infinite; the checkpoint before, if there is one, is kept", where="train.lr", fix="lower train.lr or train.weight_decay")

    def keep(self, training: Training) -> None:
        """Keeps the training unless it is kept already. Raises StageError rather than keep weights that are no numbers."""
        if self._kept == (training.steps, training.evaluated()):
            return
        self.check()
        document = {"written": self._written + 1, "training": vars(training), "draft": self.weights(),
                    "optimiser": _of_moments(self._learner.optimiser.state_dict(), self._workers.all_of),
                    "rng": torch.get_rng_state(), "gpu_rng": torch.cuda.get_rng_state() if self._on_gpu else None}
        if self._workers.rank == 0:
            self._desk.keep(document)
        self._written, self._kept = self._written + 1, (training.steps, training.evaluated())

    @property
    def _on_gpu(self) -> bool:
        return self._workers.device.type == "cuda"


def _of_moments(states: list[dict[str, Any]], change: Callable[[torch.Tensor], torch.Tensor]) -> list[dict[str, Any]]:
    """The states of a DraftOptimiser, with each tensor of them changed."""
    return [{**each, "state": {number: {name: change(tensor) for name, tensor in moments.items()} for number, moments in each["state"].items()}} for each in states]
