from dataclasses import replace

import pytest

from raysd.draft.acceptance import AcceptanceCounts
from raysd.sweep.cells import Cell
from raysd.sweep.measure import Counted, engine_reasons

NONE = Cell("none", "report", 4, 2, None, 0, 2)
DRAFTING = replace(NONE, arm="bf16", k=3)
NO_DRAFTS, DRAFTS = (Counted(counts, 0, 0, False) for counts in (AcceptanceCounts(0, 0, 0, ()), AcceptanceCounts(2, 6, 1, (1, 0, 0))))


def test_a_clean_cell_is_valid():
    assert engine_reasons(NONE, NO_DRAFTS) == engine_reasons(DRAFTING, DRAFTS) == []


@pytest.mark.parametrize(("cell", "counted", "says"), [
    (NONE, replace(NO_DRAFTS, prefix_hit_tokens=48), "48 prompt tokens came from the engine's prefix cache"),
    (NONE, replace(NO_DRAFTS, restarted=True), "started anew"),
    (DRAFTING, NO_DRAFTS, "counted no draft"),
    (NONE, DRAFTS, "the baseline counted 2 drafts")])
def test_what_must_not_be_used_says_why(cell, counted, says):
    [reason] = engine_reasons(cell, counted)
    assert says in reason
