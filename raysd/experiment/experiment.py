"""The whole experiment file as one typed value."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from raysd.experiment.capture import CaptureSection
from raysd.experiment.draft import DraftSection
from raysd.experiment.hardware import HardwareSection
from raysd.experiment.prompts import PromptsSection
from raysd.experiment.quantize import QuantizeSection
from raysd.experiment.section import Placement, Section
from raysd.experiment.serve import ServeSection
from raysd.experiment.store import read_store
from raysd.experiment.sweep import Arm, SweepSection
from raysd.experiment.target import TargetSection
from raysd.experiment.train import TrainSection


class Experiment(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """What it is called; the folder of its artifacts in the store."""
    store: Placement[str] = "../runs"
    """Where artifacts go: a folder, relative to the experiment file, or `s3://BUCKET/PREFIX`. Or a mapping with `uri`, `endpoint_url`, `region` and
    `addressing_style` (S3Section), which is resolved to a text as `--store` takes it."""
    target: TargetSection
    hardware: HardwareSection = HardwareSection()
    prompts: PromptsSection
    draft: DraftSection = DraftSection()
    capture: CaptureSection | None = None
    train: TrainSection | None = None
    quantize: QuantizeSection | None = None
    sweep: SweepSection = SweepSection()
    serve: ServeSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if self.draft.checkpoint is not None:
            for name in ("capture", "train"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: has no effect, since draft.checkpoint names a finished draft; remove one of the two")
            given = [name for name in type(self.draft).model_fields if name not in ("checkpoint", "layer_ids") and getattr(self.draft, name) != getattr(DraftSection(), name)]
            if given:
                raise ValueError(f"draft.{given[0]}: has no effect, since draft.checkpoint names a finished draft; remove one of the two")
        elif "bf16" in self.sweep.arms or "fp8" in self.sweep.arms:
            for name in ("capture", "train"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name}: is missing, and draft.checkpoint names no finished draft; add `{name}: {{}}` or a checkpoint"
                    )
        if self.train is not None and self.capture is None:
            raise ValueError("train: has nothing to learn from; add `capture: {}` or remove the section")
        if self.capture is not None and self.capture.mode == "stream":
            if self.train is None:
                raise ValueError("capture.mode: a stream needs a training that takes it; add `train: {}`, or use mode: disk")
            if self.train.max_failures != type(self.train).model_fields["max_failures"].default:
                raise ValueError("train.max_failures: has no effect beside capture.mode: stream, whose workers are not started again; remove it, or use mode: disk")
            capture_gpus, needed = self.hardware.of_stage("capture").gpus, self.target.tensor_parallel
            if self.hardware.name != "cpu" and capture_gpus < needed:
                raise ValueError(f"hardware.resources.capture.gpus: {capture_gpus:g} are fewer than the {needed} that the engine of a stream takes, beside those of the training; use {needed}")
        if self.capture is not None and self.capture.engines > 1 and self.hardware.name != "cpu":
            raise ValueError("capture.engines: several engines are for hardware.name: cpu, where they share the cores; use 1")
        cpu, engine = self.hardware.name == "cpu", self.sweep.engine
        for field, section, on_cpu in (("capture.kv_cache_bytes", self.capture, True), ("sweep.engine.kv_cache_bytes", engine, True), ("sweep.engine.gpu_memory_frac", engine, False),
                                        ("serve.engine.kv_cache_bytes", self.serve and self.serve.engine, True), ("serve.engine.gpu_memory_frac", self.serve and self.serve.engine, False)):
            name = field.rpartition(".")[2]
            if section is not None and on_cpu != cpu and getattr(section, name) != type(section).model_fields[name].default:
                raise ValueError(f"{field}: has no effect with hardware.name: {self.hardware.name}, where {'sweep.engine.gpu_memory_frac' if on_cpu else 'kv_cache_bytes'} "
                                 "says how much memory engines take; remove it")
        if engine.draft_args and self.sweep.arms == ["none"] and self.train is None and self.quantize is None:
            raise ValueError("sweep.engine.draft_args: has no effect where nothing drafts; remove it, or add an arm to sweep.arms")
        if cpu and self.sweep.acceptance.rates is not None:
            raise ValueError("sweep.acceptance.rates: vLLM's CPU build knows no synthetic acceptance; use real, or hardware that has a GPU")
        gpus = self.hardware.of_stage("train").gpus
        if self.train is not None and self.train.workers > 1 and self.hardware.name != "cpu" and gpus < 1:
            raise ValueError(f"hardware.resources.train.gpus: {gpus:g} gives none of the {self.train.workers} workers on {self.hardware.name} a GPU of its own; use 1")
        if self.quantize is not None and self.train is None and self.draft.checkpoint is None:
            raise ValueError("quantize: there is no draft to quantize; add `capture: {}` and `train: {}`, or a draft.checkpoint")
        if "fp8" in self.sweep.arms and self.quantize is None:
            raise ValueError("sweep.arms: holds fp8, but there is no quantize section; add `quantize: {}` or remove the arm")
        if self.serve is not None:
            self._check_serve(self.serve)
        return self

    def _check_serve(self, serve: ServeSection) -> None:
        arm, engine = self.served_arm(serve.arm), serve.engine or self.sweep.engine
        if serve.arm is not None:
            self.check_arm(serve.arm)
        scaling = serve.autoscaling
        drafting = {"k": serve.k, "k_per_batch": serve.k_per_batch, "acceptance_floor": serve.acceptance_floor, "autoscaling.acceptance_length": scaling.acceptance_length}
        if arm == "none" and (given := [name for name, value in drafting.items() if value is not None]):
            raise ValueError(f"serve.{given[0]}: has no effect with the arm none, which drafts nothing; remove it")
        most, target = scaling.most_of(engine), scaling.target_of(engine)
        if target > most:
            raise ValueError(f"serve.autoscaling.target_ongoing_requests: {target:g} is above the {most} that a replica takes at once: requests would wait before a replica is added")

    def served_arm(self, asked: Arm | None = None) -> Arm:
        """The arm that goes to production: the one asked for, or the best known."""
        return asked or next(arm for arm in ("fp8", "bf16", "none") if arm in self.sweep.arms)

    def check_arm(self, arm: Arm) -> None:
        """Raises ValueError if nothing in the experiment makes the draft of an arm."""
        if arm == "fp8" and self.quantize is None:
            raise ValueError("serve.arm: fp8 has no draft, since there is no quantize section; add `quantize: {}`, or serve another arm")
        if arm == "bf16" and self.train is None and self.draft.checkpoint is None:
            raise ValueError("serve.arm: bf16 has no draft; add `capture: {}` and `train: {}`, or a draft.checkpoint")

    @field_validator("store", mode="before")
    @classmethod
    def _store_as_text(cls, store: Any) -> Any:
        if not isinstance(store, (str, dict)):
            return store  # for pydantic to refuse
        named = read_store(store)
        return named if isinstance(named, str) else named.text()
