"""Wire degrees, classes and popularity into CSR, with power-law degrees and relation numbers.

Sources of a row are distinct; a graph is directed or undirected.

Shapes: N rows, M columns, E stored entries, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.build import row_offsets
from weft.graph.generate.draws import Popularity, Stream, below, distinct_keys, hash_, sort_values, stream_key
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

        def propose(owners: Tensor, slots: Tensor, attempt: int, first_row: int = begin) -> Tensor:
            rows = owners + first_row
            cols = draw(rows, slots, attempt)
            keys = owners.to(torch.int64).mul_(num_cols).add_(cols)
            return keys if loops else keys[cols != rows]

        keys = distinct_keys(need, indptr[begin:end], propose, lambda keys: keys // num_cols)
        start = int(indptr[begin])
        indices[start : start + keys.numel()] = keys.remainder_(num_cols)
        del keys
    return indptr.to(offset_dtype(num_edges)), indices


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
        apart = partners != owners
        owners, partners = owners[apart], partners[apart]
        low, high = torch.minimum(owners, partners), torch.maximum(owners, partners)
        # (low * N + high) * 2 + (the owner is the high one)
        return low.to(torch.int64).mul_(num_nodes).add_(high).mul_(2).add_(owners > partners)

    def owner_of(keys: Tensor) -> Tensor:
        pairs = keys >> 1
        return torch.where((keys & 1).bool(), pairs % num_nodes, pairs // num_nodes)

    need = owned.to(torch.int64)
    keys = distinct_keys(need, offsets(need)[:-1], propose, owner_of, tag_bits=1, pass_on=PASS_ON_ROUNDS)
    pairs = keys.bitwise_right_shift_(1)  # low * N + high
    mirrored = (pairs % num_nodes).mul_(num_nodes).add_(pairs // num_nodes)
    keys = sort_values(torch.cat([pairs, mirrored]))
    return row_offsets(keys, num_nodes, num_nodes), keys.remainder_(num_nodes).to(torch.int32)


# ---- Generate power-law degree sequences with an exact sum
#
# The node of rank r has degree ``max_degree * (1 + r / r0) ^ (-1 / (exponent - 1))``, at least ``low``: its tail
# falls as ``degree ^ -exponent``. ``r0`` is solved for so that the degrees add up to the number of edges. Solved as a
# histogram of a few thousand bins on the host, so that every device gets the same integers.

BISECTIONS = 80


def degree_histogram(num_nodes: int, total: int, *, exponent: float, max_degree: int) -> np.ndarray:
    """How many nodes have each degree: ``[max_degree + 1]`` int64, with sum ``num_nodes``.

    No node has degree 0 unless there are fewer edges than nodes.
    """
    if exponent <= 1.0:
        raise GraphError(f"exponent={exponent}: a power-law exponent must be above 1 (real graphs: 2 to 3.5)")
    if max_degree < 1:
        raise GraphError(f"max_degree={max_degree} must be at least 1")
    if total > num_nodes * max_degree:
        raise GraphError(
            f"{num_nodes} nodes of degree at most {max_degree} cannot hold {total} edges: "
            f"raise max_degree above {total / num_nodes:.1f}"
        )
    low = 1 if total >= num_nodes else 0
    # The last rank, in units of r0, whose degree reaches d, for d in ``low + 1 .. max_degree``.
    reach = (np.arange(low + 1, max_degree + 1, dtype=np.float64) / max_degree) ** (1.0 - exponent) - 1.0
    near, far = 1e-9, 1.0
    while _sum(_histogram(num_nodes, far, reach, low)) < total and far < 1e18:
        far *= 4.0
    for _ in range(BISECTIONS):
        middle = (near * far) ** 0.5
        if _sum(_histogram(num_nodes, middle, reach, low)) < total:
            near = middle
        else:
            far = middle
    counts = _histogram(num_nodes, near, reach, low)
    # Move as few nodes as possible to a neighbouring degree until the sum is exact.
    missing = total - _sum(counts)
    while missing > 0:
        degree = int(np.argmax(counts[:-1]))
        moved = min(missing, int(counts[degree]))
        counts[degree] -= moved
        counts[degree + 1] += moved
        missing -= moved
    while missing < 0:  # only where the hub alone is too much: lower the highest degree
        degree = int(np.flatnonzero(counts)[-1])
        lowered = max(low, degree + missing)
        counts[degree] -= 1
        counts[lowered] += 1
        missing += degree - lowered
    return counts


def _histogram(num_nodes: int, r0: float, reach: np.ndarray, low: int) -> np.ndarray:
    """Nodes per degree for one r0."""
    at_least = np.zeros(low + reach.size + 2, dtype=np.int64)
    at_least[: low + 1] = num_nodes
    at_least[low + 1 : -1] = np.minimum(np.floor(r0 * reach) + 1.0, num_nodes).astype(np.int64)
    return at_least[:-1] - at_least[1:]


def _sum(counts: np.ndarray) -> int:
    return int(np.dot(counts, np.arange(counts.size)))


def hub_draws(num_nodes: int, pairs: int, *, exponent: float, max_degree: int, num_classes: int, same: float) -> int:
    """How many partners the largest hub of an undirected graph must draw to end up with ``max_degree``.

    Half of them, if it were drawn as often as it draws; but a node that draws the hub twice joins it once,
    and a hub is soon joined to most of its own class. With w draws of its own, a node that draws d partners
    joins it with probability ``1 - exp(-d * rate * w)``: at a high rate inside its class, a low one outside.
    """
    half = max(1, -(-max_degree // 2))
    counts = degree_histogram(num_nodes, pairs, exponent=exponent, max_degree=half)
    draws = np.arange(counts.size, dtype=np.float64)
    inside, outside = 1.0 / num_classes, 1.0 - 1.0 / num_classes
    low, high = half, max_degree
    while low < high:
        middle = (low + high) // 2
        drawn = 0.0
        for share, part in ((inside, same), (outside, 1.0 - same)):
            if share > 0.0:
                drawn += share * np.dot(counts, -np.expm1(-draws * part / share * middle / max(1, pairs)))
        low, high = (low, middle) if middle + drawn >= max_degree else (middle + 1, high)
    return low


# ---- Draw relation numbers for edges, skewed as in knowledge graphs: a few relations hold most edges

LINE = 1 << 40


def relation_shares(num_relations: int) -> np.ndarray:
    """The share of the edges that each relation has ``[R]``, in proportion to ``1 / (r + 1)``."""
    parts = 1.0 / np.arange(1, num_relations + 1)
    return parts / parts.sum()


def relation_ids(indptr: Tensor, indices: Tensor, num_relations: int, *, symmetric: bool, seed: int) -> Tensor:
    """Relation of every stored entry ``[E]`` int32; relation r has a share in proportion to ``1 / (r + 1)``.

    In a symmetric graph both directions of an edge have the same one.
    """
    if num_relations < 1:
        raise GraphError(f"relations={num_relations} must be at least 1 (0 for a graph without relations)")
    shares = np.cumsum(1.0 / np.arange(1, num_relations + 1))
    ends = torch.from_numpy(np.rint(shares / shares[-1] * LINE).astype(np.int64)).to(indices.device)
    relation = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    key, num_nodes = stream_key(seed, Stream.RELATION), indptr.numel() - 1
    for begin, end in row_chunks(indptr.to(torch.int64), CHUNK_EDGES):
        part = slice(int(indptr[begin]), int(indptr[end]))
        counts = indptr[begin : end + 1].diff().to(torch.int64)
        ids = torch.arange(begin, end, dtype=torch.int64, device=indices.device)
        rows = torch.repeat_interleave(ids, counts, output_size=part.stop - part.start)
        cols = indices[part].to(torch.int64)
        low, high = (torch.minimum(rows, cols), torch.maximum(rows, cols)) if symmetric else (rows, cols)
        bits = hash_(key, low.mul(num_nodes).add_(high)).bitwise_and_(LINE - 1)
        relation[part] = torch.bucketize(bits, ends, right=True, out_int32=True)
    return relation
