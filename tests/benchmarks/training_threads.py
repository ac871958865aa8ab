"""How much faster a training step is when each CPU thread takes some of its conversations, against all threads sharing every product.

Run: python tests/benchmarks/training_threads.py. Both sides alternate in one run, on a draft of SmolLM2-135M's size and random conversations; the
ratio is of the medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from raysd.draft.batch import TargetHead
from raysd.draft.gradient import StepGradient, parts_of
from raysd.experiment.train import TrainSection
from tests.tiny_drafts import conversation, small_draft, small_shape

ROUNDS, STEPS = 6, 6


def main() -> None:
    threads = len(os.sched_getaffinity(0))
    draft = small_draft(small_shape(hidden_size=576, attention_heads=9, kv_heads=3, head_dim=64, intermediate_size=1536, target_vocab_size=49152,
                                    vocab_size=4096))
    head = TargetHead(torch.ones(576), draft.lm_head.weight.detach().to(torch.bfloat16), 1e-5)
    token_to_draft = torch.full((49152,), -1)
    token_to_draft[draft.draft_to_target] = torch.arange(4096)
    for per_step in (4, 8):
        section = TrainSection(conversations_per_step=per_step, ttt_steps=2)
        steps = [[conversation(130 + 10 * (i % 4), 40, seed=step * per_step + i, hidden=576) for i in range(per_step)] for step in range(STEPS)]
        sides = {"together": 1, "shared out": parts_of(per_step, threads, torch.device("cpu"))}
        tokens_s: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, parts in sides.items():
                with StepGradient(draft, head, token_to_draft, section, threads, parts) as step_gradient:
                    step_gradient(steps[0])  # the threads start, oneDNN builds its kernels
                    started = time.perf_counter()
                    for conversations in steps:
                        step_gradient(conversations)
                    tokens_s[name].append(sum(len(c.token_ids) for c in sum(steps, [])) / (time.perf_counter() - started))
        medians = {name: statistics.median(values) for name, values in tokens_s.items()}
        print(f"{per_step} conversations a step, {threads} threads: " + ", ".join(f"{name} {value:,.0f} tok/s" for name, value in medians.items())
              + f", ratio {medians['shared out'] / medians['together']:.2f}")


if __name__ == "__main__":
    main()
