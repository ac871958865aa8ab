"""Ends the processes of a replica's engine with the replica: `python -I -S engine_watch.py PID ...`, whose standard input the replica holds open.

vLLM's engine runs in a process of its own that does not notice when the one it works for is killed: it would keep its devices and their memory, and the
replica that comes in its place would find none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main(pids: list[int]) -> None:
    """Waits until nobody holds the other end of standard input, and then kills the processes."""
    held = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            held.append(os.pidfd_open(pid))  # a number may be given to another process by then
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for process in held:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
