"""The acceptance of a draft as a real vLLM server counts it: `served_acceptance(draft, prompts, k)`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysd.artifacts.stage import Progress
from raysd.draft.acceptance import AcceptanceCounts, ServedAcceptance
from raysd.errors import EngineError
from raysd.experiment import Experiment
from raysd.load.requests import Request, Result
from raysd.prompts.prompt_set import Prompt
from raysd.prompts.template import ChatTokenizer, render
from raysd.sweep.engine import StartServer, engine_spec
from raysd.sweep.measure import limits_of, run_counted


def make_served_acceptance(experiment: Experiment, target_folder: Path, tokenizer: ChatTokenizer, start_server: StartServer, log_folder: Path,
                           progress: Progress, max_tokens: int) -> ServedAcceptance:
    """The callable that stages get. Answers are greedy and at most max_tokens long.

    The engine is the sweep's, but eager. Each call starts one and stops it, and leaves its log in log_folder. The callable raises EngineError if the engine does not start or fails on a prompt.
    """
    settings = experiment.sweep.engine.for_acceptance()
    calls = itertools.count(1)

    def served_acceptance(draft: Path, prompts: Sequence[Prompt], k: int) -> AcceptanceCounts:
        requests = greedy_requests(prompts, tokenizer, max_tokens, experiment.target.max_model_len, experiment.prompts.path)
        progress(f"starting vLLM with the draft, k = {k}")
        with start_server(engine_spec(experiment, target_folder, draft, k, settings), log_folder / f"served-{next(calls)}-k{k}.log") as server:
            progress(f"counting the draft's acceptance over {len(requests)} prompts, k = {k}")
            load, counted = run_counted(server, requests, settings.max_num_seqs, limits_of(experiment.sweep))
            refuse_failures(load.results, server.log_path)
        return counted.acceptance

    return served_acceptance


def greedy_requests(prompts: Sequence[Prompt], tokenizer: Any, osl: int, max_model_len: int, where: object) -> list[Request]:
    """One greedy request a prompt, chat template applied, that may end on its own. Raises ExperimentError if a prompt leaves no room for `osl` tokens."""
    rendered = render(prompts, tokenizer, max_model_len - osl, where)
    return [Request(prompt.id, tuple(token_ids), osl, temperature=0.0, ignore_eos=False)
            for prompt, token_ids in zip(prompts, rendered, strict=True)]


def refuse_failures(results: Sequence[Result], log_path: Path) -> None:
    """Raises EngineError if a request failed: counts over some of the prompts would pass for counts over all."""
    failed = [result for result in results if result.error is not None]
    if failed:
        raise EngineError(what=f"{len(failed)} of {len(results)} prompts were not answered; `{failed[0].prompt_id}`: {failed[0].error}", where=log_path,
                          fix="look for the reason in the engine's log")
