"""What releases of vLLM that are not installed know: keys of `speculative_config`, and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from packaging.version import Version

TABLE = Path(__file__).parent / "vllm_releases.yaml"


def has_speculative(name: str, vllm: Version) -> bool | None:
    """Whether `speculative_config` has a key in a release; None: the table does not say."""
    return seen(_table()["speculative_config"].get(name, {}), vllm)


def has_environment(name: str, vllm: Version) -> bool | None:
    """Whether a release reads an environment variable; None: the table does not say."""
    return seen(_table()["environment"].get(name, {}), vllm)


def first_without(name: str, vllm: Version) -> Version | None:
    """The first release after `vllm` that was seen not to read a variable that an earlier one did; None: none was."""
    looks = _looks(_table()["environment"].get(name, {}))
    after_one_with = [release for (_, had), (release, has) in zip(looks, looks[1:], strict=False) if had and not has]
    return next((release for release in after_one_with if release > vllm), None)


def first_with_speculative(name: str) -> Version | None:
    """The first release that was seen to have a key of `speculative_config`."""
    return next((release for release, has in _looks(_table()["speculative_config"].get(name, {})) if has), None)


def bounds() -> tuple[Version, Version]:
    """The oldest and the newest release that was looked at."""
    releases = [Version(release) for release in _table()["releases"]]
    return min(releases), max(releases)


def seen(looks: Mapping[str, bool], vllm: Version) -> bool | None:
    """Whether a release has what others were seen with or without. Between two that differ, and before the first, nothing is known."""
    before = [has for release, has in _looks(looks) if release <= vllm]
    after = [has for release, has in _looks(looks) if release >= vllm]
    if not before or after and before[-1] != after[0]:
        return None
    return before[-1]


def _looks(looks: Mapping[str, bool]) -> list[tuple[Version, bool]]:
    return sorted((Version(release), has) for release, has in looks.items())


@cache
def _table() -> dict:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))
