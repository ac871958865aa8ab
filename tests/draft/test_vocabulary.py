from __future__ import annotations

import torch

from raysd.draft.vocabulary import choose_vocabulary, coverage, offsets


def test_tokens_of_many_answers_and_all_special_ones_are_kept_in_ascending_order():
    answers = [torch.tensor([30, 30, 30, 30, 9, 5, 7]), torch.tensor([9, 5, 31]), torch.tensor([9, 6])]
    assert choose_vocabulary(answers, [40, 2], 5, 50).tolist() == [2, 5, 6, 9, 40]


def test_places_that_the_answers_leave_empty_go_to_low_ids():
    assert choose_vocabulary([torch.tensor([9])], [], 4, 50).tolist() == [0, 1, 2, 9]


def test_a_vocabulary_as_large_as_the_targets_is_the_targets():
    assert choose_vocabulary([], [], 60, 50).tolist() == list(range(50))


def test_coverage_is_the_share_of_tokens_that_can_be_proposed():
    assert coverage([torch.tensor([1, 2, 3]), torch.tensor([4])], torch.tensor([1, 4])) == 0.5


def test_offsets_give_the_target_id_when_the_row_is_added():
    vocabulary = torch.tensor([0, 3, 4, 9])
    assert (torch.arange(4) + offsets(vocabulary)).tolist() == vocabulary.tolist()
