"""Which layers a draft reads: stated, detected, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysd.checks.draft_fit import check_draft_fit
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import CONFIG, ENTERING, IDS, LEAVING, SPECULATORS, target_shape, tensors, without, write

UNNAMED = without(CONFIG, IDS)


@pytest.mark.parametrize(
    ("config", "stated", "layers"),
    [
        (CONFIG, None, ENTERING),
        (CONFIG | {IDS: LEAVING}, None, ENTERING),
        (UNNAMED | {"eagle_config": {IDS: LEAVING}}, None, ENTERING),
        (CONFIG | {"eagle_config": {IDS: ENTERING}}, None, ENTERING),
        (UNNAMED, None, ENTERING),
        (CONFIG | {IDS: [0, 3, 7]}, "entering", [0, 3, 7]),
        (CONFIG | {IDS: [0, 3, 7]}, "leaving", [1, 4, 8]),
        (CONFIG | {IDS: LEAVING}, "entering", LEAVING),
        (UNNAMED | {"eagle_config": {IDS: [1, 2, 3], "layer_ids": "entering"}}, None, [1, 2, 3]),
        (SPECULATORS | {IDS: [1, 3, 4]}, None, [1, 3, 4]),
        (SPECULATORS | {IDS: [0, 3, 6]}, None, [0, 3, 6]),
        (SPECULATORS | {IDS: [0, 3, 6]}, "entering", [0, 3, 6]),
    ],
    ids=["the usual, entering", "the usual, leaving", "in eagle_config", "in both places", "vLLM's default", "said to enter", "said to leave", "said against the usual",
         "a draft that says so", "Speculators names what enters", "Speculators, unusual", "Speculators, said to enter"],
)
def test_layers_are_found_in_vllms_numbering(tmp_path: Path, target, config, stated, layers):
    assert check_draft_fit(write(tmp_path / "draft", config), target, stated).layers == layers


@pytest.mark.parametrize(
    ("config", "stated", "words"),
    [
        (CONFIG | {IDS: [1, 4, 6]}, None, r"entering the layers \[1, 4, 6\].* leaving them, which vLLM calls \[2, 5, 7\]"),
        (CONFIG | {IDS: [2, 15, 27]}, "entering", r"\[2, 15, 27\], of a target that has 8"),
        (CONFIG | {IDS: [1, 4, 8]}, "leaving", r"\[2, 5, 9\], of a target that has 8"),
        (CONFIG | {IDS: [-1, 3, 4]}, "entering", "target that has 8"),
        (CONFIG | {IDS: [5, 4, 2]}, "entering", "ascending"),
        (CONFIG | {IDS: [2, 2, 5]}, "entering", "ascending"),
        (CONFIG | {IDS: "2,4,5"}, None, "not a list"),
        (CONFIG | {IDS: [2, 4, "5"]}, None, "not a list"),
        (CONFIG | {"eagle_config": {IDS: LEAVING}}, None, r"two sets of layers, \[2, 4, 5\] and, in eagle_config, \[1, 3, 4\]"),
        (UNNAMED, "leaving", "layer_ids = leaving has no effect"),
        (CONFIG | {"eagle_config": {"layer_ids": "entering"}}, "leaving", "layer_ids = leaving, and its config.json says that its layer ids name what is entering"),
        (CONFIG | {"eagle_config": {"layer_ids": "leaving"}}, "entering", "layer ids name what is leaving a layer"),
        (CONFIG | {"eagle_config": {"layer_ids": "outside"}}, None, "layer_ids = 'outside'"),
        (SPECULATORS, "leaving", "in the format of Speculators, whose layer ids name what is entering"),
        (CONFIG | {IDS: [2, 4]}, "entering", r"fc is \[64, 192\], not \[64, 128\]"),
    ],
)
def test_layers_that_cannot_be_told_or_are_not_there_are_refused(tmp_path: Path, target, config, stated, words):
    with pytest.raises(ExperimentError, match=words) as caught:
        check_draft_fit(write(tmp_path / "draft", config), target, stated)
    assert caught.value.where == f"draft.checkpoint: {tmp_path / 'draft'}"


def test_what_cannot_be_told_is_mended_by_the_field(tmp_path: Path, target):
    with pytest.raises(ExperimentError) as caught:
        check_draft_fit(write(tmp_path / "draft", CONFIG | {IDS: [1, 4, 6]}), target)
    assert "draft.layer_ids: entering" in caught.value.fix and "draft.layer_ids: leaving" in caught.value.fix


def test_a_shallow_target_has_fewer_usual_layers(tmp_path: Path):
    shallow, draft = target_shape(tmp_path / "target", num_hidden_layers=4), tmp_path / "draft"
    assert check_draft_fit(write(draft, CONFIG | {IDS: [0, 1]}, tensors(aux=2)), shallow).layers == [1, 2]
    assert check_draft_fit(write(draft, UNNAMED, tensors(aux=2)), shallow).layers == [1, 2]
    with pytest.raises(ExperimentError, match=r"fc is \[64, 192\], not \[64, 128\]"):
        check_draft_fit(write(draft, UNNAMED), shallow)
