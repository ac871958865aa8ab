"""vLLM loads this into each process that computes on a CPU (`worker_extension_cls`), where its import mends what raysd/backends/cpu_api_server.py says."""

from __future__ import annotations

from raysd.backends.cpu_api_server import install

LIBRARY = install()
"""Lives as long as the process."""


class MendedWorker:
    """Adds nothing: vLLM asks for a class."""
