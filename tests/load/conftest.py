"""A bench handles signals, in a process of its own; here it is called in pytest's."""

import pytest


@pytest.fixture(autouse=True)
def handlers_stay(signals):
    """As they were, after each test."""
