"""Import the public names of a package when they are first used: a run loads only what it needs."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, TypeVar

# ---- Python's garbage collector, of which a process has one: threads pause it at the same time, and inside each
# other.

MOST_SECONDS = 1.0  # to wait for a collection of another thread, which may itself wait for this one


class _Pauses:
    """How many pauses are under way, whether there were collections before the first, and which thread collects."""

    lock = threading.Lock()
    count = 0
    collected = True
    collector = 0


def _note(phase: str, info: dict[str, Any]) -> None:
    _Pauses.collector = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_note)


@contextmanager
def no_collections() -> Iterator[None]:
    """No thread collects garbage inside, whatever pauses of other threads begin or end meanwhile.

    A collection that another thread is at (it lets others run where it calls finalizers) is waited for.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.collected = gc.isenabled()
        _Pauses.count += 1
        gc.disable()
    try:
        _wait_for_others()
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.collected:
                gc.enable()


def _wait_for_others() -> None:
    until = time.monotonic() + MOST_SECONDS
    while _Pauses.collector not in (0, threading.get_ident()) and time.monotonic() < until:
        time.sleep(0.0005)


def collects() -> bool:
    """Whether garbage is collected, but for pauses."""
    with _Pauses.lock:
        return _Pauses.collected if _Pauses.count else gc.isenabled()


def let_collect(wanted: bool) -> None:
    """Collect garbage from now on, or do not; pauses that are under way end first."""
    with _Pauses.lock:
        _Pauses.collected = wanted
        if not _Pauses.count:
            (gc.enable if wanted else gc.disable)()


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


# ---- Begin what takes a while beside other work, such as a device that starts while modules are imported.


def beside(work: Callable[[], object], name: str) -> threading.Thread:
    """Call ``work`` in a thread called ``name``; an error is left to whoever needs what it makes.

    It pays for work that waits outside of Python. Two threads that both run Python only take it from each other: a
    thread that imported beside this one made a hundred short calls wait five milliseconds each.
    """

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


# ---- MadeAhead: things that were made before they are needed, up to a number of bytes.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class MadeAhead(Generic[K, V]):
    """Things by key; beyond ``most_bytes``, as ``size_of`` counts them, the oldest are let go.

    One thread fills it while another reads.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[V], int]) -> None:
        self._most, self._size_of, self._lock = most_bytes, size_of, threading.Lock()
        self._made: dict[K, V] = {}
        self._used: set[K] = set()

    @property
    def bytes(self) -> int:
        """What all that is here takes."""
        return sum(map(self._size_of, list(self._made.values())))

    def has(self, key: K) -> bool:
        """Whether such a thing is here."""
        return key in self._made

    def put(self, key: K, made: V) -> None:
        """Keep ``made``."""
        with self._lock:
            self._made[key] = made
            while self.bytes > self._most:
                self._made.pop(next(iter(self._made)))

    def find(self, key: K) -> V | None:
        """The thing, which stays here; None if it was not made."""
        with self._lock:
            if key in self._made:
                self._used.add(key)
            return self._made.get(key)

    def clear(self) -> None:
        """Let everything go."""
        with self._lock:
            self._made.clear()
            self._used.clear()

    def drop_used(self) -> None:
        """Let those go that were found."""
        with self._lock:
            for key in self._used:
                self._made.pop(key, None)
            self._used.clear()
