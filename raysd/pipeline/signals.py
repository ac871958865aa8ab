"""SIGTERM as an exception, so that `with` and `finally` stop what was started."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. A KeyboardInterrupt, because asyncio lets only that and SystemExit out of its callbacks."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_when_terminated() -> None:
    """Makes SIGTERM and SIGHUP raise Terminated in the main thread, once: a second one must not cut short the clearing up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    raise Terminated(number)
