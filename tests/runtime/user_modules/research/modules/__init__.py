"""Modules as papers have them, one file per topic.

``ALL`` has those of every file here; a file that is added joins them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from torch import nn

from tests.runtime.user_modules.research.modules.layers import Standard

FILES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
ALL = [
    one
    for file in FILES
    for one in vars(file).values()
    if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == file.__name__ and one is not Standard
]
