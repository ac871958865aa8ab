"""The rules of imports, read from the import statements: the order of folders, and where heavy libraries may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    "errors",
    "signals",
    "arguments",
    "hardware",
    "experiment",
    "artifacts",
    "target",
    "prompts",
    "hidden_states",
    "draft",
    "quantization",
    "load",
    "sweep",
    "report",
    "deployment",
    "checks",
    "pipeline",
    "backends",
    "cli",
)
TORCH_FOLDERS = {"target", "hidden_states", "draft", "quantization", "backends"}
EDGE_LIBRARIES = {"ray", "vllm", "quark", "boto3", "botocore"}
LIBRARY_FILES = sorted((ROOT / "raysd").rglob("*.py"))
JOB_FILES = sorted((ROOT / "jobs").glob("*.py"))


def imports_in(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Dotted module, whether it is imported inside a function, and the line, for every import statement of a file."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno} imports by a relative path"
                yield from (
                    (f"{child.module}.{alias.name}" if child.module == "raysd" else child.module, inside, child.lineno)
                    for alias in child.names
                )
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    return walk(ast.parse(path.read_text(encoding="utf-8")), False)


def place(path: Path) -> str:
    """The folder (or module) below raysd/ that a file belongs to."""
    return path.relative_to(ROOT / "raysd").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_up_the_list(path: Path):
    here = place(path)
    if here in ("__init__", "__main__"):
        return
    for module, _, line in imports_in(path):
        parts = module.split(".")
        if parts[0] == "raysd" and len(parts) > 1 and parts[1] != "__version__":
            assert parts[1] in ORDER, f"{path}:{line} imports {module}, which is in no folder of the list"
            assert ORDER.index(parts[1]) <= ORDER.index(here), f"{path}:{line} imports {module}, which comes after {here}"


@pytest.mark.parametrize("path", [*LIBRARY_FILES, *JOB_FILES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_heavy_libraries_stay_where_they_belong(path: Path):
    here = "jobs" if path in JOB_FILES else place(path)
    for module, inside, line in imports_in(path):
        library = module.split(".")[0]
        if library == "torch":
            assert here in TORCH_FOLDERS, f"{path}:{line} imports torch"
        if library in EDGE_LIBRARIES:
            assert here == "backends", f"{path}:{line} imports {library}"
        if module.startswith("raysd.backends") and here != "backends":
            assert here in ("cli", "jobs"), f"{path}:{line} imports backends"
            assert inside, f"{path}:{line} imports backends outside of a function"


def test_every_folder_of_the_list_is_there_and_no_other():
    folders = {path.name for path in (ROOT / "raysd").iterdir() if path.is_dir() and any(path.glob("*.py"))} - {"__pycache__"}
    assert folders <= set(ORDER)


def test_the_reader_of_imports_sees_what_it_must(tmp_path: Path):
    sample = tmp_path / "sample.py"
    sample.write_text("import torch\nfrom raysd import errors\ndef f():\n    from raysd.backends import stages\n    import ray.serve\n")
    assert [(module, inside) for module, inside, _ in imports_in(sample)] == [
        ("torch", False),
        ("raysd.errors", False),
        ("raysd.backends", True),
        ("ray.serve", True),
    ]
