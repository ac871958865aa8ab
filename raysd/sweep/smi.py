"""What `amd-smi`, `rocm-smi` and `nvidia-smi` say of GPUs: how each is called, and its output as readings in one set of units. Pure but for `find_tool`.

Forms: amd-smi as a list or below `gpu_data`, a value as {"value": 142, "unit": "W"}, "142 W" or 142, what it cannot say as "N/A", warnings before the first
bracket; its `-w` prints CSV, whose clocks are one column for each die. rocm-smi has words with units for keys, some of which changed between ROCm 5 and 6.
"MB" is 2**20 bytes for both, as is nvidia-smi's MiB.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """One device at one moment; None: the tool does not say."""

    device: str
    """Its number, as the tool counts."""
    power_w: float | None = None
    gfx_clock_mhz: float | None = None
    """Mean over its dies."""
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    """The hottest place that it knows of (hotspot, junction), else the edge."""
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    busy_frac: float | None = None


class LineReader:
    """Readings out of a tool's endless output, a line at a time."""

    def __init__(self, of_fields: Callable[[Mapping[str, str]], Reading], columns: Sequence[str] | None = None) -> None:
        """of_fields: what a line's fields say, by column. columns: their names; None: a line that holds the word `gpu` names them, the first one or any later."""
        self._of_fields, self._columns, self._named = of_fields, columns, columns is None

    def read(self, line: str) -> Reading | None:
        """What a line says; None for one that says nothing: empty, the names of columns, or a warning before them. Raises ValueError if it cannot be read."""
        fields = [field.strip() for field in next(csv.reader([line]), [])]
        if self._named and "gpu" in fields:
            self._columns = fields
            return None
        if not line.strip() or self._columns is None:
            return None
        if len(fields) < len(self._columns):
            raise ValueError(f"{len(fields)} fields, where there are {len(self._columns)} columns: {line.strip()[:200]}")
        return self._of_fields(dict(zip(self._columns, fields, strict=False)))


@dataclass(frozen=True)
class Tool:
    """A vendor's tool."""

    name: str
    once: tuple[str, ...]
    """Its arguments for one look at all devices."""
    parse: Callable[[str], list[Reading]]
    """What that prints. Raises ValueError if it is something else."""
    watch: tuple[str, ...] | None = None
    """Its arguments for a look a second, for ever: it starts but once, which for amd-smi takes half a second of CPU."""
    line_reader: Callable[[], LineReader] | None = None
    """For what that prints."""


def parse_amd_json(text: str) -> list[Reading]:
    """`amd-smi metric --json`."""
    document = _json_in(text)
    document = document.get("gpu_data", document) if isinstance(document, dict) else document
    if not isinstance(document, list) or not all(isinstance(gpu, dict) and "gpu" in gpu for gpu in document):
        raise ValueError(f"no list of GPUs: {text.strip()[:200]}")
    return [_of_amd_gpu(gpu) for gpu in document]


def _of_amd_gpu(gpu: Mapping[str, Any]) -> Reading:
    power, clock, temperature, memory, usage = (gpu.get(name) if isinstance(gpu.get(name), dict) else {} for name in ("power", "clock", "temperature", "mem_usage", "usage"))
    clocks = {name: _number(part.get("clk", part.get("cur_clk"))) if isinstance(part, dict) else _number(part) for name, part in clock.items()}
    return Reading(device=str(gpu["gpu"]), power_w=_first(power, "socket_power", "current_socket_power", "average_socket_power"),
                   gfx_clock_mhz=_mean([mhz for name, mhz in clocks.items() if name.startswith("gfx")]), mem_clock_mhz=_mean([mhz for name, mhz in clocks.items() if name.startswith("mem")]),
                   temperature_c=_first(temperature, "hotspot", "junction", "edge"), memory_used_bytes=_scaled(_first(memory, "used_vram"), MIB),
                   memory_total_bytes=_scaled(_first(memory, "total_vram"), MIB), busy_frac=_percent(_first(usage, "gfx_activity")))


def of_amd_fields(fields: Mapping[str, str]) -> Reading:
    """A line of `amd-smi metric --csv`."""
    if not fields["gpu"].isdigit():
        raise ValueError(f"{fields['gpu']!r} is no number of a GPU")
    clocks = {kind: _mean([_number(value) for name, value in fields.items() if re.fullmatch(rf"{kind}_\d+_clk", name)]) for kind in ("gfx", "mem")}
    return Reading(device=fields["gpu"], power_w=_first(fields, "socket_power", "current_socket_power", "average_socket_power"), gfx_clock_mhz=clocks["gfx"],
                   mem_clock_mhz=clocks["mem"], temperature_c=_first(fields, "hotspot", "junction", "edge"), memory_used_bytes=_scaled(_first(fields, "used_vram"), MIB),
                   memory_total_bytes=_scaled(_first(fields, "total_vram"), MIB), busy_frac=_percent(_first(fields, "gfx_activity")))


def parse_rocm_json(text: str) -> list[Reading]:
    """`rocm-smi --json` with power, clocks, temperature, memory and use."""
    document = _json_in(text)
    cards = {name: card for name, card in document.items() if re.fullmatch(r"card\d+", name) and isinstance(card, dict)} if isinstance(document, dict) else {}
    if not cards:
        raise ValueError(f"no card: {text.strip()[:200]}")
    return [Reading(device=name.removeprefix("card"), power_w=_first(card, "Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"),
                    gfx_clock_mhz=_first(card, "sclk clock speed:", "sclk clock speed"), mem_clock_mhz=_first(card, "mclk clock speed:", "mclk clock speed"),
                    temperature_c=_first(card, "Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
                    memory_used_bytes=_first(card, "VRAM Total Used Memory (B)"), memory_total_bytes=_first(card, "VRAM Total Memory (B)"),
                    busy_frac=_percent(_first(card, "GPU use (%)"))) for name, card in cards.items()]


NVIDIA_COLUMNS = ("index", "power.draw", "clocks.sm", "clocks.mem", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu")


def of_nvidia_fields(fields: Mapping[str, str]) -> Reading:
    """A line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    if not fields["index"].isdigit():
        raise ValueError(f"{fields['index']!r} is no number of a GPU")
    return Reading(device=fields["index"], power_w=_number(fields["power.draw"]), gfx_clock_mhz=_number(fields["clocks.sm"]), mem_clock_mhz=_number(fields["clocks.mem"]),
                   temperature_c=_number(fields["temperature.gpu"]), memory_used_bytes=_scaled(_number(fields["memory.used"]), MIB),
                   memory_total_bytes=_scaled(_number(fields["memory.total"]), MIB), busy_frac=_percent(_number(fields["utilization.gpu"])))


def nvidia_reader() -> LineReader:
    return LineReader(of_nvidia_fields, NVIDIA_COLUMNS)


def parse_nvidia_csv(text: str) -> list[Reading]:
    """All lines of one look."""
    reader = nvidia_reader()
    readings = [reading for line in text.splitlines() if (reading := reader.read(line)) is not None]
    if not readings:
        raise ValueError("no GPU")
    return readings


_NVIDIA_ARGUMENTS = (f"--query-gpu={','.join(NVIDIA_COLUMNS)}", "--format=csv,noheader,nounits")
_AMD_ARGUMENTS = ("metric", "-p", "-c", "-t", "-u", "-m")

TOOLS = (
    Tool("amd-smi", (*_AMD_ARGUMENTS, "--json"), parse_amd_json, (*_AMD_ARGUMENTS, "-w", "1", "--csv"), lambda: LineReader(of_amd_fields)),
    Tool("rocm-smi", ("--showpower", "--showclocks", "--showtemp", "--showmeminfo", "vram", "--showuse", "--json"), parse_rocm_json),
    Tool("nvidia-smi", _NVIDIA_ARGUMENTS, parse_nvidia_csv, (*_NVIDIA_ARGUMENTS, "-l", "1"), nvidia_reader),
)
"""In the order they are looked for: where amd-smi is, rocm-smi says the same."""


def find_tool() -> Tool | None:
    """The first tool that this machine has; None: it has none."""
    return next((tool for tool in TOOLS if shutil.which(tool.name) is not None), None)


def own_devices(environment: Mapping[str, str]) -> set[str] | None:
    """The numbers of the devices that a process of this environment sees; None: all, or they are not named by numbers."""
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if mask := environment.get(name):
            numbers = [part.strip() for part in mask.split(",")]
            return set(numbers) if all(number.isdigit() for number in numbers) else None
    return None


def _json_in(text: str) -> Any:
    """The JSON in a text; before it, amd-smi may warn, of a group that the user is not in, say."""
    start = min((place for bracket in "[{" if (place := text.find(bracket)) >= 0), default=0)
    return json.JSONDecoder().raw_decode(text[start:])[0]


def _number(value: Any) -> float | None:
    """The number of a value in any of the forms above; None for one that is below nothing, or no number: tools have such for what they do not know."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, str):
        found = re.match(r"\(?\s*(\d+(?:\.\d+)?)", value)
        return None if found is None else float(found.group(1))
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf else None


def _first(fields: Mapping[str, Any], *names: str) -> float | None:
    """The first of some fields that has a number."""
    return next((number for name in names if (number := _number(fields.get(name))) is not None), None)


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def _scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def _percent(number: float | None) -> float | None:
    return None if number is None else number / 100
