"""Host and devices looked at once a second beside what is measured: CPU, memory, power, clocks, temperature.

One thread looks at the host and one reads the vendor's tool, which runs once for the whole sweep where it can. A tool that is not there is no matter; one that fails is
told once, and the rest goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raysd.errors import EngineError
from raysd.sweep.energy import HOST
from raysd.sweep.smi import Reading, Tool, find_tool, own_devices

PERIOD_S = 1.0
AROUND_S = 2.5
"""Rows from so long before a window, and after it, belong to it: energy is interpolated at its edges."""
TOOL_TIMEOUT_S = 20.0
"""For one look of a tool."""
NICE = 10
"""A tool that watches yields to what is measured."""

COLUMNS = {"t_s": "double", "source": "string", "device": "string", "cpu_frac": "double", **dict.fromkeys((field.name for field in dataclasses.fields(Reading) if field.name != "device"), "double")}
"""Of the table `telemetry`. t_s: seconds since 1970; source: `host`, or the name of the tool; device: `host`, or its number; cpu_frac: of all cores."""

Row = dict[str, Any]


class Telemetry:
    """What is seen from `open` to `close`: `with contextlib.closing(Telemetry(say)) as telemetry:`."""

    def __init__(self, say: Callable[[str], None], tool: Tool | None) -> None:
        """say: told once, in words, if the tool fails. tool: of the vendor of the devices that engines use; None: they use none, or there is no tool."""
        self._say, self._rows, self._held = say, [], threading.Lock()
        self._ended, self._process, self._tool, self._failed = threading.Event(), None, tool, False
        self._told = False
        self._threads = [threading.Thread(target=self._watch_host, name="telemetry of the host", daemon=True)]
        if self._tool is not None:
            self._threads.append(threading.Thread(target=self._watch_devices, args=(self._tool,), name=f"telemetry by {self._tool.name}", daemon=True))

    def open(self) -> None:
        """Begins to look."""
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Looks no more; no thread or process of it is left."""
        self._ended.set()
        with self._held:
            process = self._process
        if process is not None:
            process.kill()
        for thread in self._threads:
            thread.join()
        if self._tool is not None and not self._failed and not self._told and time.monotonic() - self._began > TOOL_TIMEOUT_S:
            self._say(f"{self._tool.name} told nothing of the devices")

    def rows(self, start_s: float, end_s: float) -> list[Row]:
        """What was seen in a window of time.time(), and a little before and after it, in order of time. What lies before is forgotten: windows follow one another."""
        with self._held:
            self._rows = [row for row in self._rows if row["t_s"] >= start_s - AROUND_S]
            return sorted((row for row in self._rows if row["t_s"] <= end_s + AROUND_S), key=lambda row: row["t_s"])

    def _add(self, source: str, device: str, **values: float | None) -> None:
        row = dict.fromkeys(COLUMNS) | {"t_s": time.time(), "source": source, "device": device} | values
        with self._held:
            self._rows.append(row)

    def _add_readings(self, tool: Tool, readings: list[Reading]) -> None:
        self._told = self._told or bool(readings)
        for reading in readings:
            values = dataclasses.asdict(reading)
            self._add(tool.name, values.pop("device"), **values)

    def _watch_host(self) -> None:
        import psutil

        psutil.cpu_percent()  # the first call says nothing: it begins the time that the next one is of
        while not self._ended.wait(PERIOD_S):
            memory = psutil.virtual_memory()
            self._add(HOST, HOST, cpu_frac=psutil.cpu_percent() / 100, memory_used_bytes=float(memory.total - memory.available), memory_total_bytes=float(memory.total))

    def _watch_devices(self, tool: Tool) -> None:
        try:
            if tool.watch is None or not self._read_lines(tool):
                self._look_again_and_again(tool)
        except (OSError, ValueError, subprocess.SubprocessError) as err:
            if not self._ended.is_set():
                self._failed = True
                self._say(f"{tool.name} tells no more of the devices: {_words(err)}")

    def _read_lines(self, tool: Tool) -> bool:
        """Reads a tool that watches until the end; False if it cannot watch: then it may still look. Raises as `read` and `run` do, once it has told something."""
        told = False
        with _watching(tool) as process:
            with self._held:
                self._process = process
                if self._ended.is_set():  # whoever ended it saw no process to end
                    return True
            reader = tool.line_reader()
            try:
                for line in process.stdout:
                    if self._ended.is_set():
                        return True
                    if (reading := reader.read(line)) is not None:
                        self._add_readings(tool, [reading])
                        told = True
            except ValueError:
                if told:
                    raise
                return False
            if self._ended.is_set():
                return True
        if told:
            raise subprocess.CalledProcessError(process.returncode, tool.name, stderr="it ended")
        return False

    def _look_again_and_again(self, tool: Tool) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self._add_readings(tool, look(tool))
            took = time.monotonic() - began
            self._ended.wait(max(PERIOD_S - took, took))  # a slow tool gets at most half of a core


def look(tool: Tool) -> list[Reading]:
    """One look at all devices. Raises OSError, subprocess.SubprocessError or ValueError if the tool fails, hangs, or says something else."""
    done = subprocess.run([tool.name, *tool.once], capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
    return tool.parse(done.stdout)


@contextlib.contextmanager
def _watching(tool: Tool) -> Iterator[subprocess.Popen[str]]:
    """The tool at work; ended on exit."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # amd-smi is Python, and would tell nothing for minutes
    process = subprocess.Popen([tool.name, *tool.watch], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
                               env=environment)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


FREE_FRAC = 0.10
"""Of a device's memory, in use: less is free (InferenceX waits for the same)."""


def devices_free(environment: Mapping[str, str], patience_s: float = 60.0, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when nobody holds the memory of the devices that an engine of this environment would use; at once where no tool tells of it.

    Raises EngineError if more than FREE_FRAC of a device is still in use after patience_s: an engine would find too little, or be measured beside another.
    """
    tool = find_tool()
    if tool is None:
        return
    own, deadline = own_devices(environment), time.monotonic() + patience_s
    while True:
        try:
            readings = look(tool)
        except (OSError, ValueError, subprocess.SubprocessError):
            return  # a tool that fails says nothing of memory; telemetry tells that it does
        busy = [reading for reading in readings if own is None or reading.device in own if _used_frac(reading) > FREE_FRAC]
        if not busy:
            return
        if time.monotonic() >= deadline:
            words = ", ".join(f"device {reading.device} {_used_frac(reading):.0%}" for reading in busy)
            raise EngineError(what=f"memory of the engines' devices is in use, and stayed so for {patience_s:g} s: {words}", where=tool.name,
                              fix="find who holds it (`amd-smi process`, `nvidia-smi`), and end it")
        sleep(PERIOD_S)


def _used_frac(reading: Reading) -> float:
    known = reading.memory_used_bytes is not None and reading.memory_total_bytes
    return reading.memory_used_bytes / reading.memory_total_bytes if known else 0.0


def _words(err: Exception) -> str:
    if isinstance(err, subprocess.CalledProcessError):
        lines = (err.stderr or "").strip().splitlines()
        return f"exit code {err.returncode}" + (f": {lines[-1][:200]}" if lines else "")
    return str(err)[:300]
