"""Power against a simulation of the very test that it is about."""

import math

import numpy as np
import pytest
from scipy import stats

from raysd.sweep.power import blocks_to_find, detectable_ratio


@pytest.mark.parametrize(("blocks", "level"), [(3, 0.05), (3, 0.05 / 7), (5, 0.05), (10, 0.005)])
def test_an_effect_of_the_detectable_size_is_found_four_times_in_five(blocks, level):
    log_sd = 0.06
    shift = math.log(detectable_ratio(log_sd / math.sqrt(blocks), blocks - 1, level))
    sample = np.random.default_rng(1).normal(shift, log_sd, (20_000, blocks))
    found = stats.ttest_1samp(sample, 0, axis=1).pvalue < level
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_the_blocks_that_an_effect_needs_are_the_fewest():
    blocks = blocks_to_find(0.05, 0.06, 0.05)
    assert detectable_ratio(0.06 / math.sqrt(blocks), blocks - 1, 0.05) <= math.exp(0.05) < detectable_ratio(0.06 / math.sqrt(blocks - 1), blocks - 2, 0.05)
    assert blocks_to_find(-0.05, 0.06, 0.05) == blocks and blocks_to_find(5.0, 0.06, 0.05) == 3
    assert blocks_to_find(0.0, 0.06, 0.05) is None and blocks_to_find(1e-6, 0.06, 0.05) is None
