"""SIGTERM as an exception, so that `with` and `finally` stop what was started; and pieces of work that no signal cuts in two."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. A KeyboardInterrupt, because asyncio lets only that and SystemExit out of its callbacks."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_arrived: list[Terminated] = []
"""What has been raised; one at most."""


def raise_when_terminated() -> None:
    """Makes SIGTERM and SIGHUP raise Terminated in the main thread, once: a second one must not cut short the clearing up. What is ignored, as `nohup` has it of
    SIGHUP, stays so."""
    ignored_here = bool(_arrived)  # by _terminate, and not by whoever started the process
    _arrived.clear()
    for number in TERMINATING:
        if ignored_here or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    for ignored in TERMINATING:
        signal.signal(ignored, signal.SIG_IGN)
    _arrived.append(Terminated(number))
    raise _arrived[0]


@contextlib.contextmanager
def termination_kept() -> Iterator[None]:
    """Lets Terminated out of a library that asks for signals itself and raises a KeyboardInterrupt in place of what their handlers raise, as Ray does."""
    try:
        yield
    except KeyboardInterrupt as err:
        if _arrived and err is not _arrived[0]:
            raise _arrived[0] from err
        raise


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT that arrive inside take effect at the end. For the main thread."""
    waiting: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: waiting.append(number)) for number in (*TERMINATING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in waiting[:1]:
        signal.raise_signal(number)
