"""When a sweep has enough blocks, by hand and by the simulation that the claims of coverage rest on, in small."""

import math

from scipy import stats

from raysd.sweep.sequential import PILOT_BLOCKS, pilot_pairs, wanted_blocks
from raysd.sweep.statistics import speedups
from tests.benchmarks import ci_coverage

NOISE = (0.03, -0.01, 0.0, 0.02, -0.04, 0.5, -0.5)
"""Log-ratios by block; those after the pilot are wild."""


def cells(blocks: int, invalid: tuple[int, ...] = (), concurrency: int = 1) -> list[dict]:
    return [{"arm": arm, "workload": "report", "concurrency": concurrency, "k": k, "block": block, "valid": block not in invalid or arm == "none",
             "output_tok_s": 100.0 * (1.0 if arm == "none" else 1.3 * math.exp(NOISE[block % len(NOISE)]))}
            for block in range(blocks) for arm, k in (("none", None), ("bf16", 3))]


def test_a_fixed_number_of_blocks_is_what_was_asked_for():
    assert pilot_pairs(3, None) is None
    assert wanted_blocks([], 3, None) == wanted_blocks(cells(3), 3, None) == 3


def test_the_pilot_comes_first_and_has_at_least_five_blocks():
    assert pilot_pairs(3, 0.05) == PILOT_BLOCKS and pilot_pairs(8, 0.05) == 8
    assert wanted_blocks([], 3, 0.05) == wanted_blocks(cells(3), 3, 0.05) == 5 and wanted_blocks(cells(5), 8, 0.05) == 8


def test_the_pilots_spread_alone_decides_how_many_blocks_there_are():
    needed = math.ceil((stats.t.ppf(0.975, 4) * stats.tstd(NOISE[:5]) / math.asinh(0.02)) ** 2)
    assert [wanted_blocks(cells(blocks), 3, 0.02) for blocks in (5, 6, 7, needed)] == [needed] * 4
    (reached,) = speedups(cells(needed), pilot_pairs(3, 0.02))
    assert reached.compared.half_width_frac <= 0.02
    (short,) = speedups(cells(needed - 1), pilot_pairs(3, 0.02))
    assert short.compared.half_width_frac > 0.02


def test_a_narrow_pilot_is_enough_and_the_limit_holds():
    assert wanted_blocks(cells(5), 3, 0.5) == 5
    assert wanted_blocks(cells(5), 3, 0.001, most=12) == 12 and wanted_blocks(cells(5), 8, 0.001, most=4) == 8


def test_the_widest_comparison_decides():
    steady = [{**cell, "concurrency": 4, "output_tok_s": 100.0} for cell in cells(5)]
    assert wanted_blocks(steady, 3, 0.02) == 5
    assert wanted_blocks(steady + cells(5), 3, 0.02) == wanted_blocks(cells(5), 3, 0.02) > 5


def test_invalid_pairs_are_made_up_for_unless_most_are():
    assert wanted_blocks(cells(5, invalid=(1,)), 3, 0.5) == 6
    assert wanted_blocks(cells(6, invalid=(1,)), 3, 0.5) == 6
    assert wanted_blocks(cells(5, invalid=(0, 1, 2)), 3, 0.01) == 5 and wanted_blocks(cells(5, invalid=(0, 1, 2, 3, 4)), 3, 0.01) == 5


def test_intervals_cover_and_winners_are_true_ones():
    # Of 250 comparisons a share of 0.95 is between 0.905 and 0.985 in 99.8 % of all cases; stopping on width alone, from three blocks on, covers 0.90 at worst.
    rows = ci_coverage.simulate(comparisons=250, sweeps=60, seed=1)
    assert len(rows) == len(ci_coverage.DESIGNS) and all(0.905 <= row["coverage"] <= 0.985 for row in rows)
    assert all(row["false_winner_rate"] <= 0.095 and row["sweep_false_winner_rate"] <= 0.15 for row in rows)
    assert ci_coverage.summary(rows)["coverage"] in [row["coverage"] for row in rows]


def test_a_difference_that_is_there_is_found():
    found = [ci_coverage.measured(ci_coverage.np.random.default_rng(seed), 5, None, 1.3, **ci_coverage.SWEEP) for seed in range(10)]
    assert all(each.verdict == "faster" for sweep in found for each in sweep)
