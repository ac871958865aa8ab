"""The capture stage: the target answers the prompts, and one pass yields answers and hidden states."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from raysd.artifacts.stage import StageRun
from raysd.errors import StageError
from raysd.experiment import Experiment
from raysd.hidden_states.shards import Conversation, Origin, read_rows, write_index, write_shard
from raysd.hidden_states.verify import check_conversation, check_head, compare_with_reference
from raysd.prompts.prompt_set import Prompt
from raysd.prompts.template import render
from raysd.target import TargetShape, check_plain_logits, load_tokenizer, read_shape, resolve_target, target_fingerprint

COMPARISON = "hf_relative_error.json"


class Request(NamedTuple):
    """What a capture engine is asked."""

    token_ids: list[int]
    seed: int
    """Of the answer's random numbers, which are its own: with one seed for all, equal prompts would get equal answers, and others share their luck token by token."""


@dataclass(frozen=True)
class Answer:
    """What a capture engine gives for one prompt."""

    index: int
    """Which of the prompts that were asked, counted over all groups."""
    token_ids: list[int]
    """Prompt and answer."""
    finish_reason: str
    states_TLH: torch.Tensor
    """[len(token_ids) - 1, layers, hidden size]."""


class CaptureEngine(Protocol):
    """A running target that hands out its hidden states."""

    def answers(self, groups: Sequence[Sequence[Request]]) -> Iterator[Answer]:
        """Answers the requests of all groups, in the order in which they finish. No batch holds requests of two groups: in bf16 a sum's last bit, and with
        it a choice between two near tokens, depends on what else is in the batch, and so an answer depends on its group alone.
        """


EngineFactory = Callable[[Experiment, Path, list[int], Path], AbstractContextManager[CaptureEngine]]
"""`with factory(experiment, target_folder, layer_ids, scratch_folder) as engine:`"""


class Questions:
    """The prompts of a capture as the target is asked them, and what is made of its answers."""

    def __init__(self, run: StageRun) -> None:
        """Raises TargetError or ExperimentError for a target, tokenizer or prompt that is unfit."""
        section = run.experiment.capture
        self._run = run
        self.target = resolve_target(run.experiment.target, run.progress)
        self.shape = read_shape(self.target)
        check_plain_logits(self.target)
        self.layer_ids = self.shape.aux_layers(run.experiment.draft.aux_layers) + [self.shape.layers]
        self.prompts: list[Prompt] = run.prompts.split("train", section.train_prompts) + run.prompts.split("choose", section.choose_prompts)
        tokenizer = load_tokenizer(self.target, run.experiment.target)
        self.rendered = render(self.prompts, tokenizer, run.experiment.target.max_model_len - section.max_tokens, f"{run.experiment.prompts.path} (prompts.path)")
        kept = run.pieces.find(COMPARISON)
        self.checks: dict[str, Any] | None = json.loads(kept.read_text(encoding="utf-8")) if kept else None
        """What `check_first` found, in this attempt or one before."""

    def request(self, index: int, epoch: int = 0) -> Request:
        """What the engine is asked for a prompt. epoch: how often it was asked before; sampled answers then differ."""
        mark = f"{self._run.experiment.capture.seed} {epoch} {self.prompts[index].id}"
        return Request(self.rendered[index], int.from_bytes(hashlib.sha256(mark.encode()).digest()[:4], "big"))

    def conversation(self, index: int, answer: Answer) -> Conversation:
        """The answer to a prompt, checked. Raises StageError for states that cannot be right, and for the tokens of another prompt."""
        conversation = self.said(index, answer.token_ids, answer.finish_reason, answer.states_TLH)
        check_conversation(conversation, len(self.layer_ids), self.shape.hidden_size)
        self.check_first(conversation)
        return conversation

    def said(self, index: int, token_ids: list[int], finish_reason: str, states_TLH: torch.Tensor) -> Conversation:
        """The answer to a prompt, its states not checked. Raises StageError for the tokens of another prompt."""
        prompt, rendered = self.prompts[index], self.rendered[index]
        if token_ids[:len(rendered)] != rendered:
            raise StageError(what="the engine's tokens do not start with the prompt's", where=f"capture: prompt {prompt.id}",
                             fix="the target's tokenizer and the engine's differ; check target.model")
        return Conversation(prompt.id, prompt.topic, prompt.split, torch.tensor(token_ids), len(rendered), finish_reason, states_TLH)

    def check_first(self, conversation: Conversation) -> None:
        """Does, with the first conversation of all, what is done with one alone."""
        if self.checks is None:
            run = self._run
            self.checks = _check_first(run, self.target, self.shape, conversation, self.layer_ids)
            (run.work / COMPARISON).write_text(json.dumps(self.checks), encoding="utf-8")
            run.pieces.keep(COMPARISON, run.work / COMPARISON)


def capture(run: StageRun, engine_factory: EngineFactory) -> dict[str, Any]:
    """Answers the train and choose splits and writes shards with an index; shards that an attempt before finished are not captured again.

    Metrics: conversations, prompt_tokens, output_tokens, truncated, bytes and layer_ids; elapsed_s and output_tok_s (null: nothing was left to do) of
    answering in this attempt; of the first conversation of the attempt that captured first, hf_relative_error by layer (null, with hf_skipped saying why: Hugging Face's
    model was not run) and head_agreement_frac (null: the answers are sampled). Raises StageError for states that cannot be right.
    """
    section, questions = run.experiment.capture, Questions(run)
    prompts = questions.prompts
    shards = [range(start, min(start + section.shard_conversations, len(prompts))) for start in range(0, len(prompts), section.shard_conversations)]
    names = [f"shard-{number:05d}.safetensors" for number in range(len(shards))]
    paths = {number: path for number, name in enumerate(names) if (path := run.pieces.find(name)) is not None}
    todo = [number for number in range(len(shards)) if number not in paths]
    counts = {"conversations": 0, "output_tokens": 0}
    answering_s = 0.0
    origin = Origin(target_fingerprint(run.experiment.target), tuple(questions.layer_ids))
    if todo:
        run.progress("starting vLLM", 0, len(prompts), "conversations")
        with engine_factory(run.experiment, questions.target, questions.layer_ids, run.work) as engine:
            asked = [index for number in todo for index in shards[number]]
            shard_of = {index: number for number in todo for index in shards[number]}
            waiting: dict[int, dict[int, Conversation]] = {number: {} for number in todo}
            already, start = len(prompts) - len(asked), time.monotonic()
            # A shard is a group: it comes out the same in an attempt that captures all of them and in one that captures the rest.
            for answer in engine.answers([[questions.request(i) for i in shards[number]] for number in todo]):
                index = asked[answer.index]
                number = shard_of[index]
                waiting[number][index] = questions.conversation(index, answer)
                if len(waiting[number]) == len(shards[number]):
                    write_shard(run.work / names[number], [waiting[number][i] for i in shards[number]], origin)
                    paths[number] = run.pieces.keep(names[number], run.work / names[number])
                    del waiting[number]
                counts["conversations"] += 1
                counts["output_tokens"] += len(answer.token_ids) - len(questions.rendered[index])
                answering_s = time.monotonic() - start
                run.progress("answering and capturing", already + counts["conversations"], len(prompts), "conversations",
                             output_tok_s=counts["output_tokens"] / answering_s)
    for number, name in enumerate(names):
        _link(paths[number], run.out / name)
    write_index(run.out)
    rows = [row for name in names for row in read_rows(run.out / name)]
    prompt_tokens = sum(row["prompt_tokens"] for row in rows)
    return {"conversations": len(rows), "prompt_tokens": prompt_tokens, "output_tokens": sum(row["tokens"] for row in rows) - prompt_tokens,
            "truncated": sum(row["finish_reason"] == "length" for row in rows), "elapsed_s": answering_s,
            "output_tok_s": counts["output_tokens"] / answering_s if answering_s else None,
            "bytes": sum((run.out / name).stat().st_size for name in names), "layer_ids": questions.layer_ids, **(questions.checks or {})}


def _link(kept: Path, path: Path) -> None:
    """Puts a kept file into the artifact too, so that it stays a piece until the artifact is published."""
    try:
        os.link(kept, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(kept, path)


def _check_first(run: StageRun, target: Path, shape: TargetShape, conversation: Conversation, layer_ids: list[int]) -> dict[str, Any]:
    """What can be known of the states from one conversation, before the GPU hours: that they are Hugging Face's, and that they lead to the answer."""
    from raysd.target.reference import reference_states, why_no_reference
    from raysd.target.weights import read_embedding_and_head

    agreement = None
    if run.experiment.capture.temperature == 0:
        _, norm, head = read_embedding_and_head(target, shape)
        agreement = check_head(conversation, norm, head, shape.rms_norm_eps)
    skipped, errors = why_no_reference(target), None
    if skipped is None:
        run.progress("comparing the first states with Hugging Face's")
        reference = reference_states(target, run.experiment.target, conversation.token_ids[:-1].tolist(), layer_ids)
        errors = compare_with_reference(conversation.states_TLH, reference, layer_ids, f"capture: prompt {conversation.prompt_id}")
    else:
        run.progress(f"not comparing the states with Hugging Face's: {skipped}")
    return {"hf_relative_error": errors, "hf_skipped": skipped, "head_agreement_frac": agreement}
