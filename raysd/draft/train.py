"""The train stage: a draft learns from captured states, is chosen by replayed acceptance, and is measured in vLLM."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import AcceptanceCounts, ServedAcceptance
from raysd.draft.batch import TargetHead
from raysd.draft.checkpoint import save_draft
from raysd.draft.gradient import StepGradient, parts_of
from raysd.draft.initial import initialise
from raysd.draft.model import Eagle3Draft
from raysd.draft.replay import replay, teacher_forced_accuracy
from raysd.draft.schedule import conversation_order, lr_factor
from raysd.draft.shape import draft_shape
from raysd.draft.vocabulary import choose_vocabulary, coverage
from raysd.errors import StageError
from raysd.experiment import Experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured
from raysd.prompts.prompt_set import load_prompts
from raysd.target import eos_token_ids, load_tokenizer, read_shape, resolve_target
from raysd.target.weights import read_embedding_and_head

CURVE_EVERY = 10
"""Steps between rows of the training curve."""


@dataclass
class Curve:
    """Rows for the two tables that a training leaves."""

    training: list[dict[str, Any]] = field(default_factory=list)
    """step, elapsed_s, loss (summed over draft steps, in nat), lr, conversations, tokens."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """step, position, accuracy (teacher-forced), replay_acceptance_length, all on the choose split."""


def train(run: StageRun, served_acceptance: ServedAcceptance) -> dict[str, Any]:
    """Writes `draft/` (the checkpoint that vLLM loads), `curve.parquet` and `evaluations.parquet`.

    Metrics: steps, elapsed_s, tokens_s, parameters, vocab_size, vocab_coverage_frac (choose split), replay and served acceptance on the choose split.
    """
    section = run.experiment.train
    run.progress("reading the captured states")
    capture = run.inputs["capture"]
    learn, choose = Captured(capture, "train"), Captured(capture, "choose")
    for split, captured in (("train", learn), ("choose", choose)):
        if len(captured) == 0:
            raise StageError(what=f"no answer of the {split} split has two tokens: there is nothing to learn from", where=capture,
                             fix="check what the target answers; raise capture.max_tokens or change the prompts")
    target = resolve_target(run.experiment.target, run.progress)
    draft, target_head, token_to_draft = _new_draft(run.experiment, target, learn)

    curve, best = Curve(), None
    started = time.monotonic()
    steps, tokens = 0, 0
    # Said outright: Ray starts a job's driver with OMP_NUM_THREADS=1.
    threads = section.threads or len(os.sched_getaffinity(0))
    parts = parts_of(section.conversations_per_step, threads, draft.embedding.device)
    with StepGradient(draft, target_head, token_to_draft, section, threads, parts) as step_gradient:
        for steps, tokens, evaluated in _steps(draft, step_gradient, section, learn, choose, curve, run.progress):  # noqa: B007 (read after the loop)
            if evaluated is not None and (best is None or evaluated.acceptance_length > best[0].acceptance_length):
                best = (evaluated, steps, copy.deepcopy(draft.state_dict()))
    elapsed_s = time.monotonic() - started
    draft.load_state_dict(best[2])

    folder = run.out / "draft"
    save_draft(draft, folder, getattr(torch, run.experiment.target.dtype))
    _write_table(curve.training, run.out / "curve.parquet")
    _write_table(curve.evaluations, run.out / "evaluations.parquet")
    answers = [token_ids[prompt:] for token_ids, prompt in choose.token_ids()]
    metrics = {"steps": steps, "best_step": best[1], "elapsed_s": elapsed_s, "tokens": tokens, "tokens_s": tokens / elapsed_s,
               "parameters": sum(p.numel() for p in draft.parameters()), "vocab_size": draft.shape.vocab_size,
               "vocab_coverage_frac": coverage(answers, draft.draft_to_target.cpu()), "served_k": section.served_k,
               "served_tokens": section.served_tokens, "replay": best[0].as_metrics()}
    run.progress("measuring the acceptance in vLLM")
    prompts = load_prompts(run.experiment.prompts).split("choose", run.experiment.capture.choose_prompts)
    return metrics | {"served": served_acceptance(folder, prompts, section.served_k).as_metrics()}


def _new_draft(experiment: Experiment, target: Path, learn: Captured) -> tuple[Eagle3Draft, TargetHead, torch.Tensor]:
    """A draft at its starting point, the target's head for its vocabulary, and the map from target tokens to draft rows (-1 outside)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target_shape = read_shape(target)
    shape = draft_shape(experiment.draft, target_shape)
    embedding, norm, head = read_embedding_and_head(target, target_shape)
    special = [*load_tokenizer(target, experiment.target).all_special_ids, *eos_token_ids(target)]
    vocabulary = choose_vocabulary((tokens[prompt:] for tokens, prompt in learn.token_ids()), special, shape.vocab_size, shape.target_vocab_size)
    torch.manual_seed(experiment.train.seed)
    draft = Eagle3Draft(shape, embedding, vocabulary)
    initialise(draft, experiment.train.init, target, target_shape.layers - 1, norm, head)
    draft.to(device)
    token_to_draft = torch.full((shape.target_vocab_size,), -1)
    token_to_draft[vocabulary] = torch.arange(len(vocabulary))
    return draft, TargetHead(norm.to(device), head[vocabulary].to(device), shape.rms_norm_eps), token_to_draft.to(device)


def _steps(draft: Eagle3Draft, step_gradient: StepGradient, section: TrainSection, learn: Captured, choose: Captured, curve: Curve, progress: Any):
    """Optimiser steps; yields (steps done, tokens seen, counts of a replay if one was due). Raises StageError if the loss stops being a number."""
    autocast = torch.autocast(draft.embedding.device.type, torch.bfloat16, enabled=section.autocast == "bfloat16")
    optimiser = torch.optim.AdamW(draft.parameters(), lr=section.lr, betas=(0.9, 0.95), weight_decay=section.weight_decay, fused=True)
    order = conversation_order(len(learn), section.steps * section.conversations_per_step, section.seed)
    due = {max(1, section.steps * (i + 1) // section.evaluations) for i in range(section.evaluations)}
    started, tokens, loss_sum, loss_count = time.monotonic(), 0, 0.0, 0
    for step in range(section.steps):
        for group in optimiser.param_groups:
            group["lr"] = section.lr * lr_factor(step, section.steps, section.warmup_frac, section.decay_frac)
        chosen = order[step * section.conversations_per_step:(step + 1) * section.conversations_per_step]
        loss = step_gradient([learn[i] for i in chosen])
        torch.nn.utils.clip_grad_norm_(draft.parameters(), section.grad_clip, error_if_nonfinite=False)
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise StageError(what=f"the loss is {loss} at step {step + 1}", where="train", fix="lower train.lr or train.grad_clip")
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

        done, elapsed_s = step + 1, time.monotonic() - started
        tokens += sum(learn.rows[i]["tokens"] for i in chosen)
        loss_sum, loss_count = loss_sum + loss, loss_count + 1
        out_of_time = section.time_budget_s is not None and elapsed_s >= section.time_budget_s
        last = done == section.steps or out_of_time
        if done % CURVE_EVERY == 0 or last:
            curve.training.append({"step": done, "elapsed_s": elapsed_s, "loss": loss_sum / loss_count, "lr": optimiser.param_groups[0]["lr"],
                                   "conversations": done * section.conversations_per_step, "tokens": tokens})
            progress("training", done, section.steps, "steps", loss_nat=loss_sum / loss_count, tokens_s=tokens / elapsed_s)
            loss_sum, loss_count = 0.0, 0
        evaluated = _evaluate(draft, choose, done, section, curve, autocast) if done in due or last else None
        if evaluated is not None:
            progress("training", done, section.steps, "steps", replay_acceptance_length=evaluated.acceptance_length)
        yield done, tokens, evaluated
        if last:
            return


def _evaluate(draft: Eagle3Draft, choose: Captured, step: int, section: TrainSection, curve: Curve, autocast: Any) -> AcceptanceCounts:
    """Replays the choose split and notes accuracy and acceptance."""
    conversations = [choose[i] for i in range(len(choose))]
    draft.eval()
    with autocast:
        counts = replay(draft, conversations, section.served_k)
        accuracy = teacher_forced_accuracy(draft, conversations, section.served_k)
    draft.train()
    for position, value in enumerate(accuracy, start=1):
        curve.evaluations.append({"step": step, "position": position, "accuracy": value, "replay_acceptance_length": counts.acceptance_length})
    return counts


def _write_table(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
