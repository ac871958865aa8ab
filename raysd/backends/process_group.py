"""Process groups of engines: who is still in one, and ending all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from raysd.errors import EngineError

STOP_PATIENCE_S = 15.0
POLL_S = 0.05


def end_group(leader: subprocess.Popen, where: object) -> None:
    """Ends every process of the group that `leader` leads: SIGTERM, SIGKILL after 15 s. Returns when none is left; raises EngineError if one stays.

    leader: started with `start_new_session` and its standard input a pipe. where: what an error names.
    """
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, ending)
        deadline = time.monotonic() + STOP_PATIENCE_S
        while time.monotonic() < deadline:
            leader.poll()  # reaps it
            if not group_members(leader.pid):
                leader.stdin.close()
                return
            time.sleep(POLL_S)
    raise EngineError(what=f"processes {group_members(leader.pid)} of the vLLM engine do not end", where=where,
                      fix="they hang in the kernel (a device driver?): look at `ps`, end them, then run again")


def exit_words(code: int) -> str:
    """How a process ended, for a message."""
    return f"exit code {code}" + (", SIGKILL: as when memory runs out" if code in (-signal.SIGKILL, 128 + signal.SIGKILL) else "")


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run; a zombie, which only waits for its parent to read its exit code, does not."""
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members
