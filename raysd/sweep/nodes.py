"""How nodes that should be alike differ: one effect a node, and a flag for one that stands apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raysd.sweep.power import exp
from raysd.sweep.statistics import ALPHA, Cell, Interval, t_quantile

MIN_NODES = 3
"""Of two that differ, nothing says which is the odd one."""
OUTLIER_SCORE = 3.5
"""How many scales from the median make an outlier (Iglewicz and Hoaglin, 1993)."""
SMALLEST_SCALE_FRAC = 0.01
"""Nodes that agree to less than a percent are no measure for a third that is a few percent off."""
MAD_TO_SD = 1.4826
"""A median absolute deviation as the standard deviation of a normal distribution."""


@dataclass(frozen=True)
class NodeEffect:
    """One node against the median of all."""

    node: str
    blocks: int
    """Blocks with a valid cell there."""
    valid_cells: int
    invalid_cells: int
    effect_frac: float | None
    """How much faster (below 0: slower) the same cells ran there than on the median node; None without a valid cell."""
    interval: Interval | None
    """95 % interval of effect_frac, from how blocks of one node differ; None where no node has two."""
    outlier: bool


def node_effects(cells: Sequence[Cell]) -> list[NodeEffect]:
    """One entry for each node of a sweep, in the order of their names; none if cells do not say where they were measured.

    Every cell's log rate is taken as the sum of what its arm, workload, k and concurrency do and what its block does (least squares, so that cells
    may be missing); a node's effect is the mean of its blocks'. All arms of a block are of one node, so ratios of arms are free of it.
    An outlier is a node whose distance from the median is more than OUTLIER_SCORE times the scale of such distances: the largest of the nodes' own (by median
    absolute deviation), what the spread of blocks explains, and SMALLEST_SCALE_FRAC.
    """
    names = sorted({cell["node"] for cell in cells if cell.get("node") is not None})
    if not names:
        return []
    valid = [cell for cell in cells if cell["valid"] and cell.get("node") is not None]
    of_block = _block_effects(valid)
    by_node: dict[str, list[float]] = {name: [] for name in names}
    for (node, _), effect in of_block.items():
        by_node[node].append(effect)
    means = {name: math.fsum(effects) / len(effects) for name, effects in by_node.items() if effects}
    if not means:
        return [NodeEffect(name, 0, 0, sum(cell.get("node") == name for cell in cells), None, None, False) for name in names]
    middle = statistics.median(means.values())
    freedom = sum(len(effects) - 1 for effects in by_node.values() if effects)
    block_sd = math.sqrt(sum((effect - means[name]) ** 2 for name, effects in by_node.items() for effect in effects) / freedom) if freedom else None
    deviation = MAD_TO_SD * statistics.median(abs(mean - middle) for mean in means.values())
    found = []
    for name in names:
        effects, own = by_node[name], [cell for cell in cells if cell.get("node") == name]
        invalid = sum(not cell["valid"] for cell in own)
        if name not in means:
            found.append(NodeEffect(name, 0, 0, invalid, None, None, False))
            continue
        shift = means[name] - middle
        log_se = block_sd / math.sqrt(len(effects)) if block_sd is not None else None
        scale = max(deviation, log_se or 0.0, SMALLEST_SCALE_FRAC)
        half_width = t_quantile(freedom, ALPHA) * log_se if log_se is not None else None
        interval = None if half_width is None else (exp(shift - half_width) - 1, exp(shift + half_width) - 1)
        outlier = len(means) >= MIN_NODES and abs(shift) > OUTLIER_SCORE * scale
        found.append(NodeEffect(name, len(effects), len(own) - invalid, invalid, exp(shift) - 1, interval, outlier))
    return found


def _block_effects(cells: Sequence[Cell]) -> dict[tuple[str, int], float]:
    """Node and block to the log of how much faster its cells were than elsewhere."""
    import numpy as np

    points = {point: index for index, point in enumerate(dict.fromkeys((cell["workload"], cell["arm"], cell["k"], cell["concurrency"]) for cell in cells))}
    blocks = {block: index for index, block in enumerate(dict.fromkeys((cell["node"], cell["block"]) for cell in cells))}
    if not cells:
        return {}
    design = np.zeros((len(cells), len(points) + len(blocks)))
    for row, cell in enumerate(cells):
        design[row, points[cell["workload"], cell["arm"], cell["k"], cell["concurrency"]]] = 1
        design[row, len(points) + blocks[cell["node"], cell["block"]]] = 1
    rates = np.log([cell["output_tok_s"] for cell in cells])
    # Only differences of block effects are defined; the shortest solution is one choice, and what is made of it uses differences alone.
    effects = np.linalg.lstsq(design, rates, rcond=None)[0]
    return {block: float(effects[len(points) + index]) for block, index in blocks.items()}
