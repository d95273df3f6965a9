"""Cores and memory of the host, or of the container this runs in, as Linux reports them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_count() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def host_bytes() -> int:
    """Memory of the host, or of the container this runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return total
    return min(limit, total)


def free_host_bytes() -> int:
    """Memory of the host, or of the container this runs in, that could be had now."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        free = 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        free = host_bytes()
    try:  # a container's limit less what it uses; pages of files can be reclaimed
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
        cache = (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        reclaimable = sum(int(line.split()[1]) for line in cache if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return min(free, host_bytes())
    return min(free, max(host_bytes() - used + reclaimable, 0))


# ---- Huge pages: pages of 2 MiB instead of 4 KiB for a large array.
#
# Rows of features and lists of neighbours are read at random: with small pages nearly every row misses the cache of
# address translations. Batches of products' shape took a thread 57 ms instead of 79 ms to sample and gather (2.4 M rows
# of 400 bytes, AMD EPYC). Systems without huge pages, or with them everywhere, ignore the advice.

PAGE = 1 << 21
MADV_HUGEPAGE = 14  # of Linux


def advise_huge_pages(address: int, size: int) -> bool:
    """Before an array of ``size`` bytes at ``address`` is first written to; returns whether the system took it."""
    begin, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    if end <= begin or not sys.platform.startswith("linux"):
        return False
    advise = ctypes.CDLL(None).madvise
    return int(advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(MADV_HUGEPAGE))) == 0
