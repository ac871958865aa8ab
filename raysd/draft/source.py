"""Where a worker's conversations come from, step after step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

from raysd.draft.gradient import balanced
from raysd.draft.schedule import ConversationOrder
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation


class Source(Protocol):
    """Conversations to learn from. A step's are the same in every attempt."""

    def step(self, number: int) -> list[Conversation]:
        """This worker's share of a step, 0-based; asked for one after the other, from any number on."""


class ReadAhead:
    """A Source that reads the next step while this one is computed. What reads, `_read`, is called for one step after the other."""

    def __init__(self, steps: int) -> None:
        """steps: of the training, 0-based ones below it can be asked for."""
        self._steps = steps
        self._reader = ThreadPoolExecutor(1)
        self._ahead: Future[list[Conversation]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)  # it may wait for a stream, whose end ends that

    def step(self, number: int) -> list[Conversation]:
        found = self._ahead.result() if self._ahead is not None else self._read(number)
        self._ahead = self._reader.submit(self._read, number + 1) if number + 1 < self._steps else None
        return found

    def _read(self, number: int) -> list[Conversation]:
        raise NotImplementedError


class CapturedSource(ReadAhead):
    """Reads a capture artifact."""

    def __init__(self, captured: Captured, section: TrainSection, rank: int, workers: int) -> None:
        super().__init__(section.steps)
        self._captured, self._rank, self._workers, self._per_step = captured, rank, workers, section.conversations_per_step
        self._order = ConversationOrder(len(captured), section.seed)

    def _read(self, number: int) -> list[Conversation]:
        chosen = self._order.between(number * self._per_step, (number + 1) * self._per_step)
        share = dealt([self._captured.tokens(i) for i in chosen], self._workers)[self._rank]
        return [self._captured[chosen[i]] for i in share]


def dealt(lengths: list[int], workers: int) -> list[list[int]]:
    """Which of a step's conversations each worker has. The longest are dealt out first, so that no worker waits long for another."""
    return [sorted(share) for share in balanced(lengths, workers)]
