"""A bench handles signals, in a process of its own; here it is called in pytest's."""

import signal

import pytest

from raysd.signals import TERMINATING


@pytest.fixture(autouse=True)
def handlers_stay():
    before = {number: signal.getsignal(number) for number in TERMINATING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
