"""Import what ``"package.module:name"`` or ``"path/file.py:name"`` points to."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from weft.core.errors import SpecError
from weft.core.lazy.changed_modules import STAMP, import_current
from weft.core.task import Task


def import_callable(task: Task) -> Callable[..., nn.Module]:
    """The model of ``task``, where it names one."""
    found: Callable[..., nn.Module] = import_from(task.label, "model", task.model)
    return found


def import_from(label: str, setting: str, reference: str) -> Callable[..., Any]:
    """What ``"package.module:name"`` or ``"path/file.py:name"``, the value of ``setting``, points to."""
    place, _, name = reference.rpartition(":")
    where = f"task {label!r}: {setting}={reference!r}"
    if not place or not name:
        raise SpecError(f'{where} must be "module:callable" or "file.py:callable" with both parts')
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else import_current(place)
    except Exception as error:
        raise SpecError(f"{where}: {in_words(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise SpecError(f"{where}: {place} has no callable {name!r}")
    return found  # type: ignore[no-any-return]


def in_words(error: Exception, *own: str) -> str:
    """An error in a user's code in words, with the line; ``own``: files of Weft to skip."""
    if isinstance(error, (ImportError, FileNotFoundError)):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    known = last.filename in (__file__, *own) or isinstance(error, SyntaxError)
    place = "" if known else f" (line {last.lineno} of {last.filename})"
    return f"{type(error).__name__}: {error}{place}"


def _load_file(path: Path) -> Any:
    """The module of a file; one that was loaded before is loaded again if the file has changed since."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name, stamp = _module_name(path), _stamp(path)
    known = sys.modules.get(name)
    if known is not None and getattr(known, STAMP, None) == stamp:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes defined there can be copied and pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    setattr(module, STAMP, stamp)
    return module


def _module_name(path: Path) -> str:
    """A name of its own for every file: two users' ``net.py`` are two modules, and a ``numpy.py`` is not NumPy."""
    place = str(path.resolve())
    return f"weft_file_{hashlib.sha256(place.encode()).hexdigest()[:16]}_{path.stem}"


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
