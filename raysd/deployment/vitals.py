"""Whether a replica's engine is well: when it last finished a step, and how much of its drafts is accepted."""

from __future__ import annotations

from collections import deque

FEWEST_DRAFTS = 100
"""Fewer tell nothing about acceptance."""


class Vitals:
    """Fed with every step of the engine; asked from time to time. All moments are seconds of one monotonic clock."""

    def __init__(self, stuck_after_s: float, floor: float | None, floor_s: float) -> None:
        self._stuck_after_s, self._floor, self._floor_s = stuck_after_s, floor, floor_s
        self._running = self._waiting = 0
        self._stepped_s: float | None = None
        self._busy_since_s: float | None = None
        self._first_draft_s: float | None = None
        self._seconds: deque[list[float]] = deque()
        """Moment, drafts, accepted: one a second."""

    def step(self, now_s: float, running: int, waiting: int, drafts: int, accepted: int) -> None:
        """The engine has finished a step; drafts and accepted: of this step."""
        self._stepped_s, self._running, self._waiting = now_s, running, waiting
        if drafts:
            if self._first_draft_s is None:
                self._first_draft_s = now_s
            if not self._seconds or now_s - self._seconds[-1][0] >= 1:
                self._seconds.append([now_s, 0, 0])
            self._seconds[-1][1] += drafts
            self._seconds[-1][2] += accepted

    def acceptance_length(self, now_s: float) -> float | None:
        """Over the last `floor_s`; None if there were few drafts."""
        while self._seconds and now_s - self._seconds[0][0] > self._floor_s:
            self._seconds.popleft()
        drafts = sum(each[1] for each in self._seconds)
        return 1 + sum(each[2] for each in self._seconds) / drafts if drafts >= FEWEST_DRAFTS else None

    def stats(self, now_s: float) -> dict[str, float]:
        """What an autoscaling policy may look at."""
        length = self.acceptance_length(now_s)
        return {"running": float(self._running), "waiting": float(self._waiting)} | ({} if length is None else {"acceptance_length": length})

    def is_stuck(self, now_s: float, unfinished: int) -> bool:
        """Whether the engine has had requests for long, `unfinished` of them now, and finished no step."""
        if not unfinished:
            self._busy_since_s = None
            return False
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        return now_s - max(self._busy_since_s, self._stepped_s or 0.0) > self._stuck_after_s

    def below_floor(self, now_s: float) -> float | None:
        """The acceptance length, if it was measured for long enough and is below the floor."""
        if self._floor is None or self._first_draft_s is None or now_s - self._first_draft_s < self._floor_s:
            return None
        length = self.acceptance_length(now_s)
        return length if length is not None and length < self._floor else None
