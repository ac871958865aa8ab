"""Every setting has an effect: each field of each section is read somewhere outside the experiment folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from raysd.experiment.experiment import Experiment
from raysd.experiment.section import PlacementMark, Section

PACKAGE = Path(__file__).parents[2] / "raysd"


def sections(kind: type[Section] = Section) -> list[type[Section]]:
    return [found for child in kind.__subclasses__() for found in (child, *sections(child))]


def reads(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def read_names() -> set[str]:
    """Attributes read outside experiment/, and those read inside by the public methods of a section that are used outside."""
    inside, outside = [], set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.parent.name == "experiment":
            inside += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        else:
            outside |= reads(tree)
    return outside.union(*(reads(method) for method in inside if method.name in outside))


READ = read_names()
FIELDS = [(section, name) for section in sections() for name in section.model_fields]


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=[f"{section.__name__}.{name}" for section, name in FIELDS])
def test_some_code_reads_the_field(section: type[Section], name: str):
    assert name in READ, f"{section.__name__}.{name} is accepted and nothing reads it"


@pytest.mark.parametrize(("section", "name"), FIELDS, ids=[f"{section.__name__}.{name}" for section, name in FIELDS])
def test_the_field_says_what_it_is(section: type[Section], name: str):
    field = section.model_fields[name]
    of_a_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section) or section is Experiment
    assert field.description or of_a_section, f"{section.__name__}.{name} has no docstring"


def test_fields_that_say_where_it_runs_are_marked():
    marked = {
        f"{section.__name__}.{name}"
        for section, name in FIELDS
        if any(isinstance(mark, PlacementMark) for mark in section.model_fields[name].metadata)
    }
    assert {
        "Experiment.store",
        "PromptsSection.path",
        "TargetSection.model",
        "TargetSection.revision",
        "StageResources.gpus",
    } <= marked
    assert {"TrainSection.lr", "SweepSection.k", "TargetSection.dtype", "TrainSection.threads"}.isdisjoint(marked)
    assert {name for name in marked if name.startswith("CaptureSection.")} == {"CaptureSection.queue_bytes"}, "how answers are batched changes their states"
