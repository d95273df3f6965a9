"""Read what this process takes of the host's memory: now, and at its peak since a moment."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # of the resident set, as Linux takes it
KERNELS = 125 << 20  # of numba with its kernels, which the first step on a CPU loads
PROCESS = 260 << 20  # of Python with torch and Weft, where the system does not say
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the names that glibc's mallopt has for them
TRIM_BYTES, MMAP_BYTES = (1 << 31) - 1, 32 << 20  # the largest numbers that it takes
OWN_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def resident_bytes() -> int | None:
    """Bytes of this process in memory now; None where the system does not say."""
    return _status("VmRSS")


def base_bytes() -> int:
    """What a training on a CPU finds taken when it begins: Python, torch, Weft, and kernels that are yet to load."""
    now = resident_bytes() or PROCESS
    return now + (0 if "numba" in sys.modules else KERNELS)


@cache
def keep_heap() -> None:
    """From now on glibc keeps what is freed for the next step, instead of giving pages back that it then asks for.

    An epoch of four GINs of PyG on the pubmed shape took 338 ms instead of 499. Where the user has said how
    glibc should do it, nothing happens; nor elsewhere. It holds for the process: glibc does not say what it did before.
    """
    if any(name in os.environ for name in OWN_WORDS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(MMAP_THRESHOLD, MMAP_BYTES)


def give_back_heap() -> None:
    """Give memory that was freed back to the system, as glibc does not by itself; elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def watch_peak() -> bool:
    """Forget the peak so far; whether that was possible."""
    try:
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """The most since :func:`watch_peak`; None where the system does not say."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
