"""The fault campaign: `python -m tests.faults [--only KIND] [--seed N] [--count N]`; exit 1 if a fault was not recovered from."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from raysd.signals import raise_when_terminated
from tests.faults.bench import Bench, Fault, make_reference
from tests.faults.ground import NotAllowed, NotRecovered
from tests.faults.kinds import KINDS
from tests.faults.verify import verify

TIMES = {"kill_train": 3, "kill_capture": 2, "kill_capture_engine": 2, "kill_runner": 2, "stop": 2, "stop_waiting": 2, "two_at_once": 2, "hung_publishing": 2,
         "hung_keeping": 2, "gc_meanwhile": 2}
"""How often a kind happens in a campaign, if more than once."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Does to real runs what clusters do, runs again, and checks the results.")
    parser.add_argument("--only", choices=sorted(KINDS), metavar="KIND", help=f"one kind: {', '.join(sorted(KINDS))}")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of each kind; a fault is known by its kind and seed (default: 0)")
    parser.add_argument("--count", type=int, help="how many faults; default: with --only 1, else all of the campaign")
    args = parser.parse_args()
    raise_when_terminated()
    scratch = Path(tempfile.mkdtemp(prefix="raysd-faults-"))
    try:
        return campaign(planned(args.only, args.seed, args.count), scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def planned(only: str | None, seed: int, count: int | None) -> list[tuple[str, int]]:
    """Kind and seed of every fault, the kinds in turn."""
    times = {only: count or 1} if only else {kind: TIMES.get(kind, 1) for kind in KINDS}
    faults = [(kind, seed + number) for number in range(max(times.values())) for kind in times if number < times[kind]]
    rounds = max(times.values())
    while count is not None and len(faults) < count:
        faults += [(kind, seed + rounds) for kind in times]
        rounds += 1
    return faults[:count]


def campaign(faults: list[tuple[str, int]], scratch: Path) -> int:
    """Does the faults one after another, a line each; returns the exit code."""
    started = time.monotonic()
    reference = make_reference(scratch / "reference")
    print(f"the reference run took {time.monotonic() - started:.0f} s", flush=True)
    outcomes: Counter[str] = Counter()
    with Bench(reference, scratch) as bench:
        for number, (kind, seed) in enumerate(faults, start=1):
            started = time.monotonic()
            with Fault(bench, kind, seed, scratch / f"{kind}-{seed}") as fault:
                outcome, why = outcome_of(fault)
            outcomes[outcome] += 1
            print(f"{number:3} {kind:<20} seed {seed} {time.monotonic() - started:4.0f} s  {outcome}: {fault.hit}{why}", flush=True)
            shutil.rmtree(fault.folder, ignore_errors=True)
    done = len(faults) - outcomes["skipped"]
    print(f"{done} faults, {outcomes['recovered']} recovered", flush=True)
    return 0 if outcomes["recovered"] == done else 1


def outcome_of(fault: Fault) -> tuple[str, str]:
    """`recovered`, `skipped` or `NOT recovered`, and why."""
    try:
        suffer(fault)
    except NotAllowed as err:
        return "skipped", f"not allowed here: {err}"
    except NotRecovered as err:
        return "NOT recovered", f": {err}"
    except Exception:  # a fault in the campaign itself, or an error of raysd's that nobody expected: the next faults say which
        return "NOT recovered", f": {traceback.format_exc()}"
    return "recovered", ""


def suffer(fault: Fault) -> None:
    """Does a fault, runs again until all is there, and verifies it. Raises NotRecovered, saying what was not as it must be."""
    ground = KINDS[fault.kind](fault)
    ground.finish()
    verify(ground)


if __name__ == "__main__":
    sys.exit(main())
