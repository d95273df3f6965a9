"""KernelStore: which versions of kernels are compiled on this machine, and how long each took.

A table under ``$WEFT_HOME/kernels``, one per kind of GPU and version of Triton, of this code. It is a list of what lies
in Triton's own cache: a version whose folder there is gone counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from weft.core.files import locked, write_text
from weft.engine.home import home
from weft.engine.machine import cpu_count

# ---- Tell whether Weft's code or torch has changed since something was kept.


@cache
def code_digest() -> str:
    """Weft's source files by name, size and time, and torch's version: a change of either starts afresh."""
    root = Path(__file__).parents[1]
    found = [f"torch {torch.__version__}"]
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(name for name in names if name.endswith(".py")):
            status = os.stat(os.path.join(folder, name))
            found.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


FOLDER = "kernels"
SECONDS_EACH = 1.1  # to compile a version that was never compiled here; H200 host, Triton 3.6


class KernelStore:
    """The table for GPUs of compute capability ``arch`` (90)."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._path = home() / FOLDER / f"sm{arch}-triton-{_triton_version()}.json"
        self._known: Mapping[str, tuple[str, float]] = self._read()

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those that have to be compiled."""
        return [digest for digest in digests if not self._is_there(digest)]

    def seconds(self, digests: Sequence[str], processes: int) -> float:
        """What it will take to compile the missing ones, on so many cores."""
        missing = self.missing(digests)
        return SECONDS_EACH * -(-len(missing) // max(processes, 1))

    def add(self, found: Mapping[str, tuple[str, float]]) -> None:
        """Note versions that were compiled, by digest: the folder that has each, and the seconds it took."""
        with locked(self._path):
            self._known = {**self._read(), **found}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({"code": code_digest(), "kernels": self._known}))

    def _is_there(self, digest: str) -> bool:
        return digest in self._known and os.path.isdir(self._known[digest][0])

    def _read(self) -> dict[str, tuple[str, float]]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            found = {key: (str(folder), float(took)) for key, (folder, took) in data["kernels"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return found if data["code"] == code_digest() else {}


def seconds_to_compile(digests: Iterable[str]) -> float:
    """What compiling takes on this machine, of the versions that it lacks; no GPU is touched to find that out."""
    stores = sorted((home() / FOLDER).glob(f"sm*-triton-{_triton_version()}.json"))
    known = [KernelStore(int(path.name.partition("-")[0].removeprefix("sm"))) for path in stores] or [KernelStore(0)]
    wanted = list(digests)
    return min(store.seconds(wanted, cpu_count()) for store in known)


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def triton_folder() -> Path:
    """Where the digest of Triton's files is kept."""
    return home() / FOLDER
