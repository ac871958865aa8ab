"""Whether raysd's 95 % intervals cover in 95 % of all cases, and how often it names a winner where there is none, by simulation.

    python tests/benchmarks/ci_coverage.py [--json] [--comparisons 2000]

Cells are made up as AMD's published noise has it: 764.1 +- 35.7 tok/s/GPU, a coefficient of variation of 4.7 %, here all of it each cell's own. On top of
that come effects of the node and of the block, which the arms of a block share. The cells go through raysd's own functions: fixed designs of 3, 5 and 10 blocks, and
`until_ci`, where raysd decides after every round whether it wants more. One comparison is an arm and the baseline at one concurrency; a sweep is two arms at five.

coverage: of the designs, the one that is farthest from 0.95. false_winner_rate: the largest over the designs, of a single comparison and of a whole sweep
(any winner among its ten comparisons), where no arm differs from the baseline.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from raysd.arguments import positive
from raysd.sweep.sequential import pilot_pairs, wanted_blocks
from raysd.sweep.statistics import Speedup, speedups

CV = 0.047
NODE_SD, BLOCK_SD = 0.03, 0.03
NODES = 3
MOST_BLOCKS = 60
DESIGNS: tuple[tuple[int, float | None], ...] = ((3, None), (5, None), (10, None), (3, 0.10), (3, 0.05), (5, 0.05), (10, 0.04))
"""Blocks and until_ci."""
SPEEDUP = 1.3
SWEEP = {"arms": ("bf16", "fp8"), "concurrencies": (1, 2, 4, 8, 16)}
ALONE = {"arms": ("bf16",), "concurrencies": (8,)}


def measured(rng: np.random.Generator, blocks: int, until_ci: float | None, ratio: float, arms: tuple[str, ...], concurrencies: tuple[int, ...]) -> list[Speedup]:
    """What raysd says of one made-up sweep; every arm's true speed-up is `ratio`."""
    nodes = rng.normal(0, NODE_SD, NODES)
    cells: list[dict[str, Any]] = []
    wanted = blocks
    block = 0
    while block < wanted:
        while block < wanted:
            shared = nodes[block % NODES] + rng.normal(0, BLOCK_SD)
            noise = rng.normal(shared, CV, (len(concurrencies), 1 + len(arms)))
            for at, concurrency in enumerate(concurrencies):
                for index, arm in enumerate(("none", *arms)):
                    rate = 100.0 * concurrency * (1.0 if arm == "none" else ratio) * float(np.exp(noise[at, index]))
                    cells.append({"arm": arm, "workload": "made up", "k": None if arm == "none" else 3, "concurrency": concurrency, "block": block,
                                  "valid": True, "output_tok_s": rate})
            block += 1
        wanted = wanted_blocks(cells, blocks, until_ci, MOST_BLOCKS)
    return speedups(cells, pilot_pairs(blocks, until_ci), resample=False)


def simulate(comparisons: int, sweeps: int, seed: int = 0) -> list[dict[str, Any]]:
    """One row per design."""
    rows = []
    for index, (blocks, until_ci) in enumerate(DESIGNS):
        rng = np.random.default_rng([seed, index])
        alone = [measured(rng, blocks, until_ci, SPEEDUP, **ALONE)[0] for _ in range(comparisons)]
        covered = sum(low <= SPEEDUP <= high for low, high in (each.compared.interval for each in alone))
        winners = sum(measured(rng, blocks, until_ci, 1.0, **ALONE)[0].verdict != "tie" for _ in range(comparisons))
        in_sweeps = sum(any(each.verdict != "tie" for each in measured(rng, blocks, until_ci, 1.0, **SWEEP)) for _ in range(sweeps))
        rows.append({"blocks": blocks, "until_ci": until_ci, "mean_blocks": sum(each.compared.n for each in alone) / comparisons, "coverage": covered / comparisons,
                     "false_winner_rate": winners / comparisons, "sweep_false_winner_rate": in_sweeps / sweeps})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The two numbers that count."""
    return {"coverage": max((row["coverage"] for row in rows), key=lambda coverage: abs(coverage - 0.95)),
            "false_winner_rate": max(max(row["false_winner_rate"], row["sweep_false_winner_rate"]) for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--comparisons", type=positive, default=2000, help="simulated for each design; and as many whole sweeps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = simulate(args.comparisons, args.comparisons, args.seed)
    if args.json:
        print(json.dumps(summary(rows)))
        return
    print("blocks  until_ci  mean blocks  coverage  false winner  in a sweep of ten")
    for row in rows:
        print(f"{row['blocks']:6d}  {row['until_ci'] or 'fixed':>8}  {row['mean_blocks']:11.1f}  {row['coverage']:8.4f}  {row['false_winner_rate']:12.4f}  {row['sweep_false_winner_rate']:17.4f}")
    print(", ".join(f"{name} {value:.4f}" for name, value in summary(rows).items()))


if __name__ == "__main__":
    main()
