"""The architecture as a test: imports point down, planner and scheduler import no torch, extras are imported late."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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
    "dist": {"nn", "graph", "ops", "core"},
}
BELOW["batches"] = {"dist", "capture", *BELOW["dist"]}
BELOW["runtime"] = {"batches", *BELOW["batches"]}
BELOW["weave"] = {"runtime", *BELOW["runtime"]}
BELOW["engine"] = {"weave", "sched", "planner", *BELOW["weave"]}
BELOW["cluster"] = {"engine", *BELOW["engine"]}
BELOW["serve"] = {"cluster", *BELOW["cluster"]}
BELOW["cli"] = {"serve", *BELOW["serve"]}
BRAIN = ("core", "planner", "sched")
REQUIRED = {"torch", "numpy", "numba", "llvmlite", "safetensors", "rich", "typer"}  # llvmlite is numba's

FILES = sorted(PACKAGE.rglob("*.py"))


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


def test_imports_point_down():
    for path in FILES:
        layer = layer_of(path)
        for name in imports(path) if layer else ():
            if name.split(".")[0] == "weft":
                target = ([*name.split("."), ""])[1]
                assert target == layer or target in BELOW[layer], f"{path}: {layer} must not import {name}"


def test_the_brain_needs_the_standard_library_alone():
    for layer in BRAIN:
        for path in (PACKAGE / layer).rglob("*.py"):
            for name in imports(path):
                root = name.split(".")[0]
                assert root == "weft" or root in sys.stdlib_module_names, f"{path} imports {name}"


# Modules that are imported late and may import their extra at once: Triton if it is installed, FastAPI by `weft serve`
# alone, PyG for modules with layers of PyG alone.
IMPORTED_LATE = {
    "ops/launch/triton_lang.py": ("triton",),
    "serve/app.py": ("fastapi", "starlette", "uvicorn"),
    "nn/pyg/swapped_layers.py": ("torch_geometric",),
}


def test_extras_are_imported_where_they_are_used():
    for path in FILES:
        extras = IMPORTED_LATE.get(path.relative_to(PACKAGE).as_posix(), ())
        for name in imports(path, top_level_only=True):
            root = name.split(".")[0]
            allowed = root == "weft" or root in REQUIRED or root in sys.stdlib_module_names or root in extras
            assert allowed, f"{path} imports {name} at its own import"


# ---- folders, sub-packages with them -----------------------------------------------------------------------

WEAVERS = ("weave/", "engine/estimator.py")  # who may import weft.weave
MODULES = {".".join(["weft", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in FILES}
MODULES |= {name.removesuffix(".__init__"): path for name, path in MODULES.items() if name.endswith(".__init__")}


def modules_imported(path: Path, top_level_only: bool = True) -> Iterator[str]:
    """The modules of Weft that ``path`` imports; ``from package import module`` is the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _top_level(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            for base in _from(node, path):
                whole = [base, *(f"{base}.{alias.name}" for alias in node.names)]
                yield from (name for name in whole[1:] or whole if name in MODULES)
                if base in MODULES and not any(name in MODULES for name in whole[1:]):
                    yield base


def check_acyclic(edges: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError("imports go in a circle: " + " <- ".join(error.args[1])) from None


def test_modules_import_each_other_one_way():
    by_path = {path: str(path.relative_to(PACKAGE)) for path in FILES}
    edges = {by_path[path]: {by_path[MODULES[name]] for name in modules_imported(path)} for path in FILES}
    check_acyclic({name: {other for other in used if other != name} for name, used in edges.items()})


def test_folders_import_each_other_one_way():
    """Imports inside functions too. A package's ``__init__`` may name what is in the folders below it."""
    edges: dict[str, set[str]] = {}
    for path in FILES:
        used = {MODULES[name].parent for name in modules_imported(path, top_level_only=False)} - {path.parent}
        if path.name == "__init__.py":
            used = {folder for folder in used if path.parent not in folder.parents}
        folders = {str(folder.relative_to(PACKAGE)) for folder in used}
        edges.setdefault(str(path.parent.relative_to(PACKAGE)), set()).update(folders)
    check_acyclic(edges)


def test_weaving_is_imported_on_request_alone():
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(WEAVERS):
            woven = [used for used in modules_imported(path, top_level_only=False) if used.startswith("weft.weave")]
            assert not woven, f"{name} imports {woven[0]}; weft.engine.estimator.merger_for does that for woven plans"


def test_a_default_run_imports_nothing_of_weaving(tmp_path):
    code = (
        "import sys, weft\n"
        "weft.run(weft.Sweep('demo', model=['gcn', 'gat'], hidden=8, epochs=2), device='cpu', progress=False)\n"
        "print([name for name in sys.modules if name.startswith('weft.weave')])"
    )
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "WEFT_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_nothing_imports_the_http_app_at_its_own_import():
    for path in FILES:
        assert "weft.serve.app" not in imports(path, top_level_only=True), path.name
