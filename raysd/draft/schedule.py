"""The learning rate and the order of conversations, as pure functions of the step."""

from __future__ import annotations

import random


def lr_factor(step: int, steps: int, warmup_frac: float, decay_frac: float) -> float:
    """Share of the peak learning rate at a step (0-based): linear rise, flat, linear fall to zero after the last step."""
    warmup, decay = warmup_frac * steps, decay_frac * steps
    rise = (step + 1) / warmup if warmup > 0 else 1.0
    fall = (steps - step) / decay if decay > 0 else 1.0
    return min(1.0, rise, fall)


def conversation_order(count: int, wanted: int, seed: int) -> list[int]:
    """`wanted` conversation indices: whole epochs, each shuffled by its own seed, so that any prefix is reproducible."""
    order: list[int] = []
    epoch = 0
    while len(order) < wanted:
        order += epoch_order(count, epoch, seed)
        epoch += 1
    return order[:wanted]


def epoch_order(count: int, epoch: int, seed: int) -> list[int]:
    """The indices of one epoch, 0-based, shuffled."""
    indices = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(indices)
    return indices
