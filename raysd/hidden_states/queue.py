"""What the queue of a stream (`capture.mode: stream`) has to hold: known before anything runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysd.errors import ExperimentError
from raysd.experiment import Experiment

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class MostBytes:
    """The most that the hidden states of an experiment can take."""

    conversation: int
    group: int
    slots: int
    """Conversations that the queue must be able to hold."""


def state_bytes(experiment: Experiment, layers: int, hidden_size: int) -> int:
    """Of one token's states. layers: how many of the target's are captured."""
    return layers * hidden_size * ELEMENT_BYTES[experiment.target.dtype]


def most_bytes(experiment: Experiment, train_tokens: Sequence[int], choose_tokens: Sequence[int], layers: int, hidden_size: int) -> MostBytes:
    """What the longest prompts come to, each with the longest answer. train_tokens, choose_tokens: of each prompt of the two splits.

    One worker takes states out when they arrive. Several leave them in the queue until they take them, so those of a group whose first answer comes last, of the
    step that they have been dealt, and of the one that is being put together.
    """
    capture, train = experiment.capture, experiment.train
    each = state_bytes(experiment, layers, hidden_size)
    longest = sorted([*train_tokens, *choose_tokens], reverse=True)[:capture.shard_conversations]
    group = min(capture.shard_conversations, max(len(train_tokens), len(choose_tokens)))
    return MostBytes((longest[0] + capture.max_tokens) * each, (sum(longest) + len(longest) * capture.max_tokens) * each,
                     1 if train.workers == 1 else group + 2 * train.conversations_per_step)


def check_queue(experiment: Experiment, most: MostBytes) -> None:
    """Raises ExperimentError for a queue that is too small."""
    queue_bytes, needed_bytes = experiment.capture.queue_bytes, most.conversation * most.slots
    if needed_bytes > queue_bytes:
        alone = most.slots == 1
        raise ExperimentError(what=f"the hidden states of {'one conversation' if alone else f'{most.slots} conversations'} take up to {needed_bytes} bytes, "
                              f"the queue has {queue_bytes}", where="capture.queue_bytes",
                              fix=f"raise it to at least {needed_bytes}, on a cluster whose object store is larger (ray start --object-store-memory), or lower "
                              + ("capture.max_tokens" if alone else "capture.max_tokens or capture.shard_conversations: where several workers take the states, a group "
                                 "and two steps of them wait in the queue"))
