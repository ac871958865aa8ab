"""Builds vLLM's own model of each draft, loads its weights as an engine does, and prints what came of them. No engine starts, and the target is its config.json alone.

    python -m tests.checks.draft_loading TARGET DRAFT...

Prints, by draft, the parameters that no tensor reached, and how many numbers came out of the weights and their sum: what vLLM drops is missing in both. Of a draft
that vLLM does not take, its error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def loaded(target: str, draft: str) -> dict[str, Any]:
    """{"empty": names, "numbers": count, "sum": their sum}, of the floating-point parameters."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": 2}
    # float32: what is loaded is what was written
    config = EngineArgs(model=target, dtype="float32", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True, speculative_config=speculation).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(config, model_config=config.speculative_config.draft_model_config)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(torch.nan)
        get_model_loader(config.load_config).load_weights(model, config.speculative_config.draft_model_config)
    return {"empty": sorted(name for name, parameter in parameters.items() if bool(parameter.isnan().any())),
            "numbers": sum(int(parameter.isfinite().sum()) for parameter in parameters.values()),
            "sum": sum(float(parameter.detach().double().nansum()) for parameter in parameters.values())}


if __name__ == "__main__":
    found = {}
    for draft in sys.argv[2:]:
        try:
            found[Path(draft).name] = loaded(sys.argv[1], draft)
        except Exception as err:  # whatever vLLM raises is what came of the draft
            found[Path(draft).name] = {"error": f"{type(err).__name__}: {err}"}
    print(json.dumps(found))
