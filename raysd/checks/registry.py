"""Every check of `raysd doctor`: a pure function from facts to findings, with a code, a title and a source."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from raysd.checks.facts import Facts
from raysd.checks.findings import NOT_CHECKED, SEVERITIES, Finding

MODULES = ("kv_cache", "gpu_memory", "tensor_parallel", "speculation", "environment")
"""Of raysd/checks, those whose functions register themselves."""

Find = Callable[[Facts], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One known failure."""

    code: str
    title: str
    source: str
    find: Find

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "title": self.title, "source": self.source}


_checks: dict[str, Check] = {}


def check(code: str, title: str, source: str) -> Callable[[Find], Find]:
    """Registers a function under a code. Findings without a code or a source have the check's; another code may only be `not-checked`."""

    def register(find: Find) -> Find:
        assert code not in _checks, f"two checks are called {code}"
        _checks[code] = Check(code, title, source, find)
        return find

    return register


@cache
def all_checks() -> list[Check]:
    """Every check, by subject."""
    for module in MODULES:
        importlib.import_module(f"raysd.checks.{module}")
    return list(_checks.values())


def examine(facts: Facts) -> list[Finding]:
    """What all checks find, errors first, each thing once."""
    found: dict[Finding, None] = {}
    for known in all_checks():
        for finding in known.find(facts):
            assert finding.code in ("", known.code, NOT_CHECKED), f"{known.code} found {finding.code}"
            found[replace(finding, code=finding.code or known.code, source=finding.source or known.source)] = None
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
