"""What a stage's job tells its runner: one line of JSON an event, marked so that it is found among all else in the log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from raysd.errors import RaysdError, to_dict

MARK = "@raysd "


@dataclass(frozen=True)
class ProgressEvent:
    """What a stage is doing."""

    doing: str
    done: float | None = None
    total: float | None = None
    unit: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    """Numbers worth a glance, units in their names."""


@dataclass(frozen=True)
class ErrorEvent:
    """Why a stage ended: a RaysdError as `to_dict` writes it."""

    error: dict[str, str]


def write_event(event: ProgressEvent | ErrorEvent, stream: IO[str]) -> None:
    """Writes one event as a line of its own."""
    stream.write(f"{MARK}{json.dumps(asdict(event), ensure_ascii=True)}\n")
    stream.flush()


def write_error(error: RaysdError, stream: IO[str]) -> None:
    """Writes a stage's error as an event, on a new line even if a library left one open."""
    stream.write("\n")
    write_event(ErrorEvent(to_dict(error)), stream)


def read_event(line: str) -> ProgressEvent | ErrorEvent | None:
    """The event in a line of a job's log; None if it holds none, as with a line that was cut."""
    if not line.startswith(MARK):
        return None
    try:
        fields: Any = json.loads(line[len(MARK) :])
        return ErrorEvent(**fields) if "error" in fields else ProgressEvent(**fields)
    except (ValueError, TypeError):
        return None


class EventProgress:
    """A stage's Progress that writes events, at most one every `interval_s`; a new activity and a finished one are always told."""

    def __init__(self, stream: IO[str] | None = None, interval_s: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._clock = clock
        self._doing: str | None = None
        self._told_at = 0.0

    def __call__(self, doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
        now = self._clock()
        finished = total is not None and done is not None and done >= total
        if doing == self._doing and not finished and now - self._told_at < self._interval_s:
            return
        self._doing, self._told_at = doing, now
        write_event(ProgressEvent(doing, done, total, unit, figures), self._stream)
