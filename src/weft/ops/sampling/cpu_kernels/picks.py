"""Pick the neighbours of rows: different ones, repeated ones, or by weight; as positions of edges.

Shapes: K fan-out.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import part, shift
from weft.ops.random.numba_bits import splitmix
from weft.ops.sampling.cpu_kernels.draws import draw_below, draw_exponential, node_stream
from weft.ops.sampling.cpu_kernels.intrinsics import float64s_of, prefetch

SCAN_LIMIT = 48  # fan-out up to which comparing with every earlier pick is faster than a hash set
EMPTY = np.int32(-1)


@part
def _seen_by_scan(picks, count, value):
    """Whether ``value`` is among the first ``count`` picks."""
    found = False
    for i in range(count):
        found |= picks[i] == value
    return found


@part
def _insert(slots, mask, value):
    """Add a value to a hash set; False if it was there."""
    place = np.int64(splitmix(np.uint64(value)) & np.uint64(mask))
    while slots[place] != EMPTY:
        if slots[place] == value:
            return False
        place = (place + 1) & mask
    slots[place] = np.int32(value)
    return True


@part
def floyd(picks, degree, fanout, stream, scratch, mask):
    """``fanout`` different offsets below ``degree``, every subset equally likely."""
    if fanout > SCAN_LIMIT:
        for i in range(mask + 1):
            scratch[i] = EMPTY
    for slot in range(fanout):
        last = degree - fanout + slot
        value = draw_below(stream, slot, last + 1)
        if fanout <= SCAN_LIMIT:
            if _seen_by_scan(picks, slot, value):
                value = last
        elif not _insert(scratch, mask, value):
            value = last
            _insert(scratch, mask, value)
        picks[slot] = value


@part
def _after(keys, offsets, i, j):
    """Whether heap entry i comes after entry j: by key, then by offset."""
    return keys[i] > keys[j] or (keys[i] == keys[j] and offsets[i] > offsets[j])


@part
def _swap(keys, offsets, i, j):
    keys[i], keys[j] = keys[j], keys[i]
    offsets[i], offsets[j] = offsets[j], offsets[i]


@part
def _sift_up(keys, offsets, place):
    while place > 0 and _after(keys, offsets, place, (place - 1) // 2):
        _swap(keys, offsets, place, (place - 1) // 2)
        place = (place - 1) // 2


@part
def _sift_down(keys, offsets, size):
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _after(keys, offsets, child + 1, child):
            child += 1
        if not _after(keys, offsets, child, place):
            return
        _swap(keys, offsets, place, child)
        place = child


@part
def _weighted(picks, degree, fanout, stream, weight, keys):
    """Offsets with the smallest exponential keys, ascending; ``picks`` and ``keys`` hold the heap during the scan."""
    size = 0
    for offset in range(degree):
        if weight[offset] > 0:
            key = draw_exponential(stream, offset) / np.float64(weight[offset])
            if size < fanout:
                keys[size], picks[size] = key, offset
                _sift_up(keys, picks, size)
                size += 1
            elif key < keys[0]:
                keys[0], picks[0] = key, offset
                _sift_down(keys, picks, size)
    for i in range(1, size):
        value, place = picks[i], i
        while place > 0 and picks[place - 1] > value:
            picks[place] = picks[place - 1]
            place -= 1
        picks[place] = value


@part
def pick_count(degree, fanout, replace):
    """Picks of a row of this degree (without weights)."""
    if fanout < 0:
        return degree
    if replace:
        return fanout if degree > 0 else np.int64(0)
    return min(degree, fanout)


@part
def _weighted_count(weight, start, degree, fanout):
    """Picks of a row whose neighbours of weight 0 cannot be picked."""
    count = np.int64(0)
    for offset in range(degree):
        if weight[start + offset] > 0:
            count += 1
        if count == fanout:
            break
    return count


@part
def offsets(out_indptr, first, last, indptr, nodes, fanout, replace, weight, weighted):
    """``out_indptr`` of the rows ``first .. last`` behind the row before them."""
    for row in range(first, last):
        start, end = np.int64(indptr[nodes[row]]), np.int64(indptr[nodes[row] + 1])
        if weighted:
            count = _weighted_count(weight, start, end - start, fanout)
        else:
            count = pick_count(end - start, fanout, replace)
        out_indptr[row + 1] = np.int32(np.int64(out_indptr[row]) + count)


@part
def prefetch_rows(indptr, nodes, first, last):
    for row in range(first, last):
        prefetch(indptr, np.int64(nodes[row]))


@part
def pick_rows(
    edges, out_indptr, first, last, indptr, indices, nodes, fanout, replace, weight, weighted, key, scratch, mask
):  # fmt: skip
    """Edge positions of the picks of the rows ``first .. last``."""
    mixed = splitmix(key)
    for row in range(first, last):
        start = np.int64(indptr[nodes[row]])
        degree = np.int64(indptr[nodes[row] + 1]) - start
        begin, count = np.int64(out_indptr[row]), np.int64(out_indptr[row + 1]) - np.int64(out_indptr[row])
        picks, stream = shift(edges, begin), node_stream(mixed, nodes[row])
        if weighted:
            _weighted(picks, degree, fanout, stream, shift(weight, start), float64s_of(scratch))
        elif replace and fanout > 0:
            for slot in range(count):
                picks[slot] = draw_below(stream, slot, degree)
        elif count == degree:
            for slot in range(count):
                picks[slot] = slot
        else:
            floyd(picks, degree, fanout, stream, scratch, mask)
        for slot in range(count):
            picks[slot] += start
            prefetch(indices, picks[slot])
