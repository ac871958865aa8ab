"""Where and with what a sweep is measured: versions and the machine, for provenance.json."""

from __future__ import annotations

import platform
from typing import Any

from raysd.hardware.host import host_facts, package_versions


def node_facts() -> dict[str, Any]:
    """This machine and what is installed on it, JSON-ready."""
    return {"packages": package_versions(), "host": {"name": platform.node(), **host_facts()}}
