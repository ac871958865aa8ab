"""The stage functions with their engines: the one place where the folders that do the work meet vLLM and Quark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raysd.artifacts.stage import StageFunction, StageRun
from raysd.backends.stores import open_store
from raysd.draft.acceptance import ServedAcceptance
from raysd.pipeline.job import Edges


def edges() -> Edges:
    """What a stage's job needs of the outside."""
    return Edges(stage_functions(), open_store)


def stage_functions() -> dict[str, StageFunction]:
    """Stage name to its function. Each imports what it needs when it is called, so that a report loads no vLLM."""
    return {"capture": _capture, "train": _train, "quantize": _quantize, "sweep": _sweep, "report": _report}


def _capture(run: StageRun) -> dict[str, Any]:
    from raysd.backends.vllm_capture import capture_engine
    from raysd.hidden_states.capture import capture

    _check(run)
    return capture(run, capture_engine)


def _train(run: StageRun) -> dict[str, Any]:
    _check(run)
    from raysd.backends.ray_training import learn_on_workers

    if run.experiment.capture.mode == "stream":
        from raysd.backends.stream_capture import stream_engine
        from raysd.draft.streaming import train_on_stream

        return train_on_stream(run, _served_acceptance(run, run.experiment.train.served_tokens), stream_engine, learn_on_workers)
    from raysd.draft.train import train

    return train(run, _served_acceptance(run, run.experiment.train.served_tokens), learn_on_workers)


def _check(run: StageRun) -> None:
    """What `raysd plan` asks of a target that is on its machine, asked of one that was fetched just now, and of a stage that is run by hand."""
    from raysd.pipeline.preflight import check_experiment
    from raysd.target import resolve_target

    resolve_target(run.experiment.target, run.progress)
    check_experiment(run.experiment)


def _quantize(run: StageRun) -> dict[str, Any]:
    from raysd.backends.quark import quantize_checkpoint
    from raysd.checks.draft_served import with_served_draft
    from raysd.quantization.quantize import quantize

    return quantize(with_served_draft(run), quantize_checkpoint, _served_acceptance(run, run.experiment.quantize.served_tokens))


def _sweep(run: StageRun) -> dict[str, Any]:
    from raysd.backends.sweep_nodes import open_nodes
    from raysd.sweep.sweep import sweep

    return sweep(run, open_nodes)


def _report(run: StageRun) -> dict[str, Any]:
    from raysd.report.report import report

    return report(run)


def _served_acceptance(run: StageRun, max_tokens: int) -> ServedAcceptance:
    """What a stage calls to have the acceptance of a draft counted by a real vLLM server."""
    from raysd.backends.vllm_server import start_server
    from raysd.sweep.served import make_served_acceptance
    from raysd.target import load_tokenizer, resolve_target

    target: Path = resolve_target(run.experiment.target, run.progress)
    tokenizer = load_tokenizer(target, run.experiment.target)
    return make_served_acceptance(run.experiment, target, tokenizer, start_server, run.work / "served", run.progress, max_tokens)
