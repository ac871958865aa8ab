"""When requests are to be sent: so many in flight at any moment, or at times of their own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from raysd.errors import ExperimentError

LONGEST_S = 7 * 86400.0
"""From the begin until the last request is sent, and so of a ramp: a clock in nanoseconds, and timers, take no time without a bound."""
LARGEST_RATE_S = 1e6
"""More than any client sends."""


@dataclass(frozen=True)
class Load:
    """Either `concurrency` (closed loop) or `rate_s` (open loop)."""

    concurrency: int | None = None
    """Requests in flight at any moment, until they run out."""
    rate_s: float | None = None
    """Requests a second, whether or not earlier ones have been answered."""
    arrivals: Literal["constant", "poisson"] = "constant"
    """Of an open loop: evenly spaced, or independent of each other."""
    ramp_s: float = 0.0
    """Until all of `concurrency` is in flight, one more at even distances; or until `rate_s` is reached, growing from 0."""
    seed: int = 0
    """Of Poisson arrivals."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_s is None):
            raise ExperimentError(what="a load is a concurrency or a rate", where="--concurrency, --rate", fix="give one of them")
        if self.concurrency is not None and self.concurrency < 1:
            raise ExperimentError(what=f"a concurrency of {self.concurrency}", where="--concurrency", fix="use at least 1")
        if self.rate_s is not None and not 1 / LONGEST_S <= self.rate_s <= LARGEST_RATE_S:
            raise ExperimentError(what=f"a rate of {self.rate_s} requests a second", where="--rate", fix=f"use at least {1 / LONGEST_S:.2g}, one in {LONGEST_S:g} s, and at most {LARGEST_RATE_S:g}")
        if self.concurrency is not None and self.arrivals != "constant":
            raise ExperimentError(what="Poisson arrivals have no effect on a closed loop", where="--poisson", fix="give a --rate")
        if not 0 <= self.ramp_s <= LONGEST_S:
            raise ExperimentError(what=f"a ramp of {self.ramp_s} s", where="--ramp", fix=f"use 0 or more, and at most {LONGEST_S:g}")

    def check_count(self, count: int) -> None:
        """Raises ExperimentError where so many requests take an open loop longer than LONGEST_S, or not to the end of its ramp. When a closed loop is over, its server decides."""
        if self.rate_s is None:
            return
        last_s = self.times_s(count)[-1]
        if last_s > LONGEST_S:
            raise ExperimentError(what=f"the last of {count} requests would be sent after {last_s:.0f} s", where="--rate", fix=f"ask for fewer, or for more a second: at most {LONGEST_S:g} s are allowed")
        if last_s < self.ramp_s:
            raise ExperimentError(what=f"the rate of {self.rate_s:g} requests a second would never be reached: the last of {count} is sent after {last_s:.3g} s of a ramp of {self.ramp_s:g} s",
                                  where="--ramp", fix="use a shorter one, or more --requests")

    def start_s(self, slot: int) -> float:
        """When a slot of a closed loop sends its first request, in seconds since the begin."""
        return 0.0 if self.ramp_s == 0 else self.ramp_s * slot / self.concurrency

    def times_s(self, count: int) -> list[float]:
        """When the requests of an open loop are to be sent, in seconds since the begin.

        On a ramp the expected number of requests by time t is rate * t^2 / (2 ramp_s), and from its end on it grows by the rate. Poisson arrivals are those of a
        process of rate 1 in that number (Lewis and Shedler, 1979: inversion).
        """
        draws, random_ = 0.0, random.Random(self.seed)
        times = []
        for number in range(count):
            draws = draws + random_.expovariate(1.0) if self.arrivals == "poisson" else float(number)
            times.append(self._time_of(draws))
        return times

    def _time_of(self, expected: float) -> float:
        """When so many requests are expected to have been sent."""
        on_ramp = self.rate_s * self.ramp_s / 2
        return math.sqrt(2 * expected * self.ramp_s / self.rate_s) if expected < on_ramp else self.ramp_s / 2 + expected / self.rate_s


@dataclass(frozen=True)
class Part:
    """Of a load that several processes share, every count-th slot or request from `number` on, each at the moment that it has in the whole."""

    whole: Load
    number: int
    count: int

    @property
    def concurrency(self) -> int | None:
        """Its share of a closed loop."""
        return None if self.whole.concurrency is None else len(range(self.number, self.whole.concurrency, self.count))

    def start_s(self, slot: int) -> float:
        """As a Load has it, of its own slots."""
        return self.whole.start_s(self.number + slot * self.count)

    def times_s(self, count: int) -> list[float]:
        """As a Load has it, of so many requests of its own."""
        return self.whole.times_s(self.number + (count - 1) * self.count + 1)[self.number :: self.count] if count else []
