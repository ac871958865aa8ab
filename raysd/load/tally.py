"""How far a load is, for whoever waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from raysd.artifacts.stage import Progress

TELL_EVERY_S = 1.0


@dataclass
class Tally:
    """Counts of requests; the thread of a load writes them, a few times a request and never at a chunk, and any other may read them."""

    requests: int = 0
    ended: int = 0
    """Those that failed included."""
    failed: int = 0
    """Without those whose answer will turn out to be garbled: it is not parsed before all has ended."""
    in_flight: int = 0

    def become_sum(self, parts: Sequence[Tally]) -> None:
        """Takes over what the parts of a load count."""
        for field in fields(self):
            setattr(self, field.name, sum(getattr(part, field.name) for part in parts))


@contextlib.contextmanager
def telling(tally: Tally, progress: Progress, every_s: float = TELL_EVERY_S) -> Iterator[None]:
    """Meanwhile tells how far the load is, from a thread of its own: a stream that is slow to take a line must not hold up the load."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            if not tally.requests:
                continue  # what is asked for is still being made
            try:
                progress("answering", tally.ended, tally.requests, "requests", **({"failed": tally.failed} if tally.failed else {}), in_flight=tally.in_flight)
            except OSError:
                return  # whoever read it has gone, and the results are told elsewhere

    thread = threading.Thread(target=tell, name="progress of the load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
