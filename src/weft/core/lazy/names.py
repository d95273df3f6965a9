"""Import the public names of a package when they are first used: a run loads only what it needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from weft.core.lazy.collector import no_collections

INTERPRETERS_OWN = 10_000  # objects: Python 3.12 begins with some hundred that are frozen


def lazy_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``: ``places`` has the module of every public name.

    A public name stays what it is, whichever module of that name is imported.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in places and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with gc_paused():
            found = getattr(import_module(places[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    sys.modules[package].__class__ = Package
    return find, lambda: sorted({*vars(sys.modules[package]), *places})


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected inside, and what was made inside counts as old afterwards.

    Imports and kernels make objects that stay; torch alone has half a million, and every collection of young objects
    would look through them first. If torch is imported inside, what there is then is left out of collections for good:
    Python would look through it once more at the end of the process, which takes half a second.
    """
    without_torch = "torch" not in sys.modules
    if without_torch:
        gc.collect()  # there is little yet; what is garbage now must not be kept
    with no_collections():
        try:
            yield
        finally:
            if without_torch and "torch" in sys.modules:
                _freeze()
            elif not _Collector.frozen and gc.get_freeze_count() <= INTERPRETERS_OWN:  # what somebody froze stays so
                gc.freeze()
                gc.unfreeze()  # to the oldest generation


def leave_out_of_collections() -> None:
    """Leave all objects that there are by now out of Python's garbage collections for good.

    Torch alone has a quarter of a million. A process that collects again and again, such as a worker that is to hold no
    memory of a GPU between two groups, would look through all of them each time: 0.1 to 0.2 s.
    """
    gc.collect()
    _freeze()


def collect_everything() -> None:
    """Collect garbage among all objects, those that were left out included, which are then left out again."""
    gc.unfreeze()
    leave_out_of_collections()


class _Collector:
    """What Python's collector was told here, of which a process has one: counting what is frozen takes 20 to 40 ms."""

    frozen = False


def _freeze() -> None:
    gc.freeze()
    _Collector.frozen = True
