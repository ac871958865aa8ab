from __future__ import annotations

import torch

from raysd.draft.batch import pack
from raysd.draft.replay import proposals, replay, teacher_forced_accuracy
from tests.tiny_drafts import conversation, small_draft


def slow_walk(found_kM, c, k):
    """The greedy walk written out: at each landing point compare one proposal after the other."""
    drafts = accepted = row = 0
    first = c.prompt_tokens - 1
    while first + row < len(c.token_ids) - 2:
        count = 0
        while count < k and first + row + 2 + count < len(c.token_ids) and int(found_kM[count, row]) == int(c.token_ids[first + row + 2 + count]):
            count += 1
        drafts, accepted, row = drafts + 1, accepted + count, row + count + 1
    return drafts, accepted


def test_the_walk_counts_what_a_server_would_count():
    draft = small_draft()
    c = conversation(60, 8, seed=1)
    # Make some proposals right, so that the walk skips rows: write the draft's own guesses into the captured answer.
    for row in range(7, 50, 3):
        c.token_ids[row + 2] = int(proposals(draft, pack([c], 1), 1)[0, row - 7])
    counts = replay(draft, [c], k=3)
    expected = slow_walk(proposals(draft, pack([c], 3), 3), c, 3)
    assert (counts.drafts, counts.accepted) == expected
    assert counts.accepted > 0 and counts.accepted == sum(counts.per_position) and counts.draft_tokens == 3 * counts.drafts


def test_counts_do_not_depend_on_how_conversations_are_batched():
    draft = small_draft()
    conversations = [conversation(20 + i, 4, seed=i) for i in range(5)]
    assert replay(draft, conversations, 2, batch_size=2) == replay(draft, conversations, 2, batch_size=8)


def test_teacher_forced_accuracy_is_one_where_every_captured_token_is_the_drafts_own_guess():
    draft = small_draft()
    c = conversation(12, 4, seed=2)
    for row in range(3, 10):
        c.token_ids[row + 2] = int(proposals(draft, pack([c], 1), 1)[0, row - 3])
    assert teacher_forced_accuracy(draft, [c], 1) == [1.0]
    c.token_ids[-1] = (c.token_ids[-1] + 1) % 96
    assert teacher_forced_accuracy(draft, [c], 1)[0] < 1.0
    assert torch.equal(c.states_TLH, conversation(12, 4, seed=2).states_TLH)
