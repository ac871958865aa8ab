"""Fingerprints stay what they are: results of earlier versions must still be found."""

from __future__ import annotations

import pytest

from raysd.artifacts import difference, fingerprint

GOLDEN = [
    ({}, "44136fa355b3678a1146ad16f7e8649e"),
    ({"lr": 0.001, "steps": 10, "arms": ["none", "bf16"], "note": None}, "4f3fa1a975f93c9e3806408070e2c634"),
    ({"name": "caf\u00e9", "k": [1, 2]}, "17c7e742c3a12f5b34f990028c1c3477"),
]


@pytest.mark.parametrize(("document", "expected"), GOLDEN)
def test_golden(document, expected):
    assert fingerprint(document) == expected


def test_the_order_of_keys_does_not_matter():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})


@pytest.mark.parametrize("other", [{"a": 2}, {"a": 1.0}, {"a": "1"}, {"a": [1]}, {"a": 1, "b": None}, {}])
def test_any_difference_matters(other):
    assert fingerprint({"a": 1}) != fingerprint(other)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError):
        fingerprint({"lr": value})


def test_difference_names_what_changed():
    before = {"train": {"lr": 0.001, "steps": 10, "old": 1}, "draft": {"aux": [1, 2]}}
    after = {"train": {"lr": 0.0005, "steps": 10, "new": "x"}, "draft": {"aux": [1, 3]}}
    assert difference(before, after) == [
        "draft.aux changed: [1, 2] -> [1, 3]",
        "train.lr changed: 0.001 -> 0.0005",
        "train.new is new: x",
        "train.old is gone: was 1",
    ]
    assert difference(before, before) == []
