"""Signals end what they must, and cut nothing in two."""

from __future__ import annotations

import signal

import pytest

from raysd.signals import TERMINATING, Terminated, raise_when_terminated, termination_kept, whole


@pytest.fixture(autouse=True)
def handlers(signals):
    raise_when_terminated()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_waits_until_the_end_of_what_is_whole(number, error):
    done = []
    with pytest.raises(error):
        with whole():
            signal.raise_signal(number)
            done.append("to the end")
        done.append("never")
    assert done == ["to the end"]


def test_a_second_signal_does_not_cut_short_the_clearing_up():
    with pytest.raises(Terminated, match="SIGTERM") as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGHUP)


def test_after_the_clearing_up_signals_can_be_raised_again():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        with pytest.raises(Terminated):
            signal.raise_signal(number)
        raise_when_terminated()


def test_what_nohup_has_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_when_terminated()
    signal.raise_signal(signal.SIGHUP)
    with pytest.raises(Terminated, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_an_error_inside_is_not_hidden_by_a_signal_that_waits():
    with pytest.raises(ValueError), whole():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError


def interrupted_by(number):
    """What a library does that asks for signals itself."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        pass
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", TERMINATING)
def test_a_termination_comes_out_of_a_library_that_makes_another_interrupt_of_it(number):
    with pytest.raises(Terminated) as caught, termination_kept():
        interrupted_by(number)
    assert caught.value.number == number


def test_an_interrupt_stays_one_and_a_termination_is_of_its_own_command():
    with pytest.raises(KeyboardInterrupt) as caught, termination_kept():
        interrupted_by(signal.SIGINT)
    assert not isinstance(caught.value, Terminated)
    with pytest.raises(Terminated), termination_kept():
        signal.raise_signal(signal.SIGTERM)
    raise_when_terminated()
    with pytest.raises(KeyboardInterrupt) as caught, termination_kept():
        interrupted_by(signal.SIGINT)
    assert not isinstance(caught.value, Terminated)
