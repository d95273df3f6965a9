"""Collect the example modules of a folder, so that a file that is added joins them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def classes_of(package: ModuleType, base: type) -> list[Any]:
    """The classes of every file of ``package`` that are ``base``, or made of it, and were written there."""
    files = [import_module(f"{package.__name__}.{found.name}") for found in iter_modules(package.__path__)]
    every = [(file, one) for file in files for one in vars(file).values() if isinstance(one, type)]
    return [one for file, one in every if issubclass(one, base) and one.__module__ == file.__name__]
