"""Wire degrees, classes and popularity into CSR: distinct sources per row, directed or undirected.

Shapes: N rows, M columns, E stored entries, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from weft.graph.generate.counter import below, hash_, stream_key
from weft.graph.generate.distinct import Propose, distinct_keys, sort_values
from weft.graph.generate.popularity import Popularity
from weft.ops.csr.adjacency import offset_dtype

CHUNK_EDGES = 2**26  # an int64 temporary of 512 MiB; about ten of them live at once
PASS_ON_ROUNDS = 24  # a node that all others have drawn has no place left for its own draws
PLANTED_ROUNDS = 6  # after these, places are filled uniformly: a hub may have used up its own class

Draw = Callable[[Tensor, Tensor, int], Tensor]


def planted_draw(
    classes: Tensor, popularity: Popularity, same_side: Tensor, num_cols: int, seed: int, stream: int
) -> Draw:
    """Columns for (rows, slots, round): by class and popularity at first, anywhere in late rounds."""

    def draw(rows: Tensor, slots: Tensor, attempt: int) -> Tensor:
        bits = hash_(stream_key(seed, stream, attempt), slots)
        if attempt < PLANTED_ROUNDS:
            return popularity.draw(bits, classes.index_select(0, rows), same_side)
        return below(bits, num_cols).to(torch.int32)

    return draw


def offsets(degrees: Tensor) -> Tensor:
    """Row offsets ``[N+1]`` int64 of degrees ``[N]``."""
    indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64, device=degrees.device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    return indptr


def directed_csr(
    degrees: Tensor, num_cols: int, draw: Draw, *, loops: bool, chunk: int = CHUNK_EDGES
) -> tuple[Tensor, Tensor]:
    """``indptr [N+1]``, ``indices [E]`` int32: row i has exactly ``degrees[i]`` distinct columns, ascending.

    Built chunk by chunk of at most ``chunk`` entries (or one row), so the temporaries do not grow with E.
    """
    indptr = offsets(degrees)
    num_edges = int(indptr[-1])
    indices = torch.empty(num_edges, dtype=torch.int32, device=degrees.device)
    for begin, end in row_chunks(indptr, chunk):
        need = degrees[begin:end].to(torch.int64)
        propose = _row_proposer(begin, num_cols, draw, loops)
        keys = distinct_keys(need, indptr[begin:end], propose, lambda keys: keys // num_cols)
        start = int(indptr[begin])
        indices[start : start + keys.numel()] = keys.remainder_(num_cols)
        del keys
    return indptr.to(offset_dtype(num_edges)), indices


def _row_proposer(first_row: int, num_cols: int, draw: Draw, loops: bool) -> Propose:
    def propose(owners: Tensor, slots: Tensor, attempt: int) -> Tensor:
        rows = owners + first_row
        cols = draw(rows, slots, attempt)
        keys = owners.to(torch.int64).mul_(num_cols).add_(cols)
        return keys if loops else keys[cols != rows]

    return propose


def row_chunks(indptr: Tensor, chunk: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges of at most ``chunk`` entries each (a longer row stands alone)."""
    begin, num_rows = 0, indptr.numel() - 1
    while begin < num_rows:
        limit = indptr[begin] + chunk
        end = int(torch.searchsorted(indptr, limit, right=True)) - 1
        end = max(end, begin + 1)
        yield begin, end
        begin = end


def undirected_csr(owned: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """``indptr``, ``indices`` of a symmetric graph of ``2 * sum(owned)`` entries without loops.

    Node i draws ``owned[i]`` partners; all pairs are distinct. Holds all pairs at once:
    about 60 bytes per stored entry at the peak.
    """
    num_nodes = owned.numel()

    def propose(owners: Tensor, slots: Tensor, attempt: int) -> Tensor:
        partners = draw(owners, slots, attempt)
        keep = partners != owners
        return _pair_keys(owners[keep], partners[keep], num_nodes)

    need = owned.to(torch.int64)
    keys = distinct_keys(
        need,
        offsets(need)[:-1],
        propose,
        lambda keys: _pair_owner(keys, num_nodes),
        tag_bits=1,
        pass_on=PASS_ON_ROUNDS,
    )
    return symmetric_csr(keys.bitwise_right_shift_(1), num_nodes)


def _pair_keys(owners: Tensor, partners: Tensor, num_nodes: int) -> Tensor:
    """``(low * N + high) * 2 + (the owner is the high one)``."""
    low, high = torch.minimum(owners, partners), torch.maximum(owners, partners)
    return low.to(torch.int64).mul_(num_nodes).add_(high).mul_(2).add_(owners > partners)


def _pair_owner(keys: Tensor, num_nodes: int) -> Tensor:
    pairs = keys >> 1
    return torch.where((keys & 1).bool(), pairs % num_nodes, pairs // num_nodes)


def symmetric_csr(pairs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """CSR of both directions of distinct pairs ``low * N + high`` with low < high."""
    mirrored = (pairs % num_nodes).mul_(num_nodes).add_(pairs // num_nodes)
    return keys_csr(sort_values(torch.cat([pairs, mirrored])), num_nodes)


def keys_csr(keys: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """CSR of sorted keys ``row * N + column``."""
    starts = torch.arange(num_nodes + 1, dtype=torch.int64, device=keys.device).mul_(num_nodes)
    indptr = torch.searchsorted(keys, starts).to(offset_dtype(keys.numel()))
    return indptr, keys.remainder_(num_nodes).to(torch.int32)
