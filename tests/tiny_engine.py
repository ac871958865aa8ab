"""Hugging Face's own model as a capture engine, for tests of what becomes of its answers; each is greedy, made alone, and made once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from raysd.experiment import Experiment
from raysd.hidden_states.capture import Answer, Request
from raysd.target.reference import entered_states


class TinyEngine:
    """A group's answers come in an order of its own (a CaptureEngine)."""

    known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def __init__(self, target: Path, experiment: Experiment, layer_ids: list[int], seed: int = 0) -> None:
        """seed: of the order."""
        from transformers import AutoModelForCausalLM

        self.experiment, self.layer_ids, self.order = experiment, layer_ids, random.Random(seed)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)

    def answers(self, groups: Sequence[Sequence[Request]]) -> Iterator[Answer]:
        before = 0
        for group in groups:
            for position in self.order.sample(range(len(group)), len(group)):
                token_ids, states = self.known.get(tuple(group[position].token_ids)) or self.answer(group[position].token_ids)
                yield Answer(before + position, token_ids, some_are_cut_off(token_ids), states)
            before += len(group)

    def answer(self, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        with torch.no_grad():
            out = self.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                                      max_new_tokens=self.experiment.capture.max_tokens, do_sample=False, pad_token_id=0)[0].tolist()
        self.known[tuple(prompt)] = out, entered_states(self.model, out[:-1], self.layer_ids).to(torch.bfloat16)
        return self.known[tuple(prompt)]


def some_are_cut_off(token_ids: list[int]) -> str:
    """A finish reason."""
    return "length" if sum(token_ids) % 2 else "stop"


@contextlib.contextmanager
def tiny_engine(experiment: Experiment, target: Path, layer_ids: list[int], scratch: Path) -> Iterator[TinyEngine]:
    """An EngineFactory."""
    yield TinyEngine(target, experiment, layer_ids)
