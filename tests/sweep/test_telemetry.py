"""Telemetry with tools that are real executables on PATH and print what the vendors' do."""

import contextlib
import os
import stat
import sys
import threading
import time

import pytest

from raysd.errors import EngineError
from raysd.sweep import telemetry
from raysd.sweep.smi import find_tool
from raysd.sweep.telemetry import COLUMNS, Telemetry, devices_free

AMD_WATCHES = r"""
import sys, time
if "-w" not in sys.argv:
    sys.exit("not asked to watch")
print("WARNING: no render group")
print("timestamp,gpu,gfx_activity,socket_power,gfx_0_clk,mem_0_clk,edge,hotspot,total_vram,used_vram")
while True:
    for gpu in (0, 1):
        print(f"{int(time.time())},{gpu},90,{500 + gpu},2100,2000,N/A,70,1000,250", flush=True)
    time.sleep(0.02)
"""
AMD_CANNOT_WATCH = r"""
import sys
if "-w" in sys.argv:
    sys.exit("amd-smi metric: error: unrecognized arguments: -w")
print('[{"gpu": 0, "power": {"socket_power": {"value": 321, "unit": "W"}}}]')
"""
BREAKS = r"""
import sys
print("0, 123.50, 1980, 2619, 48, 1024, 143771, 97", flush=True)
print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", flush=True)
"""
NO_DRIVER = "import sys\nsys.exit('NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver')"
FREES_ITS_MEMORY = r"""
import pathlib
count = pathlib.Path(__file__ + ".count")
seen = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (seen + 1))
for index, used in ((0, 900), (1, 900 if seen < 2 else 50)):
    print(f"{index}, 100, 1980, 2619, 48, {used}, 1000, 0")
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts the program of a tool on PATH, where there is no other."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.02)

    def put(name: str, program: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!{sys.executable} -I\n{program}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


class Said:
    """What telemetry says, and when it has said something."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.something = threading.Event()

    def __call__(self, words: str) -> None:
        self.words.append(words)
        self.something.set()


@contextlib.contextmanager
def watching(said: Said):
    seen = Telemetry(said, find_tool())
    seen.open()
    with contextlib.closing(seen):
        yield seen


def rows_until(seen: Telemetry, enough) -> list[dict]:
    """All rows, as soon as there are enough; a minute is more than any of this takes."""
    deadline = time.monotonic() + 60
    while not enough(rows := seen.rows(0, 2**40)):
        assert time.monotonic() < deadline, rows
        threading.Event().wait(0.01)
    return rows


def of(rows: list[dict], source: str) -> list[dict]:
    return [row for row in rows if row["source"] == source]


def test_a_machine_without_a_tool_is_seen_without_a_word(tool):
    said = Said()
    with watching(said) as seen:
        rows = rows_until(seen, lambda rows: len(rows) >= 3)
    assert said.words == [] and {row["source"] for row in rows} == {"host"}
    for row in rows:
        assert set(row) == set(COLUMNS)
        assert 0 <= row["cpu_frac"] <= 1 and 0 < row["memory_used_bytes"] < row["memory_total_bytes"] and row["power_w"] is None


def test_a_tool_that_watches_is_started_once_and_ends_with_telemetry(tool):
    tool("amd-smi", AMD_WATCHES)
    said = Said()
    with watching(said) as seen:
        rows = rows_until(seen, lambda rows: len(of(rows, "amd-smi")) >= 6)
        process = seen._process
    assert process.poll() is not None and said.words == []
    first, second = of(rows, "amd-smi")[:2]
    assert (first["device"], first["power_w"], first["gfx_clock_mhz"], first["temperature_c"], first["busy_frac"], first["memory_used_bytes"]) == (
        "0", 500.0, 2100.0, 70.0, 0.9, 250 * 2**20)
    assert (second["device"], second["power_w"]) == ("1", 501.0)
    assert abs(first["t_s"] - time.time()) < 600


def test_rows_are_those_of_the_window_and_a_little_around_it(tool):
    with watching(Said()) as seen:
        rows = rows_until(seen, lambda rows: len(rows) >= 3)
        at_s = rows[0]["t_s"]
        assert rows[0] not in seen.rows(at_s - 4, at_s - 3)
        assert rows[0] in seen.rows(at_s + 1, at_s + 2) and rows[0] not in seen.rows(at_s + 3, at_s + 4)
        assert rows[0] not in seen.rows(0, 2**40), "a window before the last one is forgotten"


def test_a_tool_that_cannot_watch_is_asked_again_and_again(tool):
    tool("amd-smi", AMD_CANNOT_WATCH)
    said = Said()
    with watching(said) as seen:
        rows = rows_until(seen, lambda rows: len(of(rows, "amd-smi")) >= 3)
    assert {row["power_w"] for row in of(rows, "amd-smi")} == {321.0} and said.words == []


@pytest.mark.parametrize(("program", "what"), [(BREAKS, "fields, where there are 8 columns: NVIDIA-SMI has failed"), (NO_DRIVER, "exit code 1: NVIDIA-SMI has failed")])
def test_a_tool_that_fails_is_told_once_and_the_host_is_seen_on(tool, program, what):
    tool("nvidia-smi", program)
    said = Said()
    with watching(said) as seen:
        assert said.something.wait(60)
        hosts = len(of(seen.rows(0, 2**40), "host"))
        rows_until(seen, lambda rows: len(of(rows, "host")) > hosts + 2)
    assert len(said.words) == 1 and said.words[0].startswith("nvidia-smi tells no more of the devices") and what in said.words[0]


def test_devices_whose_memory_somebody_holds_are_waited_for(tool):
    tool("nvidia-smi", FREES_ITS_MEMORY)
    waited = []
    devices_free({"CUDA_VISIBLE_DEVICES": "1"}, patience_s=60, sleep=waited.append)
    assert len(waited) == 2, "until it was free, and the other device is not ours"
    with pytest.raises(EngineError, match="device 0 90%"):
        devices_free({"CUDA_VISIBLE_DEVICES": "0,1"}, patience_s=0)


def test_without_a_tool_or_with_one_that_fails_no_device_is_waited_for(tool):
    devices_free(os.environ, patience_s=0)
    tool("nvidia-smi", NO_DRIVER)
    devices_free(os.environ, patience_s=0)
