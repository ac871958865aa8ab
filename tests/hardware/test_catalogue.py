"""The catalogue of machines."""

import pytest

from raysd.errors import ExperimentError
from raysd.hardware.catalogue import find_machine


def test_known_machines_are_found_by_their_short_name():
    assert find_machine("mi355x").gpus_per_node == 8
    assert find_machine("cpu").gpus_per_node == 0
    assert (find_machine("mi355x").memory_bytes, find_machine("mi355x").gfx) == (288_000_000_000, "gfx950")
    assert (find_machine("cpu").memory_bytes, find_machine("cpu").gfx) == (None, None)


def test_an_unknown_machine_is_refused_with_the_names_that_are_known():
    with pytest.raises(ExperimentError, match="'mi999x'") as caught:
        find_machine("mi999x")
    assert caught.value.where == "hardware.name"
    assert all(name in caught.value.fix for name in ("cpu", "mi355x", "mi350x", "mi325x"))
