"""Check the documents: examples run, links and files exist, every package is explained.

Blocks marked ``python`` run one after another, in one namespace per document; blocks marked ``sh`` hold calls of
``weft``, run in this process. Blocks that cannot run here (set-up, GPUs) are marked ``console`` or ``text``.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from weft.cli.main import main

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "docs", "examples", "benchmarks", "benchmarks/results")
DOCUMENTS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
CODE = ("src", "tests", "benchmarks", "examples")
MODULES = {path.name for folder in CODE for path in (ROOT / folder).rglob("*.py")}
LANGUAGES = {"python", "sh", "console", "text", "toml", ""}


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a document in ``language``, in order."""
    return [code for kind, code in _fenced(path) if kind == language]


def _fenced(path: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def having(language: str) -> list:
    """The documents that have blocks in ``language``."""
    return [pytest.param(path, id=name) for path, name in zip(DOCUMENTS, IDS, strict=True) if blocks(path, language)]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", having("python"))
def test_python_examples_run(path, elsewhere):
    pytest.importorskip("torch_geometric")
    namespace: dict[str, object] = {"__name__": "example"}
    with torch.random.fork_rng():
        for code in blocks(path, "python"):
            exec(compile(code, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", having("sh"))
def test_shell_examples_run(path, elsewhere, monkeypatch, capsys):
    commands = [line for code in blocks(path, "sh") for line in code.replace("\\\n", " ").splitlines() if line]
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] == "weft", f"{command}: sh blocks hold calls of weft alone"
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as leaving:
            main()
        assert not leaving.value.code, (command, capsys.readouterr().err)


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_blocks_say_what_they_are(path):
    assert {kind for kind, _ in _fenced(path)} <= LANGUAGES


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_files_that_are_named_exist(path):
    """What looks like a path or a module of this repository is one; ``foo`` stands for a name to be chosen."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:src|weft|tests|docs|examples|benchmarks)/[\w./-]+)`", text):
        assert "foo" in name or (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.py)`", text):
        assert "foo" in name or name in MODULES, name


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_make_targets_that_are_named_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    called = re.findall(r"`make ([a-z-]+)[` ]", path.read_text(encoding="utf-8"))
    called += re.findall(r"^make ([a-z-]+)", "".join(blocks(path, "console")), flags=re.MULTILINE)
    assert set(called) <= targets


def test_every_package_is_explained():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "weft").glob("*/__init__.py")}
    assert set(re.findall(r"^### weft\.(\w+)$", text, flags=re.MULTILINE)) == packages


def test_every_example_is_listed():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").iterdir():
        if path.name not in ("README.md", "__pycache__"):
            assert f"`{path.name}`" in text, path.name


def test_the_changelog_knows_this_version():
    from weft import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
