"""What a machine of a cluster is like, as far as speculation on it cares; gathered without Ray, vLLM or torch."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raysd.checks.facts import Facts
from raysd.checks.requirements import asked_for, clashes, installed
from raysd.hardware.catalogue import Machine
from raysd.sweep.smi import find_tool
from raysd.sweep.telemetry import look

VARIABLES = re.compile(r"(HIP|CUDA|ROCR)_VISIBLE_DEVICES|RAY_EXPERIMENTAL_NOSET_\w+|HSA_NO_SCRATCH_RECLAIM|VLLM_ROCM_\w+")
"""Those that are told of a node; no secret is among them."""
STALE_S = 600.0
"""After so long a lock of AITER's is nobody's: to tune or to compile takes minutes."""
FIRMWARE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class NodeFacts:
    """One machine."""

    host: str
    environment: dict[str, str] = field(default_factory=dict)
    """VARIABLES of it, as this process has them."""
    shm_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    memlock_bytes: int | None = None
    """How much memory a process may lock; None: any."""
    tmp: str = "/tmp"
    """Where Ray and engines put their files."""
    tmp_bytes: int = 0
    tmp_free_bytes: int = 0
    hub_free_bytes: int = 0
    """Where models of the Hugging Face hub are kept."""
    tool: str | None = None
    """The vendor's tool that tells of GPUs; None: none is there."""
    tool_failed: str | None = None
    """What it said instead."""
    gpus: tuple[tuple[str, float | None, float | None], ...] = ()
    """Of each GPU its number, and how many bytes of its memory are used, and there."""
    rocm: str | None = None
    """Version of ROCm's libraries."""
    driver: str | None = None
    """Version of the amdgpu driver, where it is not the kernel's own."""
    kfd: bool | None = None
    """Whether this process may open /dev/kfd; None: it is not there."""
    mec_firmware: int | None = None
    """The oldest of the GPUs' MEC firmwares; None: rocm-smi is not there, or does not say."""
    packages: dict[str, str] = field(default_factory=dict)
    clashes: tuple[str, ...] = ()
    stale_locks: tuple[str, ...] = ()
    """Of AITER's, that nobody has touched for STALE_S."""
    ray_gpus: float | None = None
    """How many GPUs Ray has there to give; None: it was not asked."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> NodeFacts:
        return cls(**{name: tuple(map(_hashable, value)) if isinstance(value, list) else value for name, value in told.items()})


@dataclass(frozen=True)
class NodeCase:
    """A machine, and what is wanted of it."""

    node: NodeFacts
    facts: Facts | None = None
    """Of the experiment that is to run there; None: none is named."""

    @property
    def machine(self) -> Machine | None:
        """What the experiment takes it for."""
        return None if self.facts is None else self.facts.machine

    @property
    def rocm(self) -> bool:
        """Whether it has, or is to have, AMD's GPUs."""
        return self.node.tool in ("amd-smi", "rocm-smi") or self.node.kfd is not None or self.facts is not None and self.facts.rocm

    @property
    def wants_gpus(self) -> bool:
        return bool(self.node.gpus) or self.machine is not None and self.machine.gpus_per_node != 0

    def field(self, what: str) -> str:
        """What was looked at, and where."""
        return f"{self.node.host}: {what}"


def look_at_this_node() -> NodeFacts:
    """The machine that this process runs on."""
    gpus, tool, failed = [], find_tool(), None
    if tool is not None:
        try:
            gpus = [(reading.device, reading.memory_used_bytes, reading.memory_total_bytes) for reading in look(tool)]
        except (OSError, ValueError, subprocess.SubprocessError) as err:
            failed = f"{type(err).__name__}: {err}"[:300]
    tmp, hub = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()), Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    locked, versions = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], installed()
    return NodeFacts(
        host=platform.node(), environment={name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None, memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        tmp=str(tmp), tmp_bytes=_disk(tmp).total, tmp_free_bytes=_disk(tmp).free, hub_free_bytes=_disk(hub).free,
        tool=None if tool is None else tool.name, tool_failed=failed, gpus=tuple(gpus),
        rocm=_line(Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / ".info" / "version"), driver=_line(Path("/sys/module/amdgpu/version")),
        kfd=os.access("/dev/kfd", os.R_OK | os.W_OK) if Path("/dev/kfd").exists() else None, mec_firmware=_mec_firmware(),
        packages=versions, clashes=tuple(clashes(versions, asked_for())), stale_locks=tuple(stale_locks(aiter_folders(os.environ), time.time())))


def mec_firmware_in(text: str) -> int | None:
    """The oldest MEC firmware in what `rocm-smi --showfw` prints; None: it does not say."""
    versions = [int(version) for version in re.findall(r"MEC firmware version:\s*(\d+)", text)]
    return min(versions, default=None)


def aiter_folders(environment: Mapping[str, str]) -> list[Path]:
    """Where AITER compiles and tunes."""
    named = environment.get("AITER_JIT_DIR")
    return [*([Path(named)] if named else []), Path.home() / ".aiter", Path(tempfile.gettempdir()) / "aiter_configs"]


def stale_locks(folders: list[Path], now_s: float) -> list[str]:
    """Locks that nobody has touched for long."""
    found = sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("*lock") if path.is_file())
    return [str(path) for path in found if now_s - path.stat().st_mtime > STALE_S]


def _mec_firmware() -> int | None:
    if shutil.which("rocm-smi") is None:
        return None
    try:
        return mec_firmware_in(subprocess.run(["rocm-smi", "--showfw"], capture_output=True, text=True, timeout=FIRMWARE_TIMEOUT_S).stdout)
    except (OSError, subprocess.SubprocessError):
        return None  # the check says that it is not known


def _disk(path: Path) -> Any:
    """Of the disk that a path is on, or will be."""
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists()))


def _line(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
