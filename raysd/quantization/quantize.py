"""The quantize stage: Quark quantizes the draft, exclusions are rewritten for vLLM, the file is audited, and the acceptance measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysd.artifacts.stage import StageRun
from raysd.draft.acceptance import AcceptanceCounts, ServedAcceptance
from raysd.errors import ExperimentError, StageError
from raysd.experiment import Experiment
from raysd.quantization.audit import audit_draft
from raysd.quantization.exclusions import check_exclusions, excluded_modules, vllm_patterns

Quantizer = Callable[[Path, Path, str, list[str]], None]
"""`quantizer(draft, out, scheme, exclude)` writes the quantized checkpoint of a draft folder into `out`."""


def quantize(run: StageRun, quantizer: Quantizer, served_acceptance: ServedAcceptance) -> dict[str, Any]:
    """Writes `draft/`, the draft in FP8.

    Metrics: quantized_weights, excluded_weights, file_bytes, bf16_file_bytes, served (FP8) and bf16_served acceptance on the choose split, acceptance_ratio.
    Raises ExperimentError for exclusions that vLLM could not follow, StageError if the file fails its audit.
    """
    section = run.experiment.quantize
    source = bf16_draft(run.experiment, run.inputs)
    wrong = check_exclusions(linear_modules(source), section.exclude)
    if wrong:
        raise ExperimentError(what=f"the exclusions cannot be followed: {wrong}", where=f"quantize.exclude: {section.exclude}", fix="correct the list; a name may hold * for any text")
    folder = run.out / "draft"
    run.progress(f"quantizing to {section.scheme} with Quark")
    quantizer(source, folder, section.scheme, section.exclude)
    rewrite_exclusions(folder)
    run.progress("auditing the quantized draft")
    audit = audit_draft(folder)
    prompts = run.prompts.split("choose", run.experiment.capture.choose_prompts if run.experiment.capture else None)
    run.progress("measuring the FP8 draft's acceptance in vLLM")
    served = served_acceptance(folder, prompts, section.served_k)
    bf16_served = _served_in_training(run)
    if bf16_served is None:
        run.progress("measuring the BF16 draft's acceptance in vLLM")
        bf16_served = served_acceptance(source, prompts, section.served_k).as_metrics()
    return {"scheme": section.scheme, "quantized_weights": audit.quantized, "excluded_weights": audit.high_precision,
            "file_bytes": _weight_bytes(folder), "bf16_file_bytes": _weight_bytes(source), "served_k": section.served_k, "served_tokens": section.served_tokens, "served": served.as_metrics(),
            "bf16_served": bf16_served, "acceptance_ratio": served.acceptance_length / bf16_served["acceptance_length"]}


def bf16_draft(experiment: Experiment, inputs: dict[str, Path]) -> Path:
    """The BF16 draft's folder: the experiment's checkpoint, or what training left."""
    return experiment.draft.checkpoint or inputs["train"] / "draft"


def linear_modules(folder: Path) -> list[str]:
    """Names of the modules of a draft's checkpoint that have a matrix, which quantizing is about."""
    from safetensors import safe_open

    modules = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            modules += [name.removesuffix(".weight") for name in file.keys() if name.endswith(".weight") and len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118 (no iterator)
    return sorted(modules)


def rewrite_exclusions(folder: Path) -> None:
    """Rewrites the `quantization_config.exclude` that Quark wrote into a checkpoint, so that vLLM honours it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    written = config.get("quantization_config", {}).get("exclude")
    if written is None:
        raise StageError(what="Quark wrote no exclusions into the quantized draft's config", where=path, fix="this Quark version is not supported; use amd-quark 0.13")
    modules = linear_modules(folder)
    config["quantization_config"]["exclude"] = vllm_patterns(modules, excluded_modules(modules, written))
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def _served_in_training(run: StageRun) -> dict[str, Any] | None:
    """What training measured for the BF16 draft under the same conditions, so that it is not measured twice; None if it measured under others."""
    from raysd.artifacts.record import read_record

    record = read_record(run.inputs["train"]) if "train" in run.inputs else None
    if record is None:
        return None
    section = run.experiment.quantize
    if (record.metrics["served_k"], record.metrics["served_tokens"]) != (section.served_k, section.served_tokens):
        return None  # the engine's settings are the same: train's fingerprint holds them
    counts = record.metrics["served"]
    return AcceptanceCounts(counts["drafts"], counts["draft_tokens"], counts["accepted"], tuple(counts["per_position"])).as_metrics()


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
