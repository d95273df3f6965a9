"""Installed distributions with entry points, as small as they can be: a module and its metadata in a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, monkeypatch, name: str, code: str, **groups: Mapping[str, str]) -> None:
    """Make the distribution ``name`` with the module ``name`` importable, with entry points in ``weft.GROUP``.

    ``groups``: by group, names with the attribute of the module that each stands for.
    """
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (f"[weft.{group}]\n" + "".join(f"{key} = {name}:{value}\n" for key, value in entries.items())
                for group, entries in groups.items())  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(sections))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, name, None)  # what is imported by this name goes with the test
    del sys.modules[name]
