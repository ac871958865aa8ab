import os
import signal
import subprocess
import sys
import time

import pytest

from raysd.backends import keeper
from raysd.backends.process_group import group_members

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "grandchild"])
print("up", flush=True)
time.sleep(120)
"""
OWNER = """
import subprocess, sys, time
kept = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
print(kept.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_owner_even_those_that_ignore_sigterm(tmp_path, ending):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    impatient = tmp_path / "impatient_keeper.py"
    impatient.write_text(open(keeper.__file__).read().replace("PATIENCE_S = 10.0", "PATIENCE_S = 1.0"))
    command = [sys.executable, "-c", OWNER, str(impatient), sys.executable, str(tmp_path / "stubborn.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        group = int(owner.stdout.readline())
        wait_for(lambda: len(group_members(group)) == 3)  # the keeper, its child and its grandchild
        time.sleep(0.5)  # the handlers are set
        os.kill(owner.pid, ending)
        owner.wait()
    wait_for(lambda: group_members(group) == [])


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_the_keeper_ends_when_its_child_does_and_says_how(program, code):
    kept = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True)
    with kept:
        assert kept.wait(30) == code


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
