"""The side of `train_vs_speculators.py` that trains with speculators: a process in an environment of its own that trains a round whenever it is told to.

Run by that script: python speculators_side.py FOLDER. The folder holds `target/` (config.json and the weights that a draft starts from) and `task.pt`, a
dict: batches, lists of (token_ids int64 [T + 1], prompt tokens, states bfloat16 [T, L, H]); draft_vocabulary, int64 ascending; and the settings of `main`.
A line on stdin asks for one round over all batches; a line of JSON on stdout answers it: {"seconds": ..., "loss": ...}, the loss a mean over steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from speculators.model import SpeculatorModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader

NEVER = 10**9
"""Steps between log entries. The trainer's log asks an accelerator for times, and a CPU is none."""


class Conversations(BaseDataset):
    """Conversations in memory, as speculators' own dataset gives them when it has read them from disk."""

    def __init__(self, conversations: list, max_len: int) -> None:
        self.conversations = conversations
        super().__init__(max_len)

    def __len__(self) -> int:
        return len(self.conversations)

    def _compute_approx_lengths(self) -> list[int]:
        return [len(states) for _, _, states in self.conversations]

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        token_ids, prompt_tokens, states = self.conversations[index]
        return {"hidden_states": states[:, :-1].flatten(1), "input_ids": token_ids[:len(states)], "verifier_last_hidden_states": states[:, -1],
                "loss_mask": torch.arange(len(states)) >= prompt_tokens}


class CpuTrainer(Trainer):
    """speculators' trainer, which would move its model to the first accelerator."""

    def setup_model(self) -> None:
        SpeculatorModel.verify_training_compatible(self.model)
        self.local_rank = self.device_type = "cpu"
        self.global_step = 1  # step 0 is always logged


def new_trainer(target: Path, task: dict) -> CpuTrainer:
    """A trainer of a fresh draft of the target. Its settings are explained in train_vs_speculators.py."""
    vocabulary, ttt_steps = task["draft_vocabulary"], task["ttt_steps"]
    layer = create_transformer_layer_config(str(target), num_layers=1, draft_arch="llama", hidden_act="silu", sliding_window=2048, full_attention_indices=[0])
    t2d = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=vocabulary - torch.arange(len(vocabulary)), draft_vocab_size=len(vocabulary), draft_attn_impl="sdpa", norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False, target_layer_ids=task["aux_layers"], ttt_steps=ttt_steps, verifier_name_or_path=str(target))
    call, _ = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", ttt_steps=ttt_steps, ttt_step_loss_decay=task["ttt_decay"])
    conversations = sum(task["batches"], [])
    batches = list(torch.arange(len(conversations)).split([len(batch) for batch in task["batches"]]))
    longest = max(sum(len(states) - 1 for _, _, states in batch) for batch in task["batches"])
    collate = CollateFn(longest, layer.hidden_size, num_target_layers=len(task["aux_layers"]), preprocess=shift_batch)
    loader = DataLoader(Conversations(conversations, longest), batch_sampler=[batch.tolist() for batch in batches], collate_fn=collate)
    config = TrainerConfig(lr=task["lr"], num_epochs=task["rounds"], save_path=str(target.parent / "checkpoints"), train_call_kwargs=call, optimizer="adamw",
                           weight_decay=0.0, log_freq=NEVER)
    return CpuTrainer(model, config, loader)


def rounds(trainer: CpuTrainer) -> Iterator[dict[str, float]]:
    """One epoch of the trainer for each."""
    losses: list[torch.Tensor] = []
    trainer.model.register_forward_hook(lambda model, inputs, output: losses.append(output[1].detach()))
    for epoch in range(trainer.config.num_epochs):
        losses.clear()
        started_s = time.perf_counter()
        trainer.train_epoch(epoch)
        seconds = time.perf_counter() - started_s
        yield {"seconds": seconds, "loss": float(torch.stack(losses).mean())}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    folder = Path(sys.argv[1])
    task = torch.load(folder / "task.pt", weights_only=True)
    torch.set_num_threads(task["threads"])
    for _, answer in zip(sys.stdin, rounds(new_trainer(folder / "target", task)), strict=False):
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
