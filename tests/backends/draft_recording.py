"""What vLLM's own draft model is given and gives back while vLLM decodes: `python -m tests.backends.draft_recording SETUP RECORDING`, in a process of its own.

SETUP is JSON: `engine` (vLLM's arguments), `prompts` (token ids), `max_tokens`, and `configs`, folders of drafts' config.json. RECORDING is what torch.save
writes: `answers`, for each prompt its answer's `token_ids` and `rounds`, one for each time that vLLM drafted, with the draft's `features`, `tokens` and
`positions` (its first step's rows), the `landing` row from which it proposes, and for each step the `logits` and the `proposals`; and `rotations`, for each
config what vLLM's rotation makes of random `heads` at `positions`, in float32.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch


def main(setup_path: str, recording_path: str) -> None:
    from vllm import LLM, SamplingParams

    with open(setup_path, encoding="utf-8") as file:
        setup = json.load(file)
    llm = LLM(**setup["engine"])
    rounds = record(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter)
    answers = []
    for prompt in setup["prompts"]:  # one at a time: then all rows of a round are its own
        rounds.clear()
        sampling = SamplingParams(max_tokens=setup["max_tokens"], temperature=0.0, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        answers.append({"token_ids": list(output.outputs[0].token_ids), "rounds": list(rounds)})
    rotations = [rotation(llm.llm_engine.vllm_config, path) for path in setup["configs"]]
    torch.save({"answers": answers, "rotations": rotations}, recording_path)


def record(drafter: Any) -> list[dict[str, Any]]:
    """The list that every later round of the drafter is added to."""
    rounds: list[dict[str, Any]] = []
    model = drafter.model
    propose, combine, forward, logits = drafter.propose, model.combine_hidden_states, model.forward, model.compute_logits

    def recorded_propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        rounds.append({"logits": [], "landing": kwargs["token_indices_to_sample"]})
        proposals = propose(*args, **kwargs)
        done = rounds[-1]
        done["proposals"] = proposals[0].clone()
        done["landing"] = len(done["features"]) - 1 if done["landing"] is None else int(done["landing"][0])
        return proposals

    def recorded_combine(features: torch.Tensor) -> torch.Tensor:
        rounds[-1]["features"] = features.clone()
        return combine(features)

    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        done = rounds[-1]
        if "tokens" not in done:
            count = len(done["features"])
            done["tokens"], done["positions"] = kwargs["input_ids"][:count].clone(), kwargs["positions"][:count].clone()
        return forward(*args, **kwargs)

    def recorded_logits(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        rounds[-1]["logits"].append(found[0].float())
        return found

    drafter.propose, model.combine_hidden_states, model.forward, model.compute_logits = recorded_propose, recorded_combine, recorded_forward, recorded_logits
    return rounds


def rotation(vllm_config: Any, folder: str) -> dict[str, torch.Tensor]:
    """As LlamaAttention makes it of the config that vLLM reads from the folder (llama.py)."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import get_config

    config = get_config(folder, trust_remote_code=False)
    positions = torch.arange(100)
    heads = torch.randn(len(positions), 2, config.head_dim, generator=torch.Generator().manual_seed(0))
    with set_current_vllm_config(vllm_config):
        rope = get_rope(config.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters, is_neox_style=True, dtype=torch.float32)
        rotate = getattr(rope, "forward_native", rope.forward)  # on a CPU the others are kernels for bf16
        rotated, _ = rotate(positions, heads.flatten(1), heads.flatten(1).clone())
    return {"heads": heads, "positions": positions, "rotated": rotated.view_as(heads)}


if __name__ == "__main__":
    main(*sys.argv[1:])
