"""The telling lines of a vLLM server's log: what went wrong, without prefixes, repetition and stack frames."""

from __future__ import annotations

import re

LINES = 12

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_TELLING = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b|\berror:|\bcritical\b|\bKilled\b|out of memory", re.IGNORECASE)
# Lines that only point at another one.
_POINTERS = re.compile(r"[Ss]ee (?:root cause|stack trace|above)|^raise |^During handling|^Traceback|failed to start|^For further information|^\[type=")


def telling_lines(log: str) -> list[str]:
    """The last lines that name an error, each once, at most 12; without any, the last five lines that say something."""
    prefixes = [(_PREFIX.match(line), line) for line in log.splitlines()]
    levels_and_lines = [(prefix["level"], line[prefix.end():].strip()) for prefix, line in prefixes]
    errors = [line for level, line in levels_and_lines
              if level not in ("INFO", "WARNING", "DEBUG") and _TELLING.search(line) and not _POINTERS.search(line)]
    chosen = errors or [line for _, line in levels_and_lines if line][-5:]
    newest_first = dict.fromkeys(reversed(chosen))
    return [line if len(line) <= 300 else line[:297] + "..." for line in list(newest_first)[:LINES]][::-1]
