"""Modules that keep something between calls, in every way that a researcher may write: one file per kind of state.

``ALL`` has those of every file here; a file that is added joins them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.runtime.user_modules.odd_modules import Base

FILES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
ALL = [
    one
    for file in FILES
    for one in vars(file).values()
    if isinstance(one, type) and issubclass(one, Base) and one.__module__ == file.__name__
]
