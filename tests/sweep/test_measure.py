from dataclasses import replace

import pytest

from raysd.draft.acceptance import AcceptanceCounts
from raysd.load.client import CompletionRequest, RequestResult
from raysd.load.metrics import summarise
from raysd.sweep.cells import Cell
from raysd.sweep.measure import Counted, invalid_reasons

S = 10**9
NONE = Cell("none", "report", 4, 2, None, 0, 2)
DRAFTING = replace(NONE, arm="bf16", k=3)
NO_DRAFTS, DRAFTS = (Counted(counts, 0, 0, False) for counts in (AcceptanceCounts(0, 0, 0, ()), AcceptanceCounts(2, 6, 1, (1, 0, 0))))


def result(start_s=0.0, end_s=4.0, tokens=4, error=None) -> RequestResult:
    if error:
        return RequestResult("p", int(start_s * S), int(end_s * S), error)
    return RequestResult("p", int(start_s * S), int(end_s * S), None, tuple(range(tokens)), "length", 3, tokens, (int(end_s * S),), (tokens,))


def reasons(cell, counted, results, ignore_eos=True):
    asked = [CompletionRequest("p", (1, 2, 3), 4, 0.0, ignore_eos)] * len(results)
    return invalid_reasons(cell, summarise(results, cell.concurrency), counted, results, asked)


def test_a_clean_cell_is_valid():
    assert reasons(NONE, NO_DRAFTS, [result(), result()]) == []
    assert reasons(DRAFTING, DRAFTS, [result(), result()]) == []


@pytest.mark.parametrize(("cell", "counted", "results", "says"), [
    (NONE, NO_DRAFTS, [result(), result(error="status 500: dead")], "1 of 2 requests failed, the first with: status 500: dead"),
    (NONE, NO_DRAFTS, [result(), result(start_s=4.5, end_s=6)], "never reached"),
    (NONE, NO_DRAFTS, [result(0, 1), result(0, 1), result(8, 9), result(8, 9)], "0.44 requests were in flight on average, 2 were asked for"),
    (NONE, replace(NO_DRAFTS, prefix_hit_tokens=48), [result(), result()], "48 prompt tokens came from the prefix cache"),
    (NONE, replace(NO_DRAFTS, restarted=True), [result(), result()], "started anew"),
    (DRAFTING, NO_DRAFTS, [result(), result()], "counted no draft"),
    (NONE, DRAFTS, [result(), result()], "the baseline counted 2 drafts"),
    (NONE, NO_DRAFTS, [result(), result(tokens=3)], "1 answers do not run to the length")])
def test_what_must_not_be_used_says_why(cell, counted, results, says):
    [reason] = reasons(cell, counted, results)
    assert says in reason


def test_an_answer_may_end_early_unless_it_was_told_not_to():
    assert reasons(NONE, NO_DRAFTS, [result(), result(tokens=3)], ignore_eos=False) == []
