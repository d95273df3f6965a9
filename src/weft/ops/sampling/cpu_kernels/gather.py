"""Gather rows of a table on the CPU, prefetching those that come next; and find those that a cache does not have."""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import int32s, kernel, pointer, uint8s
from weft.ops.sampling.cpu_kernels.intrinsics import copy_bytes, prefetch

AHEAD = 16  # rows that are prefetched before they are needed


@kernel
def gather_share(out, table, row_bytes, table_step, ids, like, num_ids, share, shares):
    """Copy the rows ``ids`` of a table; prefetches the rows that come next."""
    ids = pointer(ids, like)
    stop = num_ids * (share + 1) // shares
    for place in range(num_ids * share // shares, stop):
        if place + AHEAD < stop:
            ahead = int32s(table + np.int64(ids[place + AHEAD]) * table_step)
            for line in range(0, row_bytes, 64):
                prefetch(ahead, line // 4)
        copy_bytes(out + place * row_bytes, table + np.int64(ids[place]) * table_step, row_bytes)


@kernel
def absent(ids, num_ids, held, places, found):
    """Places and ids of those of ``ids`` that ``held`` has a zero for; returns how many."""
    ids, held, places, found = int32s(ids), uint8s(held), int32s(places), int32s(found)
    count = np.int64(0)
    for place in range(num_ids):
        if place + AHEAD < num_ids:
            prefetch(held, np.int64(ids[place + AHEAD]))
        places[count], found[count] = place, ids[place]
        count += held[ids[place]] == 0
    return count
