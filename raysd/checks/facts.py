"""All that checks look at: an experiment, the vLLM that is to run it, its machine, and what is known of its target and its draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from packaging.version import Version

from raysd.checks.attention import Kind, Platform, backends_of, is_on, kind_of, platform_of, text_part
from raysd.checks.draft_plan import planned_draft
from raysd.checks.kv_blocks import BlockSizes
from raysd.checks.releases import has_environment, has_speculative
from raysd.errors import RaysdError
from raysd.experiment import Experiment
from raysd.experiment.sweep import EngineSettings
from raysd.hardware.catalogue import Machine
from raysd.target.known import known_draft


class VllmProbe(BlockSizes, Protocol):
    """What the installed vLLM says of itself."""

    @property
    def version(self) -> str: ...

    @property
    def speculative_fields(self) -> frozenset[str]:
        """The keys of `speculative_config`."""

    @property
    def environment_names(self) -> frozenset[str]:
        """The environment variables that vLLM reads."""

    def takes_eagle3(self, architecture: str) -> bool | None:
        """Whether a target of this architecture hands its hidden states to an Eagle3 draft; None: vLLM has no such model."""

    def cpu_latent_backend(self) -> str:
        """Which backend MLA gets on this machine's CPU."""

    def aiter_mla_takes_heads(self, heads: int) -> bool:
        """Whether AITER's MLA kernels work on so many query heads of one rank."""


@dataclass(frozen=True)
class EngineFacts:
    """One kind of engine that the experiment starts: the sweep's, or the one that is served."""

    place: str
    """Where its settings stand: `sweep.engine` or `serve.engine`."""
    settings: EngineSettings
    ks: tuple[int, ...]
    """Tokens drafted per verify step; empty: nothing drafts."""
    k_field: str
    """Where they stand."""
    machine_env: Mapping[str, str]
    """`hardware.env`."""
    prefix_caching: bool = False

    @property
    def drafts(self) -> bool:
        return bool(self.ks)

    @cached_property
    def env(self) -> dict[str, str]:
        """The variables that the experiment sets for its processes."""
        return {**self.machine_env, **self.settings.env}

    def env_field(self, name: str) -> str:
        """Where a variable stands, or would."""
        return f"hardware.env.{name}" if name in self.machine_env and name not in self.settings.env else f"{self.place}.env.{name}"

    @cached_property
    def arguments(self) -> dict[str, str | int | float | bool]:
        """`extra_args` by plain name: `{no-x: true}` is `{x: false}`."""
        plain: dict[str, str | int | float | bool] = {}
        for name, value in self.settings.extra_args.items():
            name = name.strip("-").replace("_", "-")
            if name.startswith("no-") and isinstance(value, bool):
                name, value = name.removeprefix("no-"), not value
            plain[name] = value
        return plain

    def argument(self, name: str) -> Any:
        """An argument of vLLM's server; None if the experiment does not give it."""
        return self.arguments.get(name)

    def draft_argument(self, name: str) -> Any:
        """A key of `speculative_config` that the experiment gives; None if it does not."""
        return next((value for given, value in self.settings.draft_args.items() if given.replace("-", "_") == name), None)

    def field(self, name: str) -> str:
        """Where an argument stands, or would."""
        return f"{self.place}.extra_args.{name}"

    def draft_field(self, name: str) -> str:
        """Where a key of `speculative_config` stands, or would."""
        return f"{self.place}.draft_args.{name}"

    def is_on(self, name: str, default: bool) -> bool:
        """A switch among the variables."""
        return is_on(self.env, name, default)

    @property
    def fp8_kv(self) -> bool:
        return str(self.argument("kv-cache-dtype")).startswith("fp8")


@dataclass(frozen=True)
class Facts:
    experiment: Experiment
    vllm: Version | None
    """The version that is to run it; None: nobody said, and none is installed."""
    machine: Machine
    target: Mapping[str, Any] | None
    """The target's config.json, from its files or as far as it is published; None: neither is at hand."""
    draft: Mapping[str, Any] | None
    """The finished draft's config.json; None: none is named, or its files are not on this machine."""
    probe: VllmProbe | None
    """None: the version asked about is not the installed one."""
    engines: tuple[EngineFacts, ...]
    target_folder: Path | None = None
    """The target's files; None: they are not on this machine."""
    target_weights: int | None = None
    """Bytes of the target's weight files, on disk or as published; None: not known."""
    draft_folder: Path | None = None
    """The finished draft's files; None: none is named, or they are not on this machine."""
    draft_weights: int | None = None
    """Bytes of its weight files."""
    draft_misfit: RaysdError | None = None
    """What check_draft_fit says of the draft and the target on disk; None: they fit, or one of the two is not on disk."""
    has_chat_template: bool | None = None
    """Of the target; None: its files are not on this machine."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of what is installed on this machine, by the packages' names."""
    clashes: tuple[str, ...] = ()
    """What installed packages ask of each other and do not find, in words."""

    @property
    def platform(self) -> Platform | None:
        """vLLM's; None: not known."""
        return platform_of(self.machine.name, self.machine.gfx)

    @property
    def rocm(self) -> bool:
        return self.platform == "rocm"

    @property
    def drafting(self) -> tuple[EngineFacts, ...]:
        """Those of the engines that draft."""
        return tuple(engine for engine in self.engines if engine.drafts)

    @property
    def tensor_parallel(self) -> int:
        return self.experiment.target.tensor_parallel

    @property
    def target_kind(self) -> Kind | None:
        """The target's kind of attention; None: not known."""
        return None if self.target is None else kind_of(self.target)

    @property
    def words(self) -> str:
        """The vLLM, in words."""
        return "this vLLM" if self.vllm is None else f"vLLM {self.vllm}"

    @property
    def base(self) -> Version | None:
        """The release that the version belongs to: a nightly before 0.24.0 counts as it."""
        return None if self.vllm is None else Version(self.vllm.base_version)

    def before(self, release: str) -> bool:
        """Whether the version is known, and older than a release."""
        return self.base is not None and self.base < Version(release)

    def has_speculative(self, name: str) -> bool | None:
        """Whether `speculative_config` has a key: by the installed vLLM, else by the table; None: not known."""
        if self.probe is not None:
            return name in self.probe.speculative_fields
        return None if self.base is None else has_speculative(name, self.base)

    def has_environment(self, name: str) -> bool | None:
        """Whether vLLM reads a variable, likewise."""
        if self.probe is not None:
            return name in self.probe.environment_names
        return None if self.base is None else has_environment(name, self.base)

    def target_backends(self, engine: EngineFacts) -> tuple[str, ...]:
        """The attention backends of the target's layers; empty: not known."""
        if self.target_kind is None or self.platform is None:
            return ()
        named = engine.argument("attention-backend")
        latent_on_cpu = self.cpu_latent if self.platform == "cpu" and self.target_kind == "latent" else "CPU_MLA"
        return backends_of(self.target_kind, self.platform, None if named is None else str(named), engine.env, latent_on_cpu)

    @property
    def cpu_latent(self) -> str:
        """What MLA gets on CPUs: of this machine's, the installed vLLM knows whether they have AMX; without it, the backend that any of them has."""
        return "CPU_MLA" if self.probe is None else self.probe.cpu_latent_backend()

    @cached_property
    def draft_config(self) -> Mapping[str, Any] | None:
        """The sizes of the draft that is served, as config.json names them: a finished draft's own, on disk or as published, or those of the one to be trained; None: not known."""
        section = self.experiment.draft
        if section.checkpoint is None:
            return None if self.target is None else planned_draft(section, self.target)
        if self.draft is None:
            return known_draft(section.checkpoint.name)
        return {**(self.draft.get("transformer_layer_config") or {}), **self.draft}  # the Speculators format keeps most of it there

    @property
    def latent_draft(self) -> bool:
        """Whether the draft is known to have MLA."""
        return self.draft_config is not None and kind_of(self.draft_config) in ("latent", "latent_sparse")

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The target's quantization_config; empty: it has none, or it is not known."""
        target = self.target or {}
        found = target.get("quantization_config") or text_part(target).get("quantization_config")
        return found if isinstance(found, dict) else {}

    @property
    def mxfp4(self) -> bool:
        """Whether the target's weights are MXFP4, by its config.json or its name."""
        weight = (self.quantization.get("global_quant_config") or {}).get("weight")
        dtypes = [part.get("dtype") for part in (weight if isinstance(weight, list) else [weight]) if isinstance(part, dict)]
        return "fp4" in dtypes or self.quantization.get("quant_method") == "mxfp4" or "mxfp4" in self.experiment.target.model.lower()

    def on_aiter_mla(self, engine: EngineFacts) -> bool:
        """Whether the target's attention is AITER's MLA."""
        return self.rocm and "ROCM_AITER_MLA" in self.target_backends(engine)

    def is_target(self, *names: str) -> bool:
        """Whether the target's id or folder is called so: the last part of it begins with one of the names, whatever its case."""
        last = self.experiment.target.model.rstrip("/").rpartition("/")[2].lower()
        return last.startswith(tuple(name.lower() for name in names))
