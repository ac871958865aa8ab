"""What is asked in a cell: real prompts in an order of their own for each block, or InferenceX's random ones.

A cell's prompts follow from the experiment's seed, the workload, the block, the concurrency and the count alone: they are the same for every arm and k of a block, so that arms are
compared on the same work, and others in the next block, so that blocks are independent.

InferenceX (utils/bench_serving/benchmark_serving.py, `sample_random_requests`): the chat template's tokens are taken off the ISL; what remains, and the OSL, are drawn
uniformly from [ratio * L, L], ends included; a prompt is a run of consecutive token ids from a random one on, wrapped in the template; every answer runs to its length.
Ours differ in two things, both for the better: special tokens are left out, and ids are sent as they are, where text would be cut into other tokens again.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysd.errors import ExperimentError
from raysd.experiment import Experiment
from raysd.experiment.sweep import Workload
from raysd.prompts.prompt_set import Prompt, PromptSet
from raysd.prompts.template import ChatTokenizer, render

WARM_UPS_PER_SLOT = 2
"""InferenceX's; its warm-ups repeat one prompt, ours are all different."""
WARM_UP = "warm-up"
"""In the place of a block: prompts that are asked before anything is measured."""


@dataclass(frozen=True)
class WorkloadPrompt:
    """One request of a cell, but for what the experiment sets for all."""

    id: str
    token_ids: tuple[int, ...]
    """Chat template applied."""
    max_tokens: int
    ignore_eos: bool
    category: str | None
    """None: its source does not say, or it is random."""


@dataclass(frozen=True)
class RealPrompts:
    """A workload's real prompts, ready to be asked."""

    workload: Workload
    prompts: tuple[WorkloadPrompt, ...]

    def draw(self, concurrency: int, count: int, seed: int, block: int) -> list[WorkloadPrompt]:
        """As many, from where the block before ended in an endless row of shuffles of all prompts: each comes once in a shuffle.

        In a cell none comes twice if there are enough, and then none is in flight twice at once. Where a cell needs more requests than there are prompts, the two turns
        of one are at least `apart` turns from each other, which is halfway between the concurrency and the number of prompts: it is in flight twice at once only if its
        first answer outlasts those to `apart - concurrency + 1` prompts that were asked later. That is rare, and no order can rule it out.
        """
        size = len(self.prompts)
        apart = size if count <= size else size - (size - concurrency) // 2
        return [self.prompts[place] for place in _places(size, apart, count, block, _generator(seed, self.workload.name, concurrency, count))]


def _places(size: int, apart: int, count: int, block: int, generator: Any) -> list[int]:
    """`count` of `size` places for a block, in an order of the generator's: shuffles of them all, one after the other through all blocks, drawn so that within a block
    two turns of a place are at least `apart` turns from each other; apart: up to size.

    Of those that a shuffle may take next there are always at least size - apart + 1, so it never comes to a dead end, and all that keep the distance are equally likely.
    """
    asked: list[int] = []
    free: list[int] = []
    held: deque[int | None] = deque()
    """What must wait; one is let go a turn. None: nothing, for a turn."""
    for _ in range(block + 1):
        free += [place for place in held if place is not None]  # nothing of the block before is in flight any more
        held.clear()
        asked = []
        while len(asked) < count:
            if not free:
                waiting = asked[max(0, len(asked) - apart + 1):]
                held.extend([*[None] * (apart - 1 - len(waiting)), *waiting])
                free = sorted(set(range(size)) - set(waiting))
            asked.append(free.pop(int(generator.integers(len(free)))))
            if held and (let_go := held.popleft()) is not None:
                free.append(let_go)
    return asked


@dataclass(frozen=True)
class RandomPrompts:
    """What random prompts of a workload are made of."""

    workload: Workload
    before: tuple[int, ...]
    """Tokens of the chat template before a message of a user."""
    after: tuple[int, ...]
    """And after it, up to where the answer begins."""
    ordinary: tuple[int, ...]
    """Ids of all tokens without a special meaning, ascending."""

    def draw(self, count: int, seed: int, block: int | str) -> list[WorkloadPrompt]:
        """As many, each with an id of its own."""
        workload, generator = self.workload, _generator(seed, self.workload.name, block)
        longest, size = workload.isl - len(self.before) - len(self.after), len(self.ordinary)
        drawn = []
        for number in range(count):
            length, max_tokens = (int(generator.integers(max(1, int(most * workload.range_ratio)), most, endpoint=True)) for most in (longest, workload.osl))
            first = int(generator.integers(size)) + number
            run = tuple(self.ordinary[(first + offset) % size] for offset in range(length))
            drawn.append(WorkloadPrompt(f"{workload.name}-{block}-{number}", (*self.before, *run, *self.after), max_tokens, True, None))
        return drawn


Prompts = RealPrompts | RandomPrompts


def workload_prompts(prompts: Prompts, concurrency: int, count: int, block: int, seed: int) -> list[WorkloadPrompt]:
    """The prompts of a cell, in the order they are asked; block: from 0.

    Raises ExperimentError if there are fewer real prompts than are in flight at once: the same one would be answered twice at a time, always.
    """
    if isinstance(prompts, RealPrompts):
        if concurrency > len(prompts.prompts):
            raise too_few(prompts.workload, len(prompts.prompts), concurrency)
        return prompts.draw(concurrency, count, seed, block)
    return prompts.draw(count, seed, block)


def warm_up_prompts(prompts: Prompts, concurrency: int, seed: int) -> list[WorkloadPrompt]:
    """What is asked before each cell of random prompts, as InferenceX does; nothing before real ones, whose engines were warmed when they started."""
    if isinstance(prompts, RealPrompts):
        return []
    return prompts.draw(WARM_UPS_PER_SLOT * concurrency, seed, WARM_UP)


def too_few(workload: Workload, prompts: int, concurrency: int) -> ExperimentError:
    """The error of a concurrency that a workload's prompts do not suffice for."""
    return ExperimentError(what=f"the workload {workload.name} has {prompts} prompts, and {concurrency} are to be in flight at once", where="sweep.concurrency",
                           fix=f"use at most {prompts}, or more prompts ({'prompts.path' if workload.prompts is None else workload.place('prompts')})")


def prompts_of(workload: Workload, experiment: Experiment, prompts: PromptSet) -> tuple[Sequence[Prompt], str]:
    """The real prompts of a workload, and where they come from. prompts: the experiment's, with those of workloads."""
    if workload.prompts is None:
        return prompts.split("report", experiment.sweep.report_prompts), f"{experiment.prompts.path} (prompts.path)"
    own = prompts.measured[workload.name]
    return own.prompts, own.source


def ready_prompts(workload: Workload, experiment: Experiment, prompts: PromptSet, tokenizer: ChatTokenizer) -> Prompts:
    """A workload's prompts, ready to be asked. prompts: the experiment's, with those of workloads.

    Raises ExperimentError, naming the field, for a prompt that leaves no room for its answer, an ISL that the chat template alone fills, and what `render` refuses.
    """
    if workload.kind == "random":
        return _random_prompts(workload, tokenizer)
    asked, source = prompts_of(workload, experiment, prompts)
    rendered = render(asked, tokenizer, experiment.target.max_model_len - workload.osl, source)
    return RealPrompts(workload, tuple(WorkloadPrompt(prompt.id, tuple(token_ids), workload.osl, workload.ignore_eos is True, prompt.category)
                                       for prompt, token_ids in zip(asked, rendered, strict=True)))


def _random_prompts(workload: Workload, tokenizer: Any) -> RandomPrompts:
    before, after = _around_a_message(tokenizer, workload.place("kind"))
    if workload.isl <= len(before) + len(after):
        raise ExperimentError(what=f"{workload.isl} tokens of prompt are filled by the chat template alone, which has {len(before) + len(after)}", where=workload.place("isl"),
                              fix=f"use at least {len(before) + len(after) + 1}")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return RandomPrompts(workload, before, after, tuple(sorted(set(tokenizer.get_vocab().values()) - special)))


def _around_a_message(tokenizer: ChatTokenizer, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chat template's tokens before and after a user's message: what the tokens of two messages that share no character have in common."""
    one, other = (tuple(token_ids) for token_ids in render([Prompt(text, ({"role": "user", "content": text},), text, "report") for text in ("a", "7")], tokenizer, 2**31, where))
    before = _shared(one, other)
    rest = min(len(one), len(other)) - before - 1  # at least one token is the message
    after = min(_shared(one[::-1], other[::-1]), rest)
    return one[:before], one[len(one) - after:]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two begin with."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def _generator(*parts: int | str) -> Any:
    """A numpy Generator whose numbers follow from the parts alone."""
    import numpy as np

    digest = hashlib.sha256(json.dumps(parts).encode("utf-8")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
