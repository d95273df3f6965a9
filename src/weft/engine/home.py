"""The folder with what Weft keeps between runs: probes and calibrations of machines, captured steps, kernels.

``$WEFT_HOME``, else ``$XDG_CACHE_HOME/weft``, else ``~/.cache/weft``. Everything in it is a :class:`KeyedStore`:
``machines/NAME`` has probe.json and calibration.json, ``steps`` what dry runs captured, ``kernels`` which versions of
kernels lie in Triton's own cache.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.core.host_memory import cpu_count
from weft.core.keyed_store import KeyedStore, files_digest

HOME_VARIABLE = "WEFT_HOME"
STEPS, KERNELS = "steps", "kernels"
MAX_STEP_BYTES = 20 << 20  # about 20 KB per step
PROBE, CALIBRATION = "probe.json", "calibration.json"
COMPILE_SECONDS = 1.1  # of a version of a kernel that was never compiled here; H200 host, Triton 3.6


def home() -> Path:
    """The folder for what Weft keeps between runs; it need not exist."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "weft"


def machine_name(device: str) -> str:
    """The name of this host with ``device`` (``"cpu"``, or the name of its GPU) in the home folder."""
    return f"{platform.node() or 'this host'} {device}"


def machine_folder(name: str) -> Path:
    """The folder of the machine of that name."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return home() / "machines" / (words or "machine")


@cache
def code_digest() -> str:
    """Weft's source files by name, size and time, and torch's version: a change of either starts afresh."""
    return files_digest(Path(__file__).parents[1], (".py",), f"torch {version('torch')}")[:16]


def step_store() -> KeyedStore:
    """The steps that dry runs captured with this code."""
    return KeyedStore(home() / STEPS, code_digest(), MAX_STEP_BYTES)


# ---- Kernels: which versions are compiled on this machine, and still have their folder in Triton's cache.


def _kernel_key(arch: int | str) -> str:
    try:
        return f"sm{arch}-triton-{version('triton')}.json"
    except PackageNotFoundError:
        return f"sm{arch}-triton-none.json"


def missing_kernels(arch: int | str, digests: Iterable[str]) -> list[str]:
    """The versions that have to be compiled for GPUs of compute capability ``arch`` (90)."""
    folders: Mapping[str, str] = KeyedStore(home() / KERNELS, code_digest()).read(_kernel_key(arch), dict) or {}
    return [digest for digest in digests if not os.path.isdir(folders.get(digest, ""))]


def note_kernels(arch: int, folders: Mapping[str, str]) -> None:
    """Note versions that were compiled, with the folder of each in Triton's cache."""
    store, key = KeyedStore(home() / KERNELS, code_digest()), _kernel_key(arch)
    with store.lock(key):
        store.write(key, {**(store.read(key, dict) or {}), **folders})


def seconds_to_compile(digests: Iterable[str]) -> float:
    """Predicted time to compile the versions that this machine lacks, on all cores; no GPU is touched."""
    digests = list(digests)
    files = (home() / KERNELS).glob(_kernel_key("*"))
    archs = [file.name.partition("-")[0].removeprefix("sm") for file in files] or ["0"]
    fewest = min(len(missing_kernels(arch, digests)) for arch in archs)
    return COMPILE_SECONDS * -(-fewest // cpu_count())
