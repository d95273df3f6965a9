"""Modules of a user's package that were imported before and edited since: they are imported again.

A process that trains for many (a worker of a queue, a notebook) would otherwise train what a file said when the first
task named it. Installed packages are left alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from types import ModuleType
from typing import Any

STAMP = "__weft_stamp__"  # of a module: when its file was written, and how long it is


def import_current(name: str) -> ModuleType:
    """The module ``name`` as its files are now: if one of its package has changed, all of the package is imported."""
    loaded = own_modules(name)
    if any(getattr(module, STAMP, None) not in (None, _stamp(module)) for module in loaded.values()):
        for one in loaded:
            del sys.modules[one]
        importlib.invalidate_caches()
    found = importlib.import_module(name)
    for module in own_modules(name).values():
        if getattr(module, STAMP, None) is None:
            setattr(module, STAMP, _stamp(module))
    return found


def own_modules(name: str) -> dict[str, ModuleType]:
    """The modules that were imported of the package of ``name``; none of one that is installed, or Weft's own."""
    top = name.partition(".")[0]
    package = sys.modules.get(top)
    if top == "weft" or (getattr(package, "__file__", None) and not _is_own(package)):
        return {}  # whatever files an installed one writes elsewhere: torch has kernels in a folder for temporary files
    found = {one: module for one, module in list(sys.modules.items()) if one == top or one.startswith(f"{top}.")}
    return {one: module for one, module in found.items() if _is_own(module)}


def files_of(name: str) -> list[str]:
    """The files of the modules that were imported of the package of ``name``."""
    return [str(module.__file__) for module in own_modules(name).values()]


def _is_own(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py") or not os.path.isabs(path):
        return False
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(place and path.startswith(place + os.sep) for place in installed)


def _stamp(module: Any) -> tuple[int, int] | None:
    try:
        found = os.stat(module.__file__)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
