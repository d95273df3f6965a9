"""The host as the system reports it: cores, memory and cache."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 2**20
CPU_CACHE = 8 * MIB  # where the system does not say


def cpu_count() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def cpu_cache_bytes() -> int:
    """Bytes of the last cache before memory, as Linux reports them."""
    sizes = []
    for level in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = level.read_text(encoding="utf-8").strip()
        sizes.append(int(text[:-1]) * {"K": 1024, "M": MIB}.get(text[-1], 1) if text[-1:].isalpha() else int(text))
    return max(sizes, default=CPU_CACHE)
