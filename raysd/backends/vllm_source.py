"""Names in the installed vLLM's source, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MODELS = ("model_executor/models/*.py", "models/*/*.py", "models/*/*/*.py")
"""Where vLLM has its models."""


def text_of(file: str) -> str | None:
    """A file of it; None: no vLLM is installed, or it has no such file."""
    folder = _folder()
    return None if folder is None or not (folder / file).is_file() else (folder / file).read_text(encoding="utf-8")


def class_fields(file: str, name: str) -> frozenset[str]:
    """The annotated fields of a class."""
    found = next(node for node in _parsed(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    return frozenset(node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))


def keys_of(file: str, name: str) -> frozenset[str]:
    """The keys of an annotated dictionary at the top of a file."""
    found = next(node.value for node in _parsed(file).body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name)
    assert isinstance(found, ast.Dict)
    return frozenset(key.value for key in found.keys if isinstance(key, ast.Constant))


def inherits(model: str, base: str) -> bool | None:
    """Whether a model's class, or one that it is made of, is made of `base`; None: vLLM has no such class among its models."""
    classes = list(_classes(model))
    return any(base in bases or any(inherits(each, base) for each in bases if each != model) for bases in classes) if classes else None


def _classes(name: str) -> Iterator[list[str]]:
    """The base classes of each class of a name among the models: for another platform there may be another one."""
    heading = re.compile(rf"^class {re.escape(name)}\b[^:]*:", re.MULTILINE)
    for text in _model_texts():
        for match in heading.finditer(text):
            node = ast.parse(match.group() + " ...").body[0]
            yield [base.id for base in node.bases if isinstance(base, ast.Name)]


@cache
def _model_texts() -> list[str]:
    folder = _folder()
    assert folder is not None, "asked only where vLLM is installed"
    return [path.read_text(encoding="utf-8") for pattern in MODELS for path in sorted(folder.glob(pattern))]


@cache
def _parsed(file: str) -> ast.Module:
    text = text_of(file)
    assert text is not None, "asked only where vLLM is installed"
    return ast.parse(text)


def _folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent
