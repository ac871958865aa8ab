"""The train stage: a draft learns from captured states, is chosen by replayed acceptance, and is measured in vLLM."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
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
from raysd.draft.unfinished import Checkpoints, Training
from raysd.draft.vocabulary import choose_vocabulary, coverage
from raysd.errors import StageError
from raysd.experiment import Experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation
from raysd.target import eos_token_ids, load_tokenizer, read_shape, resolve_target
from raysd.target.weights import read_embedding_and_head

CURVE_EVERY = 10
"""Steps between rows of the training curve."""


def train(run: StageRun, served_acceptance: ServedAcceptance, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Writes `draft/` (the checkpoint that vLLM loads), `curve.parquet` and `evaluations.parquet`.

    Goes on from the last checkpoint of an attempt before, and then ends with the weights that it would have had without the interruption. An interrupted
    one keeps a checkpoint on its way out.
    Metrics: steps, best_step, resumed_steps, elapsed_s, tokens, tokens_s, parameters, vocab_size, vocab_coverage_frac (choose split), replay and served
    acceptance on the choose split. clock: seconds that only grow.
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
    # Said outright: Ray starts a job's driver with OMP_NUM_THREADS=1.
    threads = section.threads or len(os.sched_getaffinity(0))
    parts = parts_of(section.conversations_per_step, threads, draft.embedding.device)
    with StepGradient(draft, target_head, token_to_draft, section, threads, parts) as step_gradient:
        training = _learn(run, draft, step_gradient, learn, choose, clock)
    draft.load_state_dict(training.best_weights)

    folder = run.out / "draft"
    save_draft(draft, folder, getattr(torch, run.experiment.target.dtype))
    _write_table(training.curve, run.out / "curve.parquet")
    _write_table(training.evaluations, run.out / "evaluations.parquet")
    answers = [token_ids[prompt:] for token_ids, prompt in choose.token_ids()]
    metrics = {"steps": training.steps, "best_step": training.best_step, "resumed_steps": training.resumed_steps, "elapsed_s": training.elapsed_s,
               "tokens": training.tokens, "tokens_s": training.tokens / training.elapsed_s, "parameters": sum(p.numel() for p in draft.parameters()),
               "vocab_size": draft.shape.vocab_size, "vocab_coverage_frac": coverage(answers, draft.draft_to_target.cpu()),
               "served_k": section.served_k, "served_tokens": section.served_tokens, "replay": training.best_replay}
    run.progress("measuring the acceptance in vLLM")
    prompts = run.prompts.split("choose", run.experiment.capture.choose_prompts)
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


def _learn(run: StageRun, draft: Eagle3Draft, step_gradient: StepGradient, learn: Captured, choose: Captured, clock: Callable[[], float]) -> Training:
    """Takes the draft through the steps that are left. What changes the training is done whole, so that an interruption finds it between two changes."""
    section = run.experiment.train
    optimiser = torch.optim.AdamW(draft.parameters(), lr=section.lr, betas=(0.9, 0.95), weight_decay=section.weight_decay, fused=True)
    order = conversation_order(len(learn), section.steps * section.conversations_per_step, section.seed)
    due = {max(1, section.steps * (i + 1) // section.evaluations) for i in range(section.evaluations)}
    checkpoints = Checkpoints(run, draft, optimiser)
    training = checkpoints.resume()
    kept_s = clock()
    started_s = kept_s - training.elapsed_s
    try:
        while True:
            out_of_time = section.time_budget_s is not None and training.steps > 0 and training.elapsed_s >= section.time_budget_s
            last, better = training.steps == section.steps or out_of_time, False
            if training.loss_count and (training.steps % CURVE_EVERY == 0 or last):
                with run.whole():
                    row = training.note_loss(optimiser.param_groups[0]["lr"], training.steps * section.conversations_per_step)
                run.progress("training", training.steps, section.steps, "steps", loss_nat=row["loss"], tokens_s=training.tokens / training.elapsed_s)
            if (training.steps in due or last) and not training.evaluated():
                counts, accuracy = _evaluate(draft, choose, section)
                with run.whole():
                    better = training.note_evaluation(draft, counts, accuracy)
                run.progress("training", training.steps, section.steps, "steps", replay_acceptance_length=counts.acceptance_length)
            if better or last or clock() - kept_s >= section.checkpoint_every_s:
                training.elapsed_s = clock() - started_s
                checkpoints.keep(training)
                kept_s = clock()
            if last:
                return training
            with run.whole():
                first = training.steps * section.conversations_per_step
                chosen = order[first:first + section.conversations_per_step]
                loss = _step(draft, optimiser, step_gradient, [learn[i] for i in chosen], section, training.steps)
                training.steps += 1
                training.tokens += sum(learn.rows[i]["tokens"] for i in chosen)
                training.loss_sum, training.loss_count = training.loss_sum + loss, training.loss_count + 1
                training.elapsed_s = clock() - started_s
    except KeyboardInterrupt:
        checkpoints.keep(training)
        raise


def _step(draft: Eagle3Draft, optimiser: torch.optim.Optimizer, step_gradient: StepGradient, conversations: list[Conversation], section: TrainSection,
          step: int) -> float:
    """One optimiser step, 0-based; returns its loss. Raises StageError if that is no number."""
    for group in optimiser.param_groups:
        group["lr"] = section.lr * lr_factor(step, section.steps, section.warmup_frac, section.decay_frac)
    loss = step_gradient(conversations)
    torch.nn.utils.clip_grad_norm_(draft.parameters(), section.grad_clip, error_if_nonfinite=False)
    if not math.isfinite(loss):
        raise StageError(what=f"the loss is {loss} at step {step + 1}", where="train", fix="lower train.lr or train.grad_clip")
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss


def _evaluate(draft: Eagle3Draft, choose: Captured, section: TrainSection) -> tuple[AcceptanceCounts, list[float]]:
    """Counts of a replay of the choose split, and the teacher-forced accuracy by position."""
    conversations = [choose[i] for i in range(len(choose))]
    draft.eval()
    with torch.autocast(draft.embedding.device.type, torch.bfloat16, enabled=section.autocast == "bfloat16"):
        found = replay(draft, conversations, section.served_k), teacher_forced_accuracy(draft, conversations, section.served_k)
    draft.train()
    return found


def _write_table(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
