"""The gradient of one optimiser step; on a CPU several threads share the conversations of the step.

An Eagle3 draft is small: its products give two threads little to share, and they spend much of their time waiting for each other. On two cores, a step
whose conversations are shared out took 1.3 to 1.4 times fewer seconds (tests/benchmarks/training_threads.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from raysd.draft.batch import ROW_BUCKET, TargetHead, pack
from raysd.draft.loss import counted_rows, unrolled_loss
from raysd.draft.model import Eagle3Draft
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation


class StepGradient:
    """Sets the gradients of a draft for the conversations of a step. A context manager: on exit its threads have ended."""

    def __init__(self, draft: Eagle3Draft, target_head: TargetHead, token_to_draft: torch.Tensor, section: TrainSection, threads: int, parts: int) -> None:
        """threads: of the CPU, shared evenly by `parts` (`parts_of`). Leaves torch's number of threads in the calling thread at a part's share, too:
        OpenMP's threads spin for a while after each use, on cores that the parts need.
        """
        self._draft, self._target_head, self._token_to_draft, self._section, self._parts = draft, target_head, token_to_draft, section, parts
        self._device = draft.embedding.device
        self._token_to_draft_cpu = token_to_draft.cpu()  # to count with: on a GPU every count would wait for the device
        torch.set_num_threads(max(1, threads // parts))
        self._pool = ThreadPoolExecutor(parts, initializer=torch.set_num_threads, initargs=(max(1, threads // parts),))
        together = threading.Barrier(parts)
        list(self._pool.map(lambda _: together.wait(), range(parts)))  # all threads are there, and set up, before one of them computes
        self._first = True

    def __enter__(self) -> StepGradient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, conversations: Sequence[Conversation]) -> float:
        """Sets `.grad` of every parameter and returns the loss, in nat. The same for any number of threads, up to rounding, and reproducible for one."""
        counted = counted_rows(conversations, self._token_to_draft_cpu, self._section.ttt_steps)
        parts = balanced([len(each.token_ids) for each in conversations], self._parts)
        results = list(self._results([[conversations[i] for i in part] for part in parts], counted))
        for gradients in zip(self._draft.parameters(), *(gradients for _, gradients in results), strict=True):
            parameter, total, *others = gradients
            for other in others:  # in the order of the parts, so that a sum of floats comes out the same each time
                total.add_(other)
            parameter.grad = total
        return sum(loss for loss, _ in results)

    def _results(self, parts: Sequence[Sequence[Conversation]], counted: list[int]) -> Iterator[tuple[float, tuple[torch.Tensor, ...]]]:
        # The first time one after the other: torch's libraries choose their kernels when they are first used, and when two threads did so at once, one process
        # in forty had other last bits in its first gradient.
        if self._first:
            self._first = False
            return (self._pool.submit(self._part, part, counted).result() for part in parts)
        return self._pool.map(lambda part: self._part(part, counted), parts)

    def _part(self, conversations: Sequence[Conversation], counted: list[int]) -> tuple[float, tuple[torch.Tensor, ...]]:
        section = self._section
        batch = pack(conversations, section.ttt_steps, self._device, ROW_BUCKET)
        # Without the cache of rounded weights: all threads share it, and the first to leave empties it, so that sums would depend on who is faster.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=section.autocast == "bfloat16", cache_enabled=False):
            loss = unrolled_loss(self._draft, batch, self._target_head, self._token_to_draft, section.ttt_steps, section.ttt_decay, counted).loss
        return float(loss.detach()), torch.autograd.grad(loss, list(self._draft.parameters()))


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
