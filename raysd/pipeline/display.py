"""Shows a run on standard error: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from raysd.artifacts.stage import Progress

LINE_INTERVAL_S = 10.0
"""Between two plain lines of one stage."""


def open_display(stream: IO[str], refreshes_per_s: float = 10) -> PlainDisplay | LiveDisplay:
    """The display that fits a stream; use it in a `with`. refreshes_per_s: of a live one; each takes this process a millisecond or so."""
    return LiveDisplay(stream, refreshes_per_s) if stream.isatty() else PlainDisplay(stream)


def describe(doing: str, done: float | None, total: float | None, unit: str, figures: dict[str, float]) -> str:
    """One line for what a stage is doing: `answering 128/1,032 prompts (12%), output_tok_s 673`."""
    text = doing
    if done is not None and total:
        text += f" {_count(done)}/{_count(total)} {unit}".rstrip() + f" ({done / total:.0%})"
    elif done is not None:
        text += f" {_count(done)} {unit}".rstrip()
    return ", ".join([text, *(f"{name} {value:.4g}" for name, value in figures.items())])


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


class TimeLeft:
    """How long an activity will still take, at the pace it has had since it was first told of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._doing: str | None = None
        self._since: tuple[float, float] = (0.0, 0.0)

    def __call__(self, doing: str, done: float | None, total: float | None) -> str:
        """As it follows a description: `, 2:31 left`; empty while nothing can be said."""
        now = self._clock()
        if done is None or not total or doing != self._doing:
            self._doing, self._since = doing, (now, done or 0.0)
            return ""
        started, before = self._since
        if not before < done < total:
            return ""
        return f", {clock_time((total - done) * (now - started) / (done - before))} left"


def clock_time(seconds: float) -> str:
    """Minutes and seconds: `3:07`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class PlainDisplay:
    """Lines: a stage's start and end, and in between one at most every ten seconds."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage_cached(self, stage: str) -> None:
        self._line(f"{stage}: found")

    def stage_started(self, stage: str, attempt: int, why: str) -> Progress:
        again = f", attempt {attempt}" if attempt > 1 else ""
        return self._progress(stage, f"started{again} ({why})")

    def stage_followed(self, stage: str, owner: str) -> Progress:
        return self._progress(stage, f"run by {owner}; following")

    def _progress(self, stage: str, text: str) -> Progress:
        self._line(f"{stage}: {text}")
        started, time_left = self._clock(), TimeLeft(self._clock)
        told_at = started

        def progress(doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
            nonlocal told_at
            now, left = self._clock(), time_left(doing, done, total)
            if now - told_at >= LINE_INTERVAL_S:
                told_at = now
                self._line(f"{stage}: {clock_time(now - started)} {describe(doing, done, total, unit, figures)}{left}")

        return progress

    def stage_ended(self, stage: str, state: str, elapsed_s: float) -> None:
        self._line(f"{stage}: {state} in {clock_time(elapsed_s)}")

    def note(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveDisplay:
    """One moving line with a bar for the stage at work; finished stages stay above it."""

    def __init__(self, stream: IO[str], refreshes_per_s: float) -> None:
        from rich.console import Console  # late: `raysd --help` does without
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(file=stream, highlight=False)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<9}"),
            TimeElapsedColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=refreshes_per_s,
        )
        self._task: Any = None

    def __enter__(self) -> LiveDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage_cached(self, stage: str) -> None:
        self.note(f"{stage:<9} found")

    def stage_started(self, stage: str, attempt: int, why: str) -> Progress:
        again = f", attempt {attempt}" if attempt > 1 else ""
        return self._progress(stage, f"starting{again} ({why})")

    def stage_followed(self, stage: str, owner: str) -> Progress:
        return self._progress(stage, f"run by {owner}; following")

    def _progress(self, stage: str, text: str) -> Progress:
        self._clear()
        self._task, time_left = self._bars.add_task(text, stage=stage, total=None), TimeLeft(time.monotonic)

        def progress(doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
            text = describe(doing, done, total, unit, figures) + time_left(doing, done, total)
            self._bars.update(self._task, description=text, completed=done or 0, total=total)

        return progress

    def stage_ended(self, stage: str, state: str, elapsed_s: float) -> None:
        self._clear()
        self.note(f"{stage:<9} {state} in {clock_time(elapsed_s)}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _clear(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
