"""Several workers learn what one learns: two real processes over gloo, each with a share of every step, and for FSDP2 of every weight."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from raysd.artifacts.stage import no_progress
from raysd.draft.batch import TargetHead
from raysd.draft.gradient import StepGradient
from raysd.draft.learn import Learner, learn
from raysd.draft.loss import counted_rows
from raysd.draft.optimiser import DraftOptimiser
from raysd.draft.source import CapturedSource
from raysd.draft.unfinished import Training
from raysd.draft.workers import Alone, Sharing, Together, Workers
from raysd.errors import StageError
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation, write_index, write_shard
from tests.tiny_drafts import ORIGIN, TARGET_VOCAB, conversation, draft_and_target, small_draft, small_shape

CPU = torch.device("cpu")
SETTINGS = {"conversations_per_step": 4, "ttt_steps": 2, "precision": "float32", "steps": 12, "evaluations": 2, "served_k": 2, "lr": 1e-2, "checkpoint_every_s": 1e-9}
TWO = {"ddp": TrainSection(**SETTINGS, workers=2), "fsdp": TrainSection(**SETTINGS, workers=2, parallel="fsdp")}
ONE = TrainSection(**SETTINGS, gradient_accumulation=2)


SPOILED = 11
"""The conversation with a state that is no number, in the folder `spoiled`."""


class FileDesk:
    """Keeps every checkpoint in a file of its own, and goes on from the one it is told to."""

    def __init__(self, folder: Path, newest: Path | None = None) -> None:
        self._folder, self._newest, self.progress = folder, newest, no_progress
        folder.mkdir(exist_ok=True)

    def note(self, row: dict[str, Any]) -> None:
        pass

    def keep(self, document: dict[str, Any]) -> None:
        torch.save(document, self._folder / f"{document['training']['steps']}.pt")

    def newest(self) -> dict[str, Any] | None:
        return None if self._newest is None else torch.load(self._newest, weights_only=True)


class FailsForOne(CapturedSource):
    """A source that finds, at the second worker alone, states that cannot be right."""

    def step(self, number: int) -> list[Conversation]:
        if number == 3 and distributed.get_rank() == 1:
            raise StageError(what="one worker's states are wrong", where="here", fix="look")
        return super().step(number)


def learn_from(captured: Path, section: TrainSection, workers: Workers, desk: FileDesk, source_class: type[CapturedSource] = CapturedSource) -> Training:
    draft = small_draft(small_shape(vocab_size=41, intermediate_size=51))  # odd: two workers hold unlike shares
    head = TargetHead(torch.ones(32), torch.randn(41, 32, generator=torch.Generator().manual_seed(7)), 1e-5)
    token_to_draft = torch.full((TARGET_VOCAB,), -1)
    token_to_draft[draft.draft_to_target] = torch.arange(41)
    with torch.no_grad():
        draft.fc.weight.add_(workers.rank)  # another start at each worker: that of the first must win
    workers.join(draft)
    learner = Learner(draft, head, token_to_draft, DraftOptimiser(draft, section), threads=1)
    with source_class(Captured(captured, "train"), section, workers.rank, workers.count) as source:
        return learn(section, learner, source, Captured(captured, "choose"), workers, desk)


def worker(rank: int, folder: Path) -> None:
    """One of two processes: learns with each kind of sharing, and once more from a checkpoint in the middle."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for kind, workers in (("ddp", Together(CPU, 2)), ("fsdp", Sharing(CPU, 2))):
        for name, newest in ((kind, None), (f"{kind}-resumed", folder / kind / "5.pt")):
            training = learn_from(folder / "captured", TWO[kind], workers, FileDesk(folder / name, newest))
            torch.save(vars(training), folder / f"{name}-{rank}.pt")
        try:
            learn_from(folder / "spoiled", TWO[kind], workers, FileDesk(folder / f"{kind}-spoiled"))
        except StageError as err:
            (folder / f"{kind}-spoiled-{rank}.txt").write_text(err.what)
    try:
        learn_from(folder / "captured", TWO["ddp"], workers=Together(CPU, 2), desk=FileDesk(folder / "fails"), source_class=FailsForOne)
    except StageError as err:
        (folder / f"fails-{rank}.txt").write_text(err.what)
    except RuntimeError:
        assert rank == 0  # whom the other has left in the middle of a step
        return
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two workers came to, and one alone (`ddp-0.pt`, ..., `one-0.pt`), and beside it their checkpoints (`ddp/5.pt`, ...)."""
    folder = tmp_path_factory.mktemp("workers")
    conversations = [replace(conversation(12 + 7 * (i % 5), 4, seed=i), prompt_id=f"prompt-{i}", split="choose" if i < 3 else "train") for i in range(18)]
    write_captured(folder / "captured", conversations)
    states = conversations[SPOILED].states_TLH.clone()
    states[6] = float("nan")
    write_captured(folder / "spoiled", [replace(each, states_TLH=states) if i == SPOILED else each for i, each in enumerate(conversations)])
    torch.multiprocessing.spawn(worker, (folder,), nprocs=2)
    alone(folder, "one", ONE)
    return folder


def write_captured(folder: Path, conversations: list[Conversation]) -> None:
    folder.mkdir()
    write_shard(folder / "shard-00000.safetensors", conversations, ORIGIN)
    write_index(folder)


def alone(folder: Path, name: str, section: TrainSection, newest: Path | None = None) -> None:
    before = torch.get_num_threads()
    try:
        torch.save(vars(learn_from(folder / "captured", section, Alone(CPU), FileDesk(folder / name, newest))), folder / f"{name}-0.pt")
    finally:
        torch.set_num_threads(before)


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Of the draft after the last step."""
    return torch.load(folder / f"{name}-0.pt", weights_only=True)["candidates"][-1]["weights"]


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_worker_names_the_share_of_the_batch_that_makes_no_number(learned, kind):
    told = [(learned / f"{kind}-spoiled-{rank}.txt").read_text() for rank in (0, 1)]
    assert told[0] == told[1] and f"prompt-{SPOILED}" in told[0] and len(re.findall("prompt-", told[0])) == TWO[kind].conversations_per_step // 2


def test_what_one_worker_alone_finds_wrong_is_what_it_says(learned):
    """It must not meet the others, who are in the middle of something else, for a last checkpoint: what came of that was once blamed on the learning rate."""
    assert (learned / "fails-1.txt").read_text() == "one worker's states are wrong" and not (learned / "fails-0.txt").exists()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_have_the_curve_and_the_weights_of_one_that_accumulates(learned, kind):
    two, one = (torch.load(learned / f"{name}-0.pt", weights_only=True) for name in (kind, "one"))
    assert [row["step"] for row in two["curve"]] == [row["step"] for row in one["curve"]] == [1, 6, 10, 12]
    for mine, theirs in zip(two["curve"], one["curve"], strict=True):
        assert mine["workers"] == 2 and theirs["workers"] == 1 and mine["tokens"] == theirs["tokens"]
        for name in ("loss", "loss_1", "loss_2", "grad_norm", "lr"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert one["curve"][0]["loss"] > one["curve"][-1]["loss"]  # it has learned something
    assert [row["step"] for row in two["evaluations"]] == [6, 6, 12, 12]
    assert_close(weights(learned, kind), weights(learned, "one"))


def test_workers_that_share_the_weights_come_to_those_of_workers_that_do_not(learned):
    assert_close(weights(learned, "fsdp"), weights(learned, "ddp"))
    with pytest.raises(AssertionError):  # the tolerance tells a step from the next
        assert_close(torch.load(learned / "ddp" / "11.pt", weights_only=True)["draft"], weights(learned, "ddp"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_workers_goes_on_to_the_same_bits(learned, kind):
    assert torch.load(learned / f"{kind}-resumed-0.pt", weights_only=True)["resumed_steps"] == [5]
    again, first = weights(learned, f"{kind}-resumed"), weights(learned, kind)
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_worker_goes_on_where_two_were(learned, kind):
    """What is left when a node has died: it is the same training, with the whole of each step, in as many parts as fit into memory before."""
    alone(learned, f"{kind}-left", TWO[kind], learned / kind / "5.pt")
    left = torch.load(learned / f"{kind}-left-0.pt", weights_only=True)
    assert [row["workers"] for row in left["curve"]] == [2, 1, 1, 1] and left["resumed_steps"] == [5]
    assert_close(weights(learned, f"{kind}-left"), weights(learned, kind))


def test_only_the_first_worker_holds_candidates(learned):
    for kind in TWO:
        others = torch.load(learned / f"{kind}-1.pt", weights_only=True)["candidates"]
        assert [each["step"] for each in others] == [6, 12] and not any(each["weights"] for each in others)


CONVERSATIONS = [conversation(tokens, 5, seed=tokens) for tokens in (15, 40, 22, 9, 31)]


def gradients(**changes) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of five conversations."""
    section = TrainSection(conversations_per_step=5, ttt_steps=3, **{"precision": "float32"} | changes)
    draft, head, token_to_draft = draft_and_target()
    before = torch.get_num_threads()
    try:
        with StepGradient(draft, head, token_to_draft, section, 1, 1) as step_gradient:
            share = step_gradient(CONVERSATIONS, counted_rows(CONVERSATIONS, token_to_draft, 3), count_hits=True)
    finally:
        torch.set_num_threads(before)
    return share.loss, {name: parameter.grad for name, parameter in draft.named_parameters()}


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_step_in_parts_has_the_gradient_of_the_step(parts):
    (loss, whole), (loss_in_parts, in_parts) = gradients(), gradients(gradient_accumulation=parts)
    assert loss_in_parts == pytest.approx(loss, rel=1e-5)
    for name in whole:
        torch.testing.assert_close(in_parts[name], whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"gradient_accumulation": 2}, {"loss": "lk"}])
def test_activation_checkpointing_changes_no_bit_of_the_gradient(changes):
    (loss, kept), (loss_again, computed_again) = gradients(**changes), gradients(**changes, activation_checkpointing=True)
    assert loss_again == loss and all(torch.equal(computed_again[name], kept[name]) for name in kept)
