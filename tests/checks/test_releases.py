"""The table of releases: what was seen, and nothing between two looks that differ."""

from __future__ import annotations

import pytest
from packaging.version import Version

from raysd.checks.releases import TABLE, bounds, first_with_speculative, first_without, has_environment, has_speculative, seen


@pytest.mark.parametrize(("version", "has"), [("0.9", None), ("1.0", False), ("1.5", None), ("2.0", True), ("2.5", True), ("3.0", True), ("3.1", None), ("4.0", False), ("9.0", False)])
def test_a_release_has_what_those_around_it_were_seen_with(version: str, has: bool | None):
    assert seen({"1.0": False, "2.0": True, "3.0": True, "4.0": False}, Version(version)) is has


def test_what_nobody_looked_at_is_not_known():
    assert has_speculative("no_such_key", Version("0.24.0")) is None and has_environment("VLLM_NO_SUCH", Version("0.24.0")) is None
    assert first_without("VLLM_NO_SUCH", Version("0.24.0")) is None and first_with_speculative("no_such_key") is None


def test_a_variable_that_goes_is_known_to_go():
    assert first_without("VLLM_ROCM_USE_AITER_PAGED_ATTN", Version("0.24.0")) == Version("0.27.1")
    assert first_without("VLLM_ROCM_USE_AITER_PAGED_ATTN", Version("0.27.1")) is None
    assert first_without("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", Version("0.32.0")) == Version("0.33.0")


def test_the_table_agrees_with_the_installed_vllm():
    pytest.importorskip("vllm")
    import yaml

    from raysd.backends.vllm_probe import InstalledVllm

    probe, table = InstalledVllm(), yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    version = Version(probe.version)
    if not bounds()[0] <= version <= bounds()[1]:
        pytest.skip(f"the table has not been told of {version}")
    for name in table["speculative_config"]:
        assert has_speculative(name, version) in (None, name in probe.speculative_fields), name
    for name in table["environment"]:
        assert has_environment(name, version) in (None, name in probe.environment_names), name
