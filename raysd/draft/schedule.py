"""The learning rate and the order of conversations, as pure functions of the step."""

from __future__ import annotations

import random
from array import array


def lr_factor(step: int, steps: int, warmup_frac: float, decay_frac: float) -> float:
    """Share of the peak learning rate at a step (0-based): linear rise, flat, linear fall to zero after the last step."""
    warmup, decay = warmup_frac * steps, decay_frac * steps
    rise = (step + 1) / warmup if warmup > 0 else 1.0
    fall = (steps - step) / decay if decay > 0 else 1.0
    return min(1.0, rise, fall)


class ConversationOrder:
    """Which conversation comes when: whole epochs, each shuffled by its own seed, so that any place of it is reproducible. Holds one epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch, self._indices = -1, array("q")

    def between(self, start: int, stop: int) -> list[int]:
        """Conversation indices of the places start to stop - 1, counted over all epochs."""
        found = []
        for place in range(start, stop):
            epoch, within = divmod(place, self._count)
            if epoch != self._epoch:
                self._epoch, self._indices = epoch, array("q", epoch_order(self._count, epoch, self._seed))
            found.append(self._indices[within])
        return found


def epoch_order(count: int, epoch: int, seed: int) -> list[int]:
    """The indices of one epoch, 0-based, shuffled."""
    indices = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(indices)
    return indices
