"""Numba kernels of a hop on the CPU: pick neighbours, read them, relabel them.

Arguments are addresses, sizes and flags; see :mod:`weft.ops.cpu.kernel`. Rows are handled in chunks and in steps: pick
edge positions, read the neighbours there, relabel them. Each step prefetches what the next one reads and then moves on
to another chunk, so that many cache misses are in flight at once.

Shapes: N nodes, E edges, S rows, K fan-out, P sampled edges.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from weft.ops import random_bits as torch_bits
from weft.ops.cpu.kernel import float32s, int32s, int64s, kernel, part, pointer, shift, uint8s
from weft.ops.cpu.random_bits import splitmix
from weft.ops.cpu.simd import prefetch
from weft.ops.sampling import reference as draws

# ---- The draws of :mod:`weft.ops.sampling.reference` for numba kernels

_GOLDEN64 = np.uint64(torch_bits.GOLDEN64)
_LOW32 = np.uint64(torch_bits.LOW32)
_S11, _S32 = np.uint64(11), np.uint64(32)
_LOG_2, _SQRT_HALF, _TERMS = draws.LOG_2, draws.SQRT_HALF, draws.LOG_TERMS


@part
def hop_key(clock, hop):
    """Key of one hop, a uint64; ``clock`` points to (seed, epoch, batch)."""
    key = splitmix(np.uint64(clock[0]))
    key = splitmix(key + np.uint64(clock[1]))
    key = splitmix(key + np.uint64(clock[2]))
    return splitmix(key + np.uint64(hop))


@part
def node_stream(mixed_key, node):
    """The stream of a node; ``mixed_key`` is ``splitmix`` of the hop's key."""
    return splitmix(mixed_key ^ splitmix(np.uint64(node)))


@part
def draw_bits(stream, number):
    """64 random bits, a uint64."""
    return splitmix(stream + np.uint64(number) * _GOLDEN64)


@part
def draw_below(stream, number, bound):
    """An int64 in ``[0, bound)``; the bound is an int64 below 2^31."""
    bits, limit = draw_bits(stream, number), np.uint64(bound)
    high, low = bits >> _S32, bits & _LOW32
    return np.int64((high * limit + ((low * limit) >> _S32)) >> _S32)


@part
def draw_exponential(stream, number):
    """A float64 from the exponential distribution."""
    unit = (np.float64(draw_bits(stream, number) >> _S11) + 0.5) * 2.0**-53
    mantissa, exponent = math.frexp(unit)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, 1.0 / _TERMS
    for term in range(_TERMS - 2, 0, -2):
        total = total * square
        total = total + 1.0 / term
    series = s * total
    return -(np.float64(exponent) * _LOG_2 + series * 2.0)


# ---- What numba has no function for: copy bytes, read memory as another type


@intrinsic
def float64s_of(typing, array):
    """The same memory as float64 numbers."""
    result = types.CPointer(types.float64)

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(result))

    return result(array), generate


@intrinsic
def copy_bytes(typing, target, source, count):
    """Copy ``count`` bytes between two addresses."""

    def generate(context, builder, signature, arguments):
        bytes_of = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(argument, bytes_of) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


# ---- Pick the neighbours of rows: different ones, repeated ones, or by weight; as positions of edges

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


CHUNK = 32  # rows whose loads are in flight together
BLOCK = 256  # picks whose table entries are prefetched together
AHEAD = 16  # rows whose offsets are prefetched before they are needed


@part
def _read_sources(sources, edges, begin, end, indices):
    """The neighbours at the picked edge positions ``begin .. end``."""
    for place in range(begin, end):
        sources[place] = indices[edges[place]]


# ---- relabelling -----------------------------------------------------------------------------------------


@part
def _prefetch_labels(table, sources, begin, end):
    for place in range(begin, end):
        prefetch(table, np.int64(sources[place]))


@part
def _relabel(sources, begin, end, nodes, count, table, stamp):
    """Replace global ids by local ones; new nodes are appended. Returns the new number of nodes.

    An entry of the table is ``stamp * 2^32 + local id``: entries of earlier batches have another stamp.
    """
    mark = np.int64(stamp) << 32
    for place in range(begin, end):
        node = sources[place]
        entry = table[node]
        if entry >> 32 != stamp:
            entry = mark | count
            table[node] = entry
            nodes[count] = node
            count += 1
        sources[place] = np.int32(entry & 0xFFFFFFFF)
    return count


# ---- kernels ---------------------------------------------------------------------------------------------


@kernel
def label_seeds(nodes, count, table, stamp):
    """Give the seeds their positions as local ids; the first of equal seeds counts."""
    nodes, table = int32s(nodes), int64s(table)
    mark = np.int64(stamp) << 32
    for place in range(count):
        if table[nodes[place]] >> 32 != stamp:
            table[nodes[place]] = mark | place


@kernel
def hop_fused(
    indptr, like, indices, weight, weighted, rows, num_rows, fanout, replace, clock, hop,
    out_indptr, sources, edges, scratch, mask, nodes, count, table, stamp,
):  # fmt: skip
    """Sample and relabel one hop in one pass over its rows; returns the number of nodes then known."""
    indptr, indices, weight = pointer(indptr, like), int32s(indices), float32s(weight)
    rows, out_indptr, sources, edges = int32s(rows), int32s(out_indptr), int32s(sources), int64s(edges)
    scratch, nodes, table = int32s(scratch), int32s(nodes), int64s(table)
    key = hop_key(int64s(clock), hop)
    out_indptr[0] = 0
    prefetch_rows(indptr, rows, 0, min(CHUNK, num_rows))
    read, labelled = np.int64(0), np.int64(0)  # picks that were read, and that have local ids
    for first in range(0, num_rows, CHUNK):
        last = min(first + CHUNK, num_rows)
        prefetch_rows(indptr, rows, last, min(last + CHUNK, num_rows))
        offsets(out_indptr, first, last, indptr, rows, fanout, replace, weight, weighted)
        pick_rows(
            edges, out_indptr, first, last, indptr, indices, rows, fanout, replace, weight, weighted, key, scratch, mask
        )  # fmt: skip
        count = _relabel(sources, labelled, read, nodes, count, table, stamp)
        labelled, begin = read, np.int64(out_indptr[first])
        # The picks of the chunk before: they were prefetched while this chunk's were drawn.
        _read_sources(sources, edges, read, begin, indices)
        _prefetch_labels(table, sources, read, begin)
        read = begin
    end = np.int64(out_indptr[num_rows])
    _read_sources(sources, edges, read, end, indices)
    return _relabel(sources, labelled, end, nodes, count, table, stamp)


@kernel
def hop_relations(
    indptr, like, indices, rows, num_rows, fanouts, relations, clock, hop,
    out_indptr, sources, edges, scratch, mask, nodes, count, table, stamp,
):  # fmt: skip
    """Sample and relabel one hop with a fan-out per relation; ``indptr`` has a row per (node, relation)."""
    indptr, indices, fanouts = pointer(indptr, like), int32s(indices), int64s(fanouts)
    rows, out_indptr, sources, edges = int32s(rows), int32s(out_indptr), int32s(sources), int64s(edges)
    scratch, nodes, table = int32s(scratch), int32s(nodes), int64s(table)
    mixed, end = splitmix(hop_key(int64s(clock), hop)), np.int64(0)
    out_indptr[0] = 0
    for row in range(num_rows):
        if row + AHEAD < num_rows:
            prefetch(indptr, np.int64(rows[row + AHEAD]) * relations)
        for relation in range(relations):
            node = np.int64(rows[row]) * relations + relation
            start = np.int64(indptr[node])
            degree, fanout = np.int64(indptr[node + 1]) - start, fanouts[relation]
            picked, picks = pick_count(degree, fanout, False), shift(edges, end)
            if picked == degree:
                for slot in range(picked):
                    picks[slot] = slot
            elif picked > 0:
                floyd(picks, degree, fanout, node_stream(mixed, node), scratch, mask)
            for slot in range(picked):
                picks[slot] += start
                prefetch(indices, picks[slot])
            end += picked
        out_indptr[row + 1] = np.int32(end)
    _read_sources(sources, edges, np.int64(0), end, indices)
    return _relabel(sources, np.int64(0), end, nodes, count, table, stamp)


@kernel
def hop_offsets(indptr, like, weight, weighted, rows, num_rows, fanout, replace, out_indptr):
    """Where the picks of every row begin."""
    indptr, weight = pointer(indptr, like), float32s(weight)
    rows, out_indptr = int32s(rows), int32s(out_indptr)
    out_indptr[0] = 0
    prefetch_rows(indptr, rows, 0, min(CHUNK, num_rows))
    for first in range(0, num_rows, CHUNK):
        last = min(first + CHUNK, num_rows)
        prefetch_rows(indptr, rows, last, min(last + CHUNK, num_rows))
        offsets(out_indptr, first, last, indptr, rows, fanout, replace, weight, weighted)


@kernel
def hop_share(
    indptr, like, indices, weight, weighted, rows, num_rows, fanout, replace, clock, hop,
    out_indptr, sources, edges, scratch, scratch_step, mask, share, shares,
):  # fmt: skip
    """Sample one share of the rows; ``out_indptr`` is known."""
    indptr, indices, weight = pointer(indptr, like), int32s(indices), float32s(weight)
    rows, out_indptr, sources, edges = int32s(rows), int32s(out_indptr), int32s(sources), int64s(edges)
    scratch = int32s(scratch + share * scratch_step)
    key = hop_key(int64s(clock), hop)
    stop = num_rows * (share + 1) // shares
    begin = num_rows * share // shares
    prefetch_rows(indptr, rows, begin, min(begin + CHUNK, stop))
    read = np.int64(out_indptr[begin])
    for first in range(begin, stop, CHUNK):
        last = min(first + CHUNK, stop)
        prefetch_rows(indptr, rows, last, min(last + CHUNK, stop))
        pick_rows(
            edges, out_indptr, first, last, indptr, indices, rows, fanout, replace, weight, weighted, key, scratch, mask
        )  # fmt: skip
        _read_sources(sources, edges, read, np.int64(out_indptr[first]), indices)
        read = np.int64(out_indptr[first])
    _read_sources(sources, edges, read, np.int64(out_indptr[stop]), indices)


@kernel
def relabel(sources, num_sources, nodes, count, table, stamp):
    """Relabel what was sampled before; returns the number of nodes then known."""
    sources, nodes, table = int32s(sources), int32s(nodes), int64s(table)
    _prefetch_labels(table, sources, 0, min(BLOCK, num_sources))
    for begin in range(0, num_sources, BLOCK):
        end = min(begin + BLOCK, num_sources)
        _prefetch_labels(table, sources, end, min(end + BLOCK, num_sources))
        count = _relabel(sources, begin, end, nodes, count, table, stamp)
    return count


@kernel
def total_degree(indptr, like, rows, num_rows):
    """In-edges of the rows, all together."""
    indptr, rows = pointer(indptr, like), int32s(rows)
    total = np.int64(0)
    for row in range(num_rows):
        total += np.int64(indptr[rows[row] + 1]) - np.int64(indptr[rows[row]])
    return total


# ---- Gather rows of a table on the CPU, prefetching those that come next; and find those that a cache does not have

GATHER_AHEAD = 16  # rows that are prefetched before they are needed


@kernel
def gather_share(out, table, row_bytes, table_step, ids, like, num_ids, share, shares):
    """Copy the rows ``ids`` of a table; prefetches the rows that come next."""
    ids = pointer(ids, like)
    stop = num_ids * (share + 1) // shares
    for place in range(num_ids * share // shares, stop):
        if place + GATHER_AHEAD < stop:
            ahead = int32s(table + np.int64(ids[place + GATHER_AHEAD]) * table_step)
            for line in range(0, row_bytes, 64):
                prefetch(ahead, line // 4)
        copy_bytes(out + place * row_bytes, table + np.int64(ids[place]) * table_step, row_bytes)


@kernel
def absent(ids, num_ids, held, places, found):
    """Places and ids of those of ``ids`` that ``held`` has a zero for; returns how many."""
    ids, held, places, found = int32s(ids), uint8s(held), int32s(places), int32s(found)
    count = np.int64(0)
    for place in range(num_ids):
        if place + GATHER_AHEAD < num_ids:
            prefetch(held, np.int64(ids[place + GATHER_AHEAD]))
        places[count], found[count] = place, ids[place]
        count += held[ids[place]] == 0
    return count


# ---- Transpose a sampled block on the CPU by counting sort


@kernel
def transpose(indptr, indices, num_rows, num_cols, out_indptr, out_rows, out_perm):
    """Stable counting sort of a CSR by column; ``out_indptr [M+1]`` starts as zeros, all arrays are int32."""
    indptr, indices, out_indptr = int32s(indptr), int32s(indices), int32s(out_indptr)
    out_rows, out_perm = int32s(out_rows), int32s(out_perm)
    for edge in range(indptr[num_rows]):
        out_indptr[indices[edge] + 1] += 1
    for col in range(num_cols):
        out_indptr[col + 1] += out_indptr[col]
    for row in range(num_rows):
        for edge in range(indptr[row], indptr[row + 1]):
            place = out_indptr[indices[edge]]
            out_rows[place], out_perm[place] = row, edge
            out_indptr[indices[edge]] = place + 1
    for col in range(num_cols, 0, -1):
        out_indptr[col] = out_indptr[col - 1]
    out_indptr[0] = 0
