"""Numba kernels of a hop on the CPU: pick neighbours, read them, relabel them.

Arguments are addresses, sizes and flags; see :mod:`weft.ops.cpu.kernel`. Rows are handled in chunks and in steps: pick
edge positions, read the neighbours there, relabel them. Each step prefetches what the next one reads and then moves on
to another chunk, so that many cache misses are in flight at once.

Shapes: N nodes, E edges, S rows, K fan-out, P sampled edges.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import float32s, int32s, int64s, kernel, part, pointer, shift
from weft.ops.random.numba_bits import splitmix
from weft.ops.sampling.cpu_kernels.draws import hop_key, node_stream
from weft.ops.sampling.cpu_kernels.intrinsics import prefetch
from weft.ops.sampling.cpu_kernels.picks import floyd, offsets, pick_count, pick_rows, prefetch_rows

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
