"""Every check of `raysd doctor`: a pure function from facts to findings, with a code, a title and a source."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from raysd.checks.facts import Facts
from raysd.checks.findings import NOT_CHECKED, SEVERITIES, Finding
from raysd.checks.node_facts import NodeCase

Case = TypeVar("Case")


@dataclass(frozen=True)
class Check(Generic[Case]):
    """One known failure."""

    code: str
    title: str
    source: str
    find: Callable[[Case], Iterable[Finding]]

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "title": self.title, "source": self.source}


class Checks(Generic[Case]):
    """All checks that look at one kind of case."""

    def __init__(self, modules: Sequence[str]) -> None:
        """modules: of raysd/checks, those whose functions register themselves."""
        self._modules, self._checks = modules, {}

    def check(self, code: str, title: str, source: str) -> Callable[[Callable[[Case], Iterable[Finding]]], Callable[[Case], Iterable[Finding]]]:
        """Registers a function under a code. Findings without a code or a source have the check's; another code may only be `not-checked`."""

        def register(find: Callable[[Case], Iterable[Finding]]) -> Callable[[Case], Iterable[Finding]]:
            assert code not in self._checks, f"two checks are called {code}"
            self._checks[code] = Check(code, title, source, find)
            return find

        return register

    def all(self) -> list[Check[Case]]:
        """Every check, by subject."""
        for module in self._modules:
            importlib.import_module(f"raysd.checks.{module}")
        return list(self._checks.values())

    def examine(self, case: Case) -> list[Finding]:
        """What all checks find, errors first, each thing once."""
        found: dict[Finding, None] = {}
        for known in self.all():
            for finding in known.find(case):
                assert finding.code in ("", known.code, NOT_CHECKED), f"{known.code} found {finding.code}"
                found[replace(finding, code=finding.code or known.code, source=finding.source or known.source)] = None
        return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


OF_EXPERIMENTS: Checks[Facts] = Checks(("kv_cache", "gpu_memory", "tensor_parallel", "speculation", "quantized", "environment", "devices", "versions", "measuring"))
OF_NODES: Checks[NodeCase] = Checks(("nodes",))
check, node_check = OF_EXPERIMENTS.check, OF_NODES.check
examine, examine_node = OF_EXPERIMENTS.examine, OF_NODES.examine


def all_checks() -> list[Check[Facts] | Check[NodeCase]]:
    """Those of experiments, then those of nodes."""
    return [*OF_EXPERIMENTS.all(), *OF_NODES.all()]
