"""Huge pages: ask the system to back a large array with pages of 2 MiB instead of 4 KiB.

Rows of features and lists of neighbours are read in random places: with small pages nearly every row misses the cache
of address translations. Batches of products' shape took a thread 57 ms instead of 79 ms to sample and gather (2.4
million rows of 400 bytes, AMD EPYC). Systems that have none, or give them to everybody, ignore the advice.
"""

from __future__ import annotations

import ctypes
import sys

PAGE = 1 << 21
MADV_HUGEPAGE = 14  # of Linux


def advise_huge_pages(address: int, size: int) -> bool:
    """Before an array of ``size`` bytes at ``address`` is first written to; returns whether the system took it."""
    begin, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    if end <= begin or not sys.platform.startswith("linux"):
        return False
    advise = ctypes.CDLL(None).madvise
    return int(advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(MADV_HUGEPAGE))) == 0
