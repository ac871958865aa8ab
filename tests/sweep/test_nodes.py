"""Effects of nodes against those that the cells were made with."""

import math

import pytest

from raysd.sweep.nodes import node_effects

SPEEDS = {"a": 1.0, "b": 1.01, "c": 0.99, "d": 0.9}


def cells(speeds: dict[str, float] = SPEEDS, blocks_each: int = 2, invalid=lambda node, block, arm: False) -> list[dict]:
    rows = []
    for number in range(blocks_each * len(speeds)):
        node = list(speeds)[number % len(speeds)]
        drift = math.exp(0.004 * (-1) ** (number // len(speeds)))
        rows += [
            {"node": node, "block": number, "workload": "report", "arm": arm, "k": k, "concurrency": concurrency, "valid": not invalid(node, number, arm),
             "output_tok_s": 50 * concurrency * ratio * speeds[node] * drift}
            for concurrency in (1, 4) for arm, k, ratio in (("none", None, 1.0), ("bf16", 3, 1.5))
        ]
    return rows


def test_effects_are_against_the_median_node_and_the_odd_one_is_flagged():
    found = {each.node: each for each in node_effects(cells())}
    assert {name: each.effect_frac for name, each in found.items()} == {name: pytest.approx(speed / 0.995 - 1, abs=1e-4) for name, speed in SPEEDS.items()}
    assert [name for name, each in found.items() if each.outlier] == ["d"]
    assert all(each.interval[0] < each.effect_frac < each.interval[1] and (each.blocks, each.valid_cells, each.invalid_cells) == (2, 8, 0) for each in found.values())


def test_a_cell_that_is_missing_does_not_shift_its_node():
    found = {each.node: each for each in node_effects(cells(invalid=lambda node, block, arm: (node, arm) == ("b", "none")))}
    assert found["b"].effect_frac == pytest.approx(1.01 / 0.995 - 1, abs=1e-4) and (found["b"].valid_cells, found["b"].invalid_cells) == (4, 4)


def test_one_block_a_node_gives_no_interval_and_two_nodes_no_outlier():
    assert all(each.interval is None for each in node_effects(cells(blocks_each=1)))
    assert not any(each.outlier for each in node_effects(cells({"a": 1.0, "b": 0.5})))


def test_nodes_that_differ_as_much_as_their_blocks_do_are_no_outliers():
    noisy = [{**each, "output_tok_s": each["output_tok_s"] * math.exp(0.05 * math.sin(5 * each["block"]))} for each in cells({"a": 1.0, "b": 1.01, "c": 0.95})]
    assert not any(each.outlier for each in node_effects(noisy))


def test_a_node_without_a_valid_cell_is_there_without_an_effect():
    found = {each.node: each for each in node_effects(cells(invalid=lambda node, block, arm: node == "a"))}
    assert found["a"].effect_frac is None and found["a"].invalid_cells == 8 and found["b"].effect_frac is not None
    assert node_effects([{**each, "node": None} for each in cells()]) == []
    assert all(each.effect_frac is None for each in node_effects(cells(invalid=lambda *_: True)))
