"""Start fast: import names on first use, pause garbage collection, begin work in threads."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

MOST_SECONDS = 1.0  # to wait for a collection of another thread, which may itself wait for this one
INTERPRETERS_OWN = 10_000  # objects: Python 3.12 begins with some hundred that are frozen


class _Collector:
    """Python's garbage collector, of which a process has one: threads pause it at the same time, and in each other.

    ``pauses`` under way, whether it was ``enabled`` before the first, the ``thread`` that collects, and whether objects
    were ``frozen`` here: counting those takes 20 to 40 ms.
    """

    lock = threading.Lock()
    pauses = 0
    enabled = True
    thread = 0
    frozen = False


def _note(phase: str, info: dict[str, Any]) -> None:
    _Collector.thread = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_note)


@contextmanager
def no_collections() -> Iterator[None]:
    """No thread collects garbage inside, whatever pauses of other threads begin or end meanwhile.

    A collection in another thread (which lets others run when it calls finalizers) is waited for.
    """
    with _Collector.lock:
        if not _Collector.pauses:
            _Collector.enabled = gc.isenabled()
        _Collector.pauses += 1
        gc.disable()
    try:
        until = time.monotonic() + MOST_SECONDS
        while _Collector.thread not in (0, threading.get_ident()) and time.monotonic() < until:
            time.sleep(0.0005)
        yield
    finally:
        with _Collector.lock:
            _Collector.pauses -= 1
            if not _Collector.pauses and _Collector.enabled:
                gc.enable()


def collects() -> bool:
    """Whether garbage is collected outside of pauses."""
    with _Collector.lock:
        return _Collector.enabled if _Collector.pauses else gc.isenabled()


def let_collect(enabled: bool) -> None:
    """Turn garbage collection on or off; pauses that are under way end first."""
    with _Collector.lock:
        _Collector.enabled = enabled
        if not _Collector.pauses:
            (gc.enable if enabled else gc.disable)()


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of ``package``: ``names`` has the public names of every module.

    A public name stays what it is, whichever module of that name is imported. Type checkers read the package's own
    imports, in which a name that is imported ``as`` itself is public.
    """
    modules = {name: module for module, listed in names.items() for name in listed}

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            return import_module, (package,)  # pickles of functions that name the package go to other processes

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with gc_paused():
            value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    sys.modules[package].__class__ = Package
    return find, lambda: sorted({*vars(sys.modules[package]), *modules}), list(modules)


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected inside, and what was made inside counts as old afterwards.

    Imports and kernels make objects that stay; torch alone has half a million, and every collection of young objects
    would look through them first: a run of 1.4 s of CPU time took 0.5 s longer. If torch is imported inside, what there
    is then is left out of collections for good: Python would look through it once more at the end of the process, which
    takes half a second.
    """
    without_torch = "torch" not in sys.modules
    if without_torch:
        gc.collect()  # there is little yet; what is garbage now must not be kept
    with no_collections():
        try:
            yield
        finally:
            if without_torch and "torch" in sys.modules:
                gc.freeze()
                _Collector.frozen = True
            elif not _Collector.frozen and gc.get_freeze_count() <= INTERPRETERS_OWN:  # what others froze stays frozen
                gc.freeze()
                gc.unfreeze()  # to the oldest generation: 0.1 s of the first run of a process that had torch


def leave_out_of_collections() -> None:
    """Leave all objects that there are by now out of Python's garbage collections for good.

    Torch alone has a quarter of a million. A process that collects again and again, such as a worker that must hold no
    memory of a GPU between two groups, would look through all of them each time: 0.1 to 0.2 s.
    """
    gc.collect()
    gc.freeze()
    _Collector.frozen = True


def collect_everything() -> None:
    """Collect garbage among all objects, those that were left out included, which are then left out again."""
    gc.unfreeze()
    leave_out_of_collections()


def start_in_background(work: Callable[[], object], name: str) -> threading.Thread:
    """Call ``work`` in a thread called ``name``; an error is left to the code that needs what it makes.

    It pays for work that waits outside of Python. Two threads that both run Python only take it from each other: a
    thread that imported at the same time made a hundred short calls wait five milliseconds each.
    """

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
