"""The chain of an experiment as data: which stages it has, what each depends on, and the fingerprint that follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raysd.artifacts import ArtifactKey, fingerprint
from raysd.artifacts.store import RUN
from raysd.experiment import Experiment
from raysd.prompts.prompt_set import PromptSet

VERSIONS = {"capture": 4, "train": 4, "quantize": 1, "sweep": 3, "report": 2}
"""Stage to the version of its code, in the order they run: raise it when new code makes something else of the same inputs."""

OURS = (*VERSIONS, RUN)
"""What stands in the place of a stage in the keys of what raysd writes."""


@dataclass(frozen=True)
class Stage:
    """One stage of one experiment."""

    experiment: str
    name: str
    identity: dict[str, Any]
    """All that decides its result: stage, version, the values that change it, and the fingerprints of its inputs."""
    inputs: tuple[str, ...]
    """Names of the stages whose artifacts it reads."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the identity."""
        return fingerprint(self.identity)

    @property
    def key(self) -> ArtifactKey:
        """Where its artifact is in a store."""
        return ArtifactKey(self.experiment, self.name, self.fingerprint)

    def input_keys(self) -> list[ArtifactKey]:
        """Where the artifacts that it reads are in a store."""
        return [ArtifactKey(self.experiment, name, self.identity["inputs"][name]) for name in self.inputs]


def build_stages(
    experiment: Experiment, target: dict[str, Any], prompts: PromptSet, checkpoint: dict[str, Any] | None = None
) -> list[Stage]:
    """The stages that an experiment needs, in the order they run.

    target: what `identify_target` says. checkpoint: what `identify_draft` says of `draft.checkpoint`, if there is one.
    A stage is there when the experiment has its section; sweep and report always are. A capture that is a stream is part of the train stage. The sweep
    reads only the drafts of its arms.
    """
    stages: dict[str, Stage] = {}

    def add(name: str, values: dict[str, Any], inputs: tuple[str, ...]) -> None:
        made = {source: stages[source].fingerprint for source in inputs}
        identity = {"stage": name, "version": VERSIONS[name], **values, "inputs": made}
        stages[name] = Stage(experiment.name, name, identity, inputs)

    engine = experiment.sweep.engine
    devices = {"hardware": experiment.hardware.name, "tensor_parallel": experiment.target.tensor_parallel}  # others round sums differently
    draft: tuple[str, ...] = ("train",) if checkpoint is None else ()
    finished = {} if checkpoint is None else {"checkpoint": checkpoint, "layer_ids": experiment.draft.layer_ids}
    capture, train = experiment.capture, experiment.train
    captured = {} if capture is None else {
        "target": target,
        **devices,
        "engine": {"env": engine.env} | ({} if experiment.hardware.name == "cpu" else {"gpu_memory_frac": engine.gpu_memory_frac}),
        "draft": {"aux_layers": experiment.draft.aux_layers},
        "capture": capture.result_values(),
        "prompts": prompts.fingerprint("train", "choose"),
    }
    trained = {} if train is None else {
        "engine": engine.for_acceptance().result_values(),
        "draft": experiment.draft.result_values(),
        "train": train.result_values(),
    }
    if capture is not None and capture.mode == "stream":
        # The train stage is both. What training says of the engine and the draft is more of the same.
        add("train", {**captured, "capture_version": VERSIONS["capture"], **trained}, ())
    else:
        if capture is not None:
            add("capture", captured, ())
        if train is not None:
            add("train", trained, ("capture",))
    if experiment.quantize is not None:
        add(
            "quantize",
            {
                "target": target,
                **finished,
                **devices,
                "engine": engine.for_acceptance().result_values(),
                "quantize": experiment.quantize.result_values(),
                "prompts": prompts.fingerprint("choose"),
            },
            draft,
        )
    arms = experiment.sweep.arms
    add(
        "sweep",
        {
            "target": target,
            **(finished if "bf16" in arms else {}),
            **devices,
            "sweep": experiment.sweep.result_values(),
            "prompts": prompts.fingerprint("report"),
            **({"workload_prompts": {name: own.fingerprint("report") for name, own in prompts.measured.items()}} if prompts.measured else {}),
        },
        (draft if "bf16" in arms else ()) + (("quantize",) if "fp8" in arms else ()),
    )
    price = experiment.hardware.usd_per_hour
    add("report", {} if price is None else {"usd_per_hour": price}, tuple(stages))
    return list(stages.values())
