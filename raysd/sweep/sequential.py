"""When a sweep has enough blocks: more of them until every speed-up's interval is narrow, in two stages, so that its 95 % stay 95 %.

Stopping as soon as an interval looks narrow stops too early where the spread happens to look small: with blocks added one by one from three on, what is called
a 95 % interval covers about 90 %. Stein (Annals of Mathematical Statistics 16, 1945) has the cure: a pilot of fixed size says what the spread is, and that
alone decides how many blocks there will be; the mean is over all blocks, the spread and the degrees of freedom of its t interval stay those of the pilot. Then
(mean - truth) / (pilot's spread / sqrt(blocks)) is Student's t exactly, whatever the truth, at every level (Holm's smaller ones too), and however the
blocks after the pilot are cut short, as long as no speed decides that: by a limit of time, of blocks, by a node that is lost. What it costs is the spread of
the later blocks, which is not used: with a pilot of five the t quantile is 2.78 where that of very many blocks is 1.96.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raysd.experiment.sweep import PILOT_BLOCKS
from raysd.sweep.statistics import ALPHA, Cell, Speedup, speedups, t_quantile


def pilot_pairs(blocks: int, until_ci: float | None) -> int | None:
    """How many pairs decide how many blocks there are; None where their number is fixed. blocks: the fewest, as `sweep.blocks` has it."""
    return None if until_ci is None else max(blocks, PILOT_BLOCKS)


def wanted_blocks(cells: Sequence[Cell], blocks: int, until_ci: float | None, most: int | None = None) -> int:
    """How many blocks a sweep wants in all, judging by the cells of those that it has; it has enough when it has that many.

    blocks: the fewest. until_ci: half of a 95 % interval's width, as a share of the ratio, that every comparison is to reach; None: `blocks` it is. most: no more
    than that. Asked again after more blocks it gives the same number, unless invalid pairs are to be made up for. A comparison of which more than half of the
    pairs are invalid is not waited for.
    """
    pilot = pilot_pairs(blocks, until_ci)
    if pilot is None or until_ci is None:
        return blocks
    done = len({cell["block"] for cell in cells})
    wanted = pilot if done < pilot else max((_blocks_for(each, done, pilot, until_ci) for each in speedups(cells, pilot, resample=False)), default=pilot)
    return wanted if most is None else max(blocks, min(wanted, most))


def _blocks_for(speedup: Speedup, done: int, pilot: int, until_ci: float) -> int:
    """Blocks after which one comparison has the pairs that it needs, if all that come are valid."""
    pairs = speedup.compared.n if speedup.compared else 0
    if 2 * pairs < done:
        return pilot
    if pairs < pilot:
        return done + pilot - pairs
    needed = math.ceil((t_quantile(pilot - 1, ALPHA) * speedup.compared.log_sd / math.asinh(until_ci)) ** 2)
    return max(pilot, needed) + done - pairs
