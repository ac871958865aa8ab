"""A stage that hangs in the middle of what it does to its store: `python -m tests.faults.hanging_job METHOD PATTERN TIMES STAGE --experiment ... --store ...`

Before the call of a method of its home (`put`, `put_file`, `create`) whose key is the so-manieth to match, all of the process stops, as by SIGSTOP from
outside, until somebody continues it; all else is as in jobs/STAGE.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from itertools import count

from raysd.artifacts import Store
from raysd.backends.stages import edges
from raysd.pipeline.job import Edges, main


def hang(store: Store, method: str, pattern: str, times: int) -> Store:
    """The store, whose home will hang once."""
    call, matches = getattr(store.home, method), count(1)

    def hang_and_call(key: str, *rest: object) -> object:
        if re.fullmatch(pattern, key) and next(matches) == times:
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(key, *rest)

    setattr(store.home, method, hang_and_call)
    return store


def hanging_edges() -> Edges:
    """What the stage needs of the outside, with a store that hangs."""
    found = edges()
    return replace(found, open_store=lambda text: hang(found.open_store(text), sys.argv[1], sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[4], hanging_edges, sys.argv[5:]))
