"""A draft means the same to raysd and to vLLM: real engines decode with drafts of every shape, and what they computed is computed again from the same states.

vLLM computes in bf16. So does raysd here, beside the same in float32: what rounding does to a draft is measured, and vLLM may be as far from float32 as that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysd.backends.cpu_engine import cpu_environment
from raysd.draft.batch import Batch
from raysd.draft.checkpoint import draft_config, save_draft
from raysd.draft.layers import Rotary, rotary_frequencies
from raysd.draft.model import Eagle3Draft, Rows
from raysd.draft.replay import proposals
from raysd.draft.shape import draft_shape
from raysd.experiment.draft import DraftSection
from raysd.target import read_shape
from raysd.target.shape import LatentSizes
from raysd.target.weights import read_embedding_and_head
from tests.tiny_drafts import lively
from tests.tiny_models import tiny_deepseek, tiny_llama

K = 3
PROMPTS = [list(range(20, 61)), [7, 300, 41, 5, 5, 123, 9]]
MAX_TOKENS = 40
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A draft beside a target, and what changes of its shape must be seen as another draft."""

    draft: dict[str, Any]
    """Of the experiment's section."""
    wrong: dict[str, Any]
    """Another shape with the same weights."""
    target: Callable[[Path], Path] = tiny_llama
    told: dict[str, Any] = field(default_factory=dict)
    """What the draft's shape takes for the target's, in place of its own."""



def terse_llama(folder: Path) -> Path:
    """A target that says four words of a draft's 16 alone: so such a draft is right now and then."""
    tiny_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    said = torch.zeros(len(tensors["lm_head.weight"]), 1, dtype=torch.bfloat16)
    said[vocabulary(len(said), 16)[:4]] = 1
    tensors["lm_head.weight"] *= said
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
CASES = {
    "eagle3": Case({"vocab_size": 384, "attention_heads": 4, "kv_heads": 2}, OTHER_ROPE),
    "eagle3.1": Case({"vocab_size": 384, "algorithm": "eagle3.1"}, {"norm_output": False}),
    "mha": Case({"vocab_size": 384, "head_dim": 64, "attention_heads": 4, "kv_heads": 4, "aux_layers": [0, 1, 2, 3]}, OTHER_ROPE),
    "norm_before_residual": Case({"vocab_size": 384, "norm_before_residual": True}, {"norm_before_residual": False}),
    "yarn_partial": Case({"vocab_size": 384}, {"rope_parameters": YARN}, told={"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "whole_vocabulary": Case({"vocab_size": None}, OTHER_ROPE),
    "accepted": Case({"vocab_size": 16}, OTHER_ROPE, terse_llama),
    "latent": Case({"vocab_size": 384}, {"rope_parameters": YARN | {"mscale": 1.0}}, tiny_deepseek,
                   {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "latent_3.1": Case({"vocab_size": None, "algorithm": "eagle3.1", "norm_before_residual": True, "attention_heads": 4},
                       {"rope_parameters": YARN}, tiny_deepseek,
                       {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "latent": LatentSizes(64, 512, 64, 64, 32)}),
}


def vocabulary(whole: int, size: int) -> torch.Tensor:
    return torch.randperm(whole, generator=torch.Generator().manual_seed(1))[:size].sort().values


def small(case: Case, folder: Path) -> tuple[Path, Eagle3Draft]:
    """The case's target and its draft."""
    target = case.target(folder / "target")
    shape = dataclasses.replace(read_shape(target), **case.told)
    sizes = draft_shape(DraftSection(**case.draft), shape)
    embedding, _, head = read_embedding_and_head(target, shape)
    draft = lively(Eagle3Draft(sizes, embedding.float(), vocabulary(sizes.target_vocab_size, sizes.vocab_size)))
    if sizes.vocab_size < sizes.target_vocab_size:  # a whole vocabulary keeps a head of its own, so that vLLM cannot take the target's for it unseen
        with torch.no_grad():
            draft.lm_head.weight.copy_(head[draft.draft_to_target])
    return target, draft


def recorded(target: Path, draft: Path, folder: Path, configs: Sequence[Path] = ()) -> dict[str, Any]:
    """What an engine did (see draft_recording.py)."""
    engine = {"model": str(target), "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False,
              "disable_log_stats": True, "generation_config": "vllm", "kv_cache_memory_bytes": 2**27,
              "speculative_config": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": K}}
    setup, recording = folder / "setup.json", folder / "recording.pt"
    setup.write_text(json.dumps({"engine": engine, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "configs": [str(path) for path in configs]}))
    environment = cpu_environment({**os.environ, "VLLM_NO_USAGE_STATS": "1"}, sorted(os.sched_getaffinity(0)), 1)
    done = subprocess.run([sys.executable, "-m", "tests.backends.draft_recording", str(setup), str(recording)], env=environment,
                          cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return torch.load(recording)


def asked(prompt: list[int], answer: dict[str, Any]) -> tuple[Rows, dict[int, dict[str, Any]]]:
    """The rows that the engine's draft read, without what was rejected later, and the rounds by the row from which they proposed."""
    tokens = prompt + answer["token_ids"]
    features, rounds = {}, {}
    for found in answer["rounds"]:
        for i in range(found["landing"] + 1):
            position = int(found["positions"][i])
            assert int(found["tokens"][i]) == tokens[position + 1]
            features[position] = found["features"][i]
        rounds[int(found["positions"][found["landing"]])] = found
    count = len(features)
    assert sorted(features) == list(range(count))
    rows = Rows(torch.stack([features[i] for i in range(count)]).float(), torch.tensor(tokens[1:count + 1]), torch.arange(count), [count], [count - len(prompt) + 1])
    return rows, rounds


@torch.no_grad()
def logits(draft: Eagle3Draft, prompt: list[int], answer: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """[K, rounds, V] float32 of raysd's draft, which is given the tokens that vLLM proposed at the steps before, and of vLLM's."""
    rows, rounds = asked(prompt, answer)
    first = rows.counts[0] - rows.asked[0]
    landed = sorted(rounds)
    asked_rows = [row - first for row in landed]
    normed, unrolling = draft.first(rows)
    ours = [draft.logits(normed)]
    for step in range(1, K):
        tokens = torch.zeros(rows.asked[0], dtype=torch.int64)
        tokens[asked_rows] = torch.stack([rounds[row]["proposals"][step - 1] for row in landed])
        normed, unrolling = draft.next(rows, unrolling, tokens)
        ours.append(draft.logits(normed))
    theirs = torch.stack([torch.stack([rounds[row]["logits"][step] for row in landed]) for step in range(K)])
    assert torch.isneginf(theirs).sum(-1).eq(theirs.shape[-1] - draft.shape.vocab_size).all()
    return torch.stack(ours)[:, asked_rows].float(), theirs[..., draft.draft_to_target]


def disagreements(draft: Eagle3Draft, prompt: list[int], answer: dict[str, Any]) -> tuple[int, list[float]]:
    """How many proposals of raysd's own roll-out were compared, up to the first of a round that differs, and by how much vLLM's logits prefer its own there,
    in their standard deviations."""
    rows, rounds = asked(prompt, answer)
    first = rows.counts[0] - rows.asked[0]
    ours = proposals(draft, Batch(rows, *[torch.empty(0)] * 3), K)
    compared, gaps = 0, []
    for row, found in rounds.items():
        mine = ours[:, row - first]
        same = int((mine == found["proposals"]).long().cumprod(0).sum())
        compared += min(same + 1, K)
        if same < K:
            preferred = found["logits"][same]
            gaps.append(float((preferred[found["proposals"][same]] - preferred[mine[same]]) / preferred[draft.draft_to_target].std()))
    return compared, gaps


def again(draft: Eagle3Draft, dtype: torch.dtype, **changes: Any) -> Eagle3Draft:
    """The same weights in another dtype, or as a draft of another shape."""
    other = Eagle3Draft(dataclasses.replace(draft.shape, **changes), draft.embedding, draft.draft_to_target)
    other.load_state_dict(draft.state_dict())
    return other.to(dtype)


def check(case: Case, draft: Eagle3Draft, answers: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        exact, theirs = logits(draft, prompt, answer)
        rounded, wrong = logits(again(draft, torch.bfloat16), prompt, answer)[0], logits(again(draft, torch.float32, **case.wrong), prompt, answer)[0]
        # Root mean square over the vocabulary, in standard deviations of the logits: [K, rounds].
        of_vllm, of_rounding, of_wrong = ((x - exact).square().mean(-1).sqrt() / exact.std() for x in (theirs, rounded, wrong))
        compared, gaps = disagreements(draft, prompt, answer)
        for name, apart in (("vLLM", of_vllm), ("raysd in bf16", of_rounding), ("a wrong draft", of_wrong)):
            print(f"{name}: by step {[f'{x:.4f}' for x in apart.square().mean(-1).sqrt()]}, at worst {apart.max():.4f}")
        print(f"{len(answer['rounds'])} rounds; {len(gaps)} of {compared} proposals differ, where vLLM's is better by at most {max(gaps, default=0):.4f}")
        assert (of_vllm.square().mean(-1) < 2 ** 2 * of_rounding.square().mean(-1)).all()
        assert of_vllm.max() < 3 * of_rounding.max() < of_wrong.max()
        assert len(answer["rounds"]) > MAX_TOKENS / 2 and compared > MAX_TOKENS
        assert len(gaps) < 0.05 * compared and max(gaps, default=0) < 3 * of_rounding.max()


ROPES = {
    "partial": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "dynamic_trained": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "max_trained_positions": 128},
    "dynamic_alpha": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn_mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    "yarn_untruncated": YARN | {"attention_factor": 1.1, "truncate": False, "partial_rotary_factor": 0.5},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 16,
                 "long_factor": [1.0 + i for i in range(16)]},
    "longrope_never_long": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256, "short_factor": [1.0] * 16,
                            "long_factor": [1.0 + i for i in range(16)]},
    "mrope": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
}


def test_vllm_and_raysd_compute_one_draft_and_rotate_alike(tmp_path):
    case = CASES["eagle3"]
    target, draft = small(case, tmp_path)
    save_draft(draft, tmp_path / "draft", torch.bfloat16)
    shapes = {name: draft_shape(DraftSection(), dataclasses.replace(read_shape(target), rope_parameters=rope)) for name, rope in ROPES.items()}
    for name, shape in shapes.items():
        (tmp_path / name).mkdir()
        draft_config(shape).save_pretrained(tmp_path / name)
    recording = recorded(target, tmp_path / "draft", tmp_path, [tmp_path / name for name in shapes])
    check(case, draft, recording["answers"])
    for (name, shape), found in zip(shapes.items(), recording["rotations"], strict=True):
        rotary = Rotary(*rotary_frequencies(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings), interleaved=False)
        torch.testing.assert_close(rotary(found["heads"], found["positions"]), found["rotated"], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "eagle3"])
def test_a_draft_of_every_shape_is_one_draft_to_vllm_and_raysd(name, tmp_path):
    target, draft = small(CASES[name], tmp_path)
    save_draft(draft, tmp_path / "draft", torch.bfloat16)
    answers = recorded(target, tmp_path / "draft", tmp_path)["answers"]
    check(CASES[name], draft, answers)
    if name == "accepted":
        assert all(len(answer["rounds"]) < MAX_TOKENS for answer in answers)
