"""What the README shows of experiment files is what they take."""

import re
from pathlib import Path

import yaml

from raysd.experiment.store import read_store
from raysd.experiment.sweep import SweepSection
from raysd.experiment.train import TrainSection

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def shown(key: str) -> list:
    """The values of a key of every block of the README that begins with it, or holds a line of its own with it."""
    blocks = re.findall(rf"(?m)^    {key}:(?:.*\n(?:     .*\n)*)", README)
    assert blocks
    return [yaml.safe_load(block)[key] for block in blocks]


def test_the_sweep_that_is_shown_is_one():
    for section in shown("sweep"):
        SweepSection.model_validate(section)


def test_ways_to_train_that_are_shown_are_some():
    for section in shown("train"):
        TrainSection.model_validate(section)


def test_stores_that_are_shown_are_some():
    for store in shown("store"):
        assert read_store(store)
