"""Tokens per second that raysd's trainer learns from, against `speculators` 0.9, on this CPU.

Run: python tests/benchmarks/train_vs_speculators.py [--json], about 8 minutes on two cores. With --json the only line is {"raysd_tok_s": ...,
"speculators_tok_s": ..., "ratio": ...}, of speculators' own default batch of about 8,192 tokens with three draft steps, and `demo_batch` with the same figures
of the demo's: 8 conversations with two.

Both sides train an Eagle3 draft of SmolLM2-135M's sizes on the same conversations in the same batches, with the same draft steps unrolled: pack a
batch, forward, backward, clip, optimiser step. They alternate in rounds, each in its own process and idle while the other computes; the ratio is of the
medians over rounds, and a token is one of a conversation, never padding. The states and the target's weights are random, which costs what real ones cost.
Both are checked to learn: each side's loss must fall from the first round to the last.

speculators comes from PyPI into an environment made for this run, which sees the packages of the running one (torch among them) and changes none.
Its own classes do all the work (`speculators_side.py`): Eagle3DraftModel, collation, losses, optimiser and Trainer.train_epoch. Where it leaves a choice,
it gets what is fastest for it on a CPU:

  draft_attn_impl sdpa, eager losses   its advice where there is no flex attention; the fused losses need Triton
  total_seq_len                        it pads every batch to this; here to the rows of the largest batch, so that under a tenth is padding
  bf16 autocast                        its default; on a CPU its trainer would leave it out
  optimizer adamw                      raysd's; its default, Muon, also orthogonalises every matrix at each step
  full attention                       the sliding window of its default is longer than any batch
  no progress bar, no log              its log of every step reads all metrics back
  threads                              as many as the process may use, as for raysd

Its draft has a frozen head, where raysd's learns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from packaging.requirements import Requirement
from safetensors.torch import save_file
from transformers import LlamaConfig

from raysd.draft.batch import TargetHead
from raysd.draft.gradient import StepGradient, parts_of
from raysd.draft.loss import counted_rows
from raysd.draft.model import Eagle3Draft
from raysd.draft.optimiser import DraftOptimiser
from raysd.draft.shape import draft_shape
from raysd.experiment.draft import DraftSection
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation
from raysd.target import read_shape
from raysd.target.weights import read_embedding_and_head

SPECULATORS = ["speculators==0.9.0", "hs-connectors==0.9.0"]
NOT_NEEDED = {"torchaudio", "torchvision"}
"""Required by speculators, used by no training of a language model, and built for one version of torch each."""
SIZES = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
             max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
"""SmolLM2-135M's."""
DRAFT = DraftSection(vocab_size=4096, aux_layers=[2, 15, 27])
Round = Callable[[], tuple[float, float]]
"""Trains one round; seconds, and the mean loss of its steps."""


@dataclass(frozen=True)
class Batches:
    """What both sides train on."""

    train: TrainSection
    steps: int
    """In a round."""
    rounds: int
    """Of each side, after one that is not counted."""

    def conversations(self) -> list[list[Conversation]]:
        size = self.train.conversations_per_step
        return [[conversation(step * size + i) for i in range(size)] for step in range(self.steps)]


THEIRS = Batches(TrainSection(warmup_frac=0, decay_frac=0, conversations_per_step=49, ttt_steps=3), steps=2, rounds=3)
"""As many conversations of these lengths as fill speculators' default batch of 8,192 tokens, and its default of three draft steps."""
DEMO = Batches(TrainSection(warmup_frac=0, decay_frac=0, conversations_per_step=8, ttt_steps=2), steps=6, rounds=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, python = write_target(folder / "target"), environment(folder / "environment")
        theirs, demo = (compare(batches, target, python, folder, tell=not args.json) for batches in (THEIRS, DEMO))
    if args.json:
        print(json.dumps(theirs | {"demo_batch": demo}))


def compare(batches: Batches, target: Path, python: Path, folder: Path, tell: bool) -> dict[str, float]:
    """Tokens per second of both sides, and the ratio. python: of the environment that has speculators; tell: says more in words."""
    data, train = batches.conversations(), batches.train
    with raysd_side(target, data, train) as raysd, speculators_side(folder, python, data, train, batches.rounds + 1) as speculators:
        results = alternate({"raysd": raysd, "speculators": speculators}, batches.rounds)
    tokens = sum(len(each.token_ids) for batch in data for each in batch)
    tok_s = {side: tokens / statistics.median(seconds for seconds, _ in rounds) for side, rounds in results.items()}
    ratio = tok_s["raysd"] / tok_s["speculators"]
    if tell:
        print(f"{train.conversations_per_step} conversations, {tokens / batches.steps:,.0f} tokens a step, {train.ttt_steps} draft steps:")
        for side, rounds in results.items():
            slowest, fastest = (tokens / pick(seconds for seconds, _ in rounds) for pick in (max, min))
            print(f"  {side} {tok_s[side]:,.0f} tok/s ({slowest:,.0f} to {fastest:,.0f}), loss {rounds[0][1]:.2f} to {rounds[-1][1]:.2f}")
        print(f"  ratio {ratio:.1f}; {batches.rounds} rounds of {batches.steps} steps, {threads()} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    return {"raysd_tok_s": round(tok_s["raysd"], 1), "speculators_tok_s": round(tok_s["speculators"], 1), "ratio": round(ratio, 2)}


def alternate(sides: dict[str, Round], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """What each side's rounds returned, without the first. Raises AssertionError if a side does not learn: it would not have trained."""
    results: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 == 0 else reversed(sides):
            results[side].append(sides[side]())
    for side, found in results.items():
        assert found[-1][1] < found[0][1], f"{side}: the loss does not fall: {[loss for _, loss in found]}"
    return {side: found[1:] for side, found in results.items()}


def threads() -> int:
    return len(os.sched_getaffinity(0))


def write_target(folder: Path) -> Path:
    """What a draft's training reads of a target: its configuration, embedding (which is its head) and final norm."""
    LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(folder)
    torch.manual_seed(0)
    save_file({"model.embed_tokens.weight": (torch.randn(SIZES["vocab_size"], SIZES["hidden_size"]) * 0.1).to(torch.bfloat16),
               "model.norm.weight": torch.ones(SIZES["hidden_size"], dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def conversation(seed: int) -> Conversation:
    """Of a length like those of the demo: about 40 tokens of prompt and 126 of answer."""
    lengths = random.Random(seed)
    prompt, answer = lengths.randint(28, 52), lengths.randint(92, 160)
    generator = torch.Generator().manual_seed(seed)
    return Conversation(f"p{seed}", "topic", "train", torch.randint(SIZES["vocab_size"], (prompt + answer,), generator=generator), prompt, "length",
                        torch.randn(prompt + answer - 1, len(DRAFT.aux_layers) + 1, SIZES["hidden_size"], generator=generator).to(torch.bfloat16))


def draft_vocabulary() -> torch.Tensor:
    return torch.arange(SIZES["vocab_size"])[::SIZES["vocab_size"] // DRAFT.vocab_size]


@contextlib.contextmanager
def raysd_side(target: Path, batches: list[list[Conversation]], train: TrainSection) -> Iterator[Round]:
    """Trains in this process, with the steps of raysd/draft/learn.py."""
    target_shape = read_shape(target)
    shape = draft_shape(DRAFT, target_shape)
    embedding, norm, head = read_embedding_and_head(target, target_shape)
    vocabulary = draft_vocabulary()
    torch.manual_seed(0)
    draft = Eagle3Draft(shape, embedding, vocabulary)
    with torch.no_grad():
        draft.lm_head.weight.copy_(head[vocabulary])
    token_to_draft = torch.full((shape.target_vocab_size,), -1)
    token_to_draft[vocabulary] = torch.arange(len(vocabulary))
    optimiser = DraftOptimiser(draft, train)
    parts = parts_of(train.conversations_per_step, threads(), draft.embedding.device)
    with StepGradient(draft, TargetHead(norm, head[vocabulary], shape.rms_norm_eps), token_to_draft, train, threads(), parts) as step_gradient:
        def one_round() -> tuple[float, float]:
            started_s, losses = time.perf_counter(), []
            for step, conversations in enumerate(batches):
                losses.append(step_gradient(conversations, counted_rows(conversations, token_to_draft, train.ttt_steps)).loss)
                optimiser.step(step)
            return time.perf_counter() - started_s, statistics.mean(losses)

        yield one_round


@contextlib.contextmanager
def speculators_side(folder: Path, python: Path, batches: list[list[Conversation]], train: TrainSection, rounds: int) -> Iterator[Round]:
    """Trains in a process in an environment with speculators, which ends with the context. Raises RuntimeError with the end of its log if it stops."""
    torch.save({"batches": [[(c.token_ids, c.prompt_tokens, c.states_TLH) for c in batch] for batch in batches], "draft_vocabulary": draft_vocabulary(),
                "aux_layers": DRAFT.aux_layers, "ttt_steps": train.ttt_steps, "ttt_decay": train.ttt_decay, "lr": train.lr, "rounds": rounds,
                "threads": threads()}, folder / "task.pt")
    log = folder / "speculators.log"
    with log.open("w") as errors, subprocess.Popen([python, Path(__file__).with_name("speculators_side.py"), folder], stdin=subprocess.PIPE,
                                                   stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                                                   env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}) as process:
        def one_round() -> tuple[float, float]:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("round\n")
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"speculators stopped:\n{log.read_text()[-4000:]}")
            done = json.loads(answer)
            return done["seconds"], done["loss"]

        yield one_round


def environment(folder: Path) -> Path:
    """Makes an environment with speculators that finds everything else where the running one does; returns its interpreter. Raises RuntimeError if pip fails."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip())
    (site / "running.pth").write_text("".join(f"{path}\n" for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))

    def install(*arguments: str) -> None:
        done = subprocess.run([python, "-m", "pip", "install", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"pip install {' '.join(arguments)}:\n{done.stdout[-4000:]}")

    install("--no-deps", *SPECULATORS)
    lacking = [each for package in importlib.metadata.distributions(path=[str(site)]) for each in package.requires or [] if not met(Requirement(each))]
    if lacking:
        same_torch = folder / "constraints.txt"
        same_torch.write_text(f"torch=={torch.__version__}\n")
        install("--constraint", str(same_torch), *lacking)
    return python


def met(requirement: Requirement) -> bool:
    """Whether the running environment has it, or speculators can do without."""
    if requirement.name in NOT_NEEDED or requirement.name == "hs-connectors" or requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
