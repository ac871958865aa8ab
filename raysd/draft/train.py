"""The train stage: a draft learns from captured states, and the checkpoint that vLLM accepts most of is the draft."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import ServedAcceptance
from raysd.draft.checkpoint import save_draft
from raysd.draft.learn import Learner, learn, new_learner
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import check_special_tokens, draft_shape
from raysd.draft.source import CapturedSource
from raysd.draft.unfinished import Desk, StageDesk, Training
from raysd.draft.vocabulary import choose_vocabulary, coverage
from raysd.draft.workers import Alone
from raysd.errors import ExperimentError, StageError
from raysd.experiment import Experiment
from raysd.hidden_states.shards import Captured, Origin, check_shards
from raysd.target import load_tokenizer, read_shape, resolve_target, special_token_ids, target_fingerprint

POOR_COVERAGE_FRAC = 0.9
"""Of the choose split's answers: below it, every tenth token ends a verify step whatever the draft learns."""


class Deals(NamedTuple):
    """What several workers learn from, if it is a stream."""

    choose: int
    """How many of the deals are one conversation of the choose split, which all of them get."""
    shares: Iterator[list[list[Any]]]
    """Deals: of each a share for every worker, by rank, of `Streamed` conversations. After the choose split's come those of the steps that are left. A deal is
    to be asked for when the workers have taken all of the one before, and nobody holds that any more: its states' place in the stream is then free."""


LearnOnWorkers = Callable[[StageRun, Path, torch.Tensor, Desk, Deals | None], Training]
"""`learn_on_workers(run, target, vocabulary, desk, deals)`: `learn` on `train.workers` processes, wherever they are, for the desk of the stage's own, from the
captured states, or from a stream. To be called in the main thread."""


def train(run: StageRun, served_acceptance: ServedAcceptance, learn_on_workers: LearnOnWorkers, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Writes `draft/` (the checkpoint that vLLM loads), `curve.parquet`, `evaluations.parquet` and `served.parquet` (the candidates).

    Goes on from the last checkpoint of an attempt before, and then ends with the weights that it would have had without the interruption. An interrupted
    one keeps a checkpoint on its way out; with several workers it keeps the last one.
    Metrics: steps, best_step, resumed_steps, elapsed_s, serving_s (of this attempt), data_wait_s, tokens, tokens_s, conversations, dropped, parameters, vocab_size,
    vocab_coverage_frac (choose split), replay and served acceptance of the draft on the choose split, and of every candidate. clock: seconds that only grow.
    Raises ExperimentError or StageError if there is less to learn from than one step takes, ArtifactError for captured states that are damaged or not of this target,
    and what `draft_shape`, `check_special_tokens` and `check_shared` raise.
    """
    section = run.experiment.train
    run.progress("reading the captured states")
    capture = run.inputs["capture"]
    target = resolve_target(run.experiment.target, run.progress)
    check_capture(run.experiment, target, capture)
    captured, choose = Captured(capture, "train", truncated=section.truncated == "keep"), Captured(capture, "choose")
    dropped = len(Captured(capture, "train")) - len(captured)
    check_enough(len(captured), dropped, len(choose), run.experiment, capture)
    vocabulary = draft_vocabulary(run.experiment, target, (token_ids[prompt:] for token_ids, prompt in captured.token_ids()))
    answers = [token_ids[prompt:] for token_ids, prompt in choose.token_ids()]
    warn_of_poor_vocabulary(vocabulary, len(captured), answers, "draft.vocab_size, or capture more prompts")
    workers = Alone(torch.device("cuda" if torch.cuda.is_available() and section.workers == 1 else "cpu"))
    learner = new_learner(run.experiment, target, vocabulary, workers)
    if section.workers == 1:
        with CapturedSource(captured, section, workers.rank, workers.count) as source:
            training = learn(section, learner, source, choose, workers, StageDesk(run), run.whole, clock)
    else:
        training = learn_on_workers(run, target, vocabulary, StageDesk(run), None)
    return finish(run, learner, training, answers, served_acceptance) | {"conversations": len(captured), "dropped": dropped}


def check_capture(experiment: Experiment, target: Path, capture: Path) -> None:
    """Raises ArtifactError, naming the file, for captured states that are damaged, or not those that this draft reads of this target."""
    shape = read_shape(target)
    origin = Origin(target_fingerprint(experiment.target), (*shape.aux_layers(experiment.draft.aux_layers), shape.layers))
    check_shards(capture, origin, shape.hidden_size, shape.vocab_size)


def check_enough(conversations: int, dropped: int, choose: int, experiment: Experiment, where: Path) -> None:
    """Raises ExperimentError if the train split is smaller than one step, StageError if what is left of it is, or if the choose split is empty."""
    section = experiment.train
    if conversations < section.conversations_per_step:
        cut_off = f", and {dropped} that were cut off are dropped" if dropped else ""
        kind = ExperimentError if conversations + dropped < section.conversations_per_step else StageError
        raise kind(what=f"{conversations} answers of the train split can be learned from{cut_off}: a step takes {section.conversations_per_step}",
                   where=f"train.conversations_per_step ({where})",
                   fix="capture more prompts, lower train.conversations_per_step, or check what the target answers"
                   + ("; raise capture.max_tokens, or set train.truncated: keep" if dropped else "; raise capture.max_tokens or change the prompts"))
    if choose == 0:
        raise StageError(what="no answer of the choose split has two tokens: there is nothing to choose a checkpoint by", where=where,
                         fix="check what the target answers; raise capture.max_tokens or change the prompts")


def draft_vocabulary(experiment: Experiment, target: Path, answers: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64, ascending: the target tokens that the draft can propose. answers: token ids to count.

    Raises ExperimentError for a draft that does not fit the target, and for a vocabulary too small for the target's special tokens.
    """
    shape = draft_shape(experiment.draft, read_shape(target))
    special = special_token_ids(target, load_tokenizer(target, experiment.target))
    check_special_tokens(shape, special)
    return choose_vocabulary(answers, special, shape.vocab_size, shape.target_vocab_size)


def warn_of_poor_vocabulary(vocabulary: torch.Tensor, counted: int, answers: Sequence[torch.Tensor], to_raise: str) -> None:
    """Says so if the draft cannot propose much of what is said. counted: answers that the vocabulary was counted from; answers: token ids of the choose split's."""
    covered = coverage(answers, vocabulary)
    if covered < POOR_COVERAGE_FRAC:
        print(f"warning: the draft's vocabulary, counted from {counted} answers, covers {covered:.0%} of the tokens of the choose split's; raise {to_raise}", flush=True)


def finish(run: StageRun, learner: Learner, training: Training, answers: Sequence[torch.Tensor], served_acceptance: ServedAcceptance) -> dict[str, Any]:
    """Serves the candidates, writes the best as the draft, and the tables; returns the metrics. answers: token ids of the choose split's."""
    section, draft, started_s = run.experiment.train, learner.draft, time.monotonic()
    served = _serve(run, draft, training, served_acceptance)
    serving_s = time.monotonic() - started_s
    best = max(range(len(served)), key=lambda i: (served[i]["acceptance_length"], i))  # of equals the later one
    chosen = training.candidates[best]
    draft.load_state_dict(chosen["weights"])
    save_draft(draft, run.out / "draft", getattr(torch, run.experiment.target.dtype))
    candidates = [{"step": candidate["step"], "replay": candidate["replay"], "served": counts} for candidate, counts in zip(training.candidates, served, strict=True)]
    _write_table(training.curve, run.out / "curve.parquet")
    _write_table(training.evaluations, run.out / "evaluations.parquet")
    _write_table([{"step": each["step"], "chosen": each["step"] == chosen["step"], "replay_acceptance_length": each["replay"]["acceptance_length"], **each["served"]}
                  for each in candidates], run.out / "served.parquet")
    return {"steps": training.steps, "best_step": chosen["step"], "resumed_steps": training.resumed_steps, "elapsed_s": training.elapsed_s,
            "serving_s": serving_s, "data_wait_s": training.data_wait_s, "tokens": training.tokens, "tokens_s": training.tokens / training.elapsed_s,
            "parameters": sum(p.numel() for p in draft.parameters()), "vocab_size": draft.shape.vocab_size,
            "vocab_coverage_frac": coverage(answers, draft.draft_to_target.cpu()), "served_k": section.served_k, "served_tokens": section.served_tokens,
            "replay": chosen["replay"], "served": served[best], "candidates": candidates}


def _serve(run: StageRun, draft: Eagle3Draft, training: Training, served_acceptance: ServedAcceptance) -> list[dict[str, Any]]:
    """The served acceptance of each candidate on the choose split, in their order. What an attempt before has counted is not counted again."""
    section, found = run.experiment.train, []
    prompts = run.prompts.split("choose", run.experiment.capture.choose_prompts)
    for number, candidate in enumerate(training.candidates, start=1):
        name = f"served-{candidate['step']}.json"
        kept = run.pieces.find(name)
        if kept is None:
            run.progress("serving the last checkpoints in vLLM", number - 1, len(training.candidates), "checkpoints")
            draft.load_state_dict(candidate["weights"])
            folder = run.work / f"candidate-{candidate['step']}"
            save_draft(draft, folder, getattr(torch, run.experiment.target.dtype))
            counts = served_acceptance(folder, prompts, section.served_k).as_metrics()
            (run.work / name).write_text(json.dumps(counts), encoding="utf-8")
            kept = run.pieces.keep(name, run.work / name)
        found.append(json.loads(kept.read_text(encoding="utf-8")))
    return found


def _write_table(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
