"""A folder in this machine's memory, gone when its owner is: `with memory_folder(bytes) as folder:`.

What lies in memory stays there when the process that wrote it is killed. So a small process of its own deletes the folder when its standard input closes,
which nobody but the owner holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from raysd.errors import StageError

MEMORY = Path("/dev/shm")
PATIENCE_S = 20.0
"""For the engines, which end after their owner, to write no more: as long as they may take to end."""


@contextlib.contextmanager
def memory_folder(need_bytes: int, lower: str) -> Iterator[Path]:
    """An empty folder in memory with room for so many bytes; deleted on exit, however this process ends.

    lower: the field of the experiment that says how many they are. Raises StageError if /dev/shm is no memory or too small.
    """
    check_memory(MEMORY, need_bytes, lower)
    folder = Path(tempfile.mkdtemp(prefix="raysd-", dir=MEMORY))
    deleter = subprocess.Popen([sys.executable, "-m", "raysd.backends.memory_folder", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        deleter.stdin.close()
        deleter.wait()


def check_memory(folder: Path, need_bytes: int, lower: str) -> None:
    """Raises StageError unless the folder is in memory, with room for so many bytes."""
    kind, free_bytes = file_system(folder), shutil.disk_usage(folder).free if folder.is_dir() else 0
    if kind not in ("tmpfs", "ramfs"):
        raise StageError(what=f"{folder} is {kind or 'absent'} and not memory: a stream keeps its hidden states off the disks", where="capture.mode: stream",
                         fix="mount a tmpfs there (in Kubernetes an emptyDir with medium: Memory), or use capture.mode: disk")
    if free_bytes < need_bytes:
        raise StageError(what=f"the hidden states of a group take up to {need_bytes / 2**20:,.0f} MiB of memory, {free_bytes / 2**20:,.0f} MiB are free in {folder}",
                         where=lower, fix="lower it, or give the container more shared memory (docker run --shm-size)")


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is mounted as; empty if nothing is mounted there."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return next((kind for _, place, kind, *_ in reversed(mounts) if place == str(folder)), "")


def main(folder: str) -> int:
    while os.read(0, 1):  # nobody writes: it returns b"" when the owner has ended
        pass
    give_up = time.monotonic() + PATIENCE_S
    while os.path.exists(folder) and time.monotonic() < give_up:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
