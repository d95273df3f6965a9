"""Memory of the host, or of the container this runs in, as Linux reports it."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


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
    return min(free, _free_in_container())


def _free_in_container() -> int:
    total = host_bytes()
    try:
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
        cache = (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        given_back = sum(int(line.split()[1]) for line in cache if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return total
    return max(total - used + given_back, 0)
