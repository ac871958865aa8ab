"""The gradient of one optimiser step; on a CPU several threads share the conversations of the step.

An Eagle3 draft is small: its products give two threads little to share, and they spend much of their time waiting for each other. On two cores, a step
whose conversations are shared out took 1.3 to 1.4 times fewer seconds (tests/benchmarks/training_threads.py).
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch

from raysd.draft.batch import ROW_BUCKET, TargetHead, pack
from raysd.draft.loss import Hits, unrolled_loss
from raysd.draft.model import Eagle3Draft
from raysd.draft.working import WorkingCopy
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation

TOKENS_OF_A_PART = 640
"""On a CPU: fewer leave the matrices' products too little to do, more do not stay in its caches."""


class StepGradient:
    """Sets the gradients of a draft for the conversations of a step. A context manager: on exit its threads have ended."""

    def __init__(self, draft: Eagle3Draft, target_head: TargetHead, token_to_draft: torch.Tensor, section: TrainSection, threads: int, parts: int) -> None:
        """threads: of the CPU, shared evenly by `parts` (`parts_of`). Leaves torch's number of threads in the calling thread at a part's share, too:
        OpenMP's threads spin for a while after each use, on cores that the parts need.
        """
        self._draft, self._target_head, self._token_to_draft, self._section, self._parts = draft, target_head, token_to_draft, section, parts
        self._device = draft.embedding.device
        torch.set_num_threads(max(1, threads // parts))
        self._pool = ThreadPoolExecutor(parts, initializer=torch.set_num_threads, initargs=(max(1, threads // parts),))
        together = threading.Barrier(parts)
        list(self._pool.map(lambda _: together.wait(), range(parts)))  # all threads are there, and set up, before one of them computes
        self._first = True
        self._copy: WorkingCopy | None = None

    def __enter__(self) -> StepGradient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, conversations: Sequence[Conversation], counted: Sequence[int], count_hits: bool = False) -> Share:
        """Sets `.grad` of every parameter for some conversations of a step. The same for any number of threads, up to rounding, and reproducible for one.

        counted: `counted_rows` of all conversations of the step, those of other workers too.
        """
        for parameter in self._draft.parameters():
            parameter.grad = None
        if self._section.precision == "bfloat16":
            self._copy = self._copy or WorkingCopy(self._draft)
            self._copy.follow(self._draft)
        shares = []
        for micro in balanced([len(each.token_ids) for each in conversations], self._section.gradient_accumulation):
            mine = [conversations[i] for i in micro]
            lengths = [len(each.token_ids) for each in mine]
            parts = balanced(lengths, self._parts * self._turns(sum(lengths)))
            for share, gradients in self._results([[mine[i] for i in part] for part in parts], counted, count_hits):
                shares.append(share)
                for parameter, gradient in zip(self._draft.parameters(), gradients, strict=True):  # in the order of the parts: a sum of floats then comes out the same each time
                    parameter.grad = gradient.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(gradient)
        return functools.reduce(operator.add, shares)

    def _turns(self, tokens: int) -> int:
        """How many parts each thread of a CPU computes one after the other."""
        return max(1, round(tokens / self._parts / TOKENS_OF_A_PART)) if self._device.type == "cpu" else 1

    def _results(self, parts: Sequence[Sequence[Conversation]], counted: Sequence[int], count_hits: bool) -> Iterator[tuple[Share, tuple[torch.Tensor, ...]]]:
        # The first time one after the other: torch's libraries choose their kernels when they are first used, and when two threads did so at once, one process
        # in forty had other last bits in its first gradient.
        if self._first:
            self._first = False
            return (self._pool.submit(self._part, part, counted, count_hits).result() for part in parts)
        return self._pool.map(lambda part: self._part(part, counted, count_hits), parts)

    def _part(self, conversations: Sequence[Conversation], counted: Sequence[int], count_hits: bool) -> tuple[Share, tuple[torch.Tensor, ...]]:
        section = self._section
        batch = pack(conversations, section.ttt_steps, self._device, ROW_BUCKET)
        draft = self._draft if self._copy is None else self._copy.draft
        unrolled = unrolled_loss(draft, batch, self._target_head, self._token_to_draft, section, counted, count_hits)
        gradients = torch.autograd.grad(unrolled.loss, list(draft.parameters()))
        return Share(float(unrolled.loss.detach()), tuple(unrolled.per_step), unrolled.hits), gradients


@dataclass(frozen=True)
class Share:
    """What some conversations of a step add to it."""

    loss: float
    """In nat, summed over draft steps with their weights."""
    per_step: tuple[float, ...]
    """Of each draft step, in nat, without its weight."""
    hits: Hits | None
    """None unless asked for."""

    def __add__(self, other: Share) -> Share:
        per_step = tuple(a + b for a, b in zip(self.per_step, other.per_step, strict=True))
        return Share(self.loss + other.loss, per_step, None if self.hits is None else self.hits + other.hits)


def parts_of(conversations: int, threads: int, device: torch.device) -> int:
    """Into how many parts a step of so many conversations is cut: one for each thread of a CPU; a GPU takes the step at once."""
    return min(threads, conversations) if device.type == "cpu" else 1


def balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices shared out to at most `parts` lists of about equal total length: the longest first, each to the lightest list."""
    shares: list[list[int]] = [[] for _ in range(min(parts, len(lengths)))]
    totals = [0] * len(shares)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = totals.index(min(totals))
        shares[lightest].append(index)
        totals[lightest] += lengths[index]
    return shares
