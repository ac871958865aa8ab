"""What is told of a machine and of what is installed there."""

import json
import os
import platform

import pytest

from raysd.hardware.host import cpu_model, host_facts, package_versions
from raysd.sweep.provenance import node_facts


@pytest.mark.parametrize(("content", "expected"), [
    ("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nprocessor\t: 1\nmodel name\t: other\n", "AMD EPYC 9B14"),
    ("model name\t: caf\xe9: 2\n", "caf\N{REPLACEMENT CHARACTER}: 2"),
    ("model name\t:\n", None), ("processor\t: 0\n", None), (None, None)])
def test_a_cpu_has_a_name_wherever_it_is_told(tmp_path, content, expected):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert cpu_model(path) == (expected or platform.processor() or platform.machine()) != ""


def test_a_record_and_a_sweep_tell_the_same_of_a_machine():
    facts = node_facts()
    assert facts == json.loads(json.dumps(facts))
    assert facts["host"] == host_facts() | {"name": platform.node()} and "name" not in host_facts(), "machines that are alike are equal"
    assert facts["packages"] == package_versions() and {"torch", "pyarrow", "numpy"} <= set(facts["packages"])
    assert facts["host"]["cpu_cores"] == len(os.sched_getaffinity(0)) and facts["host"]["memory_bytes"] > 2**20
