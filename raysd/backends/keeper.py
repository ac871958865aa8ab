"""A small process between raysd and an engine: when raysd ends, however it ends, every process of the engine ends too.

Run as a program: `python keeper.py COMMAND...`, as the leader of a new process group, its standard input a pipe whose other end only raysd
holds. A pipe closes with its owner even on SIGKILL. (PR_SET_PDEATHSIG does not do: it reaches the API server alone, which does not pass it on
while its engine compiles, and the engine stays.) Uses nothing but the standard library, so that it costs 10 MB and no start-up time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 10.0
"""Between SIGTERM and SIGKILL."""


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # in this process's group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a SIGTERM to the group is the child's to answer
    owner_gone = threading.Event()
    threading.Thread(target=end_group_with_owner, args=(owner_gone,), daemon=True).start()
    code = child.wait()
    if owner_gone.is_set():
        time.sleep(2 * PATIENCE_S)  # the child is only one of the engine's processes: the thread ends the group, and this process with it
    return 128 - code if code < 0 else code  # as a shell says it: 128 + signal


def end_group_with_owner(owner_gone: threading.Event) -> None:
    """Waits until standard input closes, sets the event, and ends this process's whole group: SIGTERM, SIGKILL after PATIENCE_S."""
    while os.read(0, 1):  # nobody writes: it returns b"" when the owner has ended
        pass
    owner_gone.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
