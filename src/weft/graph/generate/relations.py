"""Draw relation numbers for edges, skewed as in knowledge graphs: a few relations hold most edges."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.generate.counter import Stream, hash_, stream_key
from weft.graph.generate.wiring import CHUNK_EDGES, row_chunks

LINE = 1 << 40


def relation_shares(num_relations: int) -> np.ndarray:
    """The share of the edges that each relation has ``[R]``, in proportion to ``1 / (r + 1)``."""
    parts = 1.0 / np.arange(1, num_relations + 1)
    return parts / parts.sum()


def relation_sizes(num_relations: int, num_edges: int) -> tuple[int, ...]:
    """About how many edges each relation has."""
    return tuple(np.rint(relation_shares(num_relations) * num_edges).astype(int).tolist()) if num_relations else ()


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
