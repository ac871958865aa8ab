"""A stage's process as a driver of the Ray that its job runs in."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from raysd.backends.local_ray import LOOPBACK
from raysd.errors import RaysdError, StageError, TryAgainError
from raysd.signals import termination_kept

GOES_ON = "run again to go on with what is left"
"""What to do after a failure of Ray's, of work that keeps what is done."""
CHUNK_BYTES = 16 * 2**20
"""Of a piece of a checkpoint on its way through Ray."""


@contextlib.contextmanager
def connected(doing: str, where: str, again: str = GOES_ON) -> Iterator[None]:
    """A connection to the cluster that this job runs in; outside of a job, a Ray of its own. On exit all that it started in Ray has been ended, unless it is
    within another, which then does that.

    doing: what needs Ray, such as `the training`; where: the field that asks for it, for errors; again: how it is done again.
    Raises TryAgainError if Ray is not there, or fails within.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    options = {"configure_logging": False}
    if "RAY_ADDRESS" not in os.environ:
        options |= {"address": "local", "include_dashboard": False, "_node_ip_address": LOOPBACK,
                    "_system_config": {"automatic_object_spilling_enabled": False}}  # as in local_ray.py
    within = ray.is_initialized()
    if not within:
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, TimeoutError, OSError) as err:
            raise TryAgainError(what=f"{doing} did not reach Ray: {err}", where=where, fix="check that the cluster is up, and run again") from err
        signal.signal(signal.SIGTERM, handler)  # Ray puts one of its own in its place
    try:
        with termination_kept():
            yield
    except ray.exceptions.RayError as err:
        raise TryAgainError(what=f"Ray failed during {doing}: {last_line(err)}", where=where, fix=again) from err
    finally:
        if not within:
            ray.shutdown()


def last_line(said: BaseException | str | None) -> str:
    """The end of what an error or a message says, where Ray puts the reason. An error that says nothing is told by its kind, a message by nothing."""
    lines = str(said or "").strip().splitlines()
    if lines:
        return lines[-1].strip()
    return type(said).__name__ if isinstance(said, BaseException) else ""


def received(reference: Any, doing: str, where: str, lost: type[TryAgainError] = TryAgainError, timeout_s: float | None = None,
             again: str = GOES_ON) -> Any:
    """What a call of an actor gave, or raised. doing: what the actor is there for, such as `the capture`; where: the field that asks for it; again: how it is
    done again.

    Raises StageError for an error of the actor's that is not raysd's own; `lost` if the actor has ended, or says nothing for timeout_s.
    """
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as err:
        raise err.cause if isinstance(err.cause, RaysdError) else StageError(what=f"the process of {doing} failed: {err.cause!r}", where=where,
                                                                             fix="its lines are in the job's log") from err
    except ray.exceptions.RayError as err:
        raise lost(what=f"the process of {doing} was lost: {last_line(err)}", where=where,
                   fix=f"{again}; if it happens again, look at the memory of its node") from err
