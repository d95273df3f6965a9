"""The architecture as a test: imports point down, the brain knows no torch, extras are imported late."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "weft"

# What each layer may import of Weft, besides itself.
BELOW = {
    "core": set(),
    "planner": {"core"},
    "sched": {"planner", "core"},
    "ops": {"core"},
    "graph": {"ops", "core"},
    "nn": {"graph", "ops", "core"},
    "capture": {"nn", "graph", "ops", "core"},
    "flow": {"nn", "graph", "ops", "core"},
    "runtime": {"capture", "flow", "nn", "graph", "ops", "core"},
    "weave": {"runtime", "capture", "flow", "nn", "graph", "ops", "core"},
    "engine": {"weave", "runtime", "capture", "flow", "sched", "planner", "nn", "graph", "ops", "core"},
    "serve": {"engine", "weave", "runtime", "capture", "flow", "sched", "planner", "nn", "graph", "ops", "core"},
    "cli": {"serve", "engine", "weave", "runtime", "capture", "flow", "sched", "planner", "nn", "graph", "ops", "core"},
}
BRAIN = ("core", "planner", "sched")
REQUIRED = {"torch", "numpy", "numba", "llvmlite", "safetensors", "rich", "typer"}  # llvmlite is numba's

FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """Every module that ``path`` imports, also inside functions, as a full dotted name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _top_level(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(node, path)


def _from(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    module = node.module or ""
    if node.level:
        package = ["weft", *path.relative_to(PACKAGE).parent.parts]
        module = ".".join(package[: len(package) - node.level + 1] + ([module] if module else []))
    if module == "weft":
        yield from (f"weft.{alias.name}" for alias in node.names)
    else:
        yield module


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run on import: not those of functions, nor those for type checkers alone."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def test_the_layers_are_the_ones_described():
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == set(BELOW)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_down(path):
    layer = layer_of(path)
    if not layer:
        return
    for name in imports(path):
        if name.split(".")[0] == "weft":
            target = ([*name.split("."), ""])[1]
            assert target == layer or target in BELOW[layer], f"{layer} must not import {name}"


@pytest.mark.parametrize("layer", BRAIN)
def test_the_brain_needs_the_standard_library_alone(layer):
    for path in (PACKAGE / layer).rglob("*.py"):
        for name in imports(path):
            root = name.split(".")[0]
            assert root == "weft" or root in sys.stdlib_module_names, f"{path.name} imports {name}"


STANDS_IN = PACKAGE / "ops" / "launch" / "triton_lang.py"  # uses Triton if installed
HTTP_APP = PACKAGE / "serve" / "app.py"  # imported late, by `weft serve` alone


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_extras_are_imported_where_they_are_used(path):
    for name in imports(path, top_level_only=True):
        root = name.split(".")[0]
        if path == STANDS_IN and root == "triton":
            continue
        if path == HTTP_APP and root in ("fastapi", "starlette"):
            continue
        assert root == "weft" or root in REQUIRED or root in sys.stdlib_module_names, f"{name} at import"


def test_nothing_imports_the_http_app_at_its_own_import():
    for path in FILES:
        assert "weft.serve.app" not in imports(path, top_level_only=True), path.name
