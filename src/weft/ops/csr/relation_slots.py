"""RelationSlots: the edges of a relational graph as rows per (relation, node), in chunks of one relation each.

A relational layer computes ``sum over r of mean over the r-neighbours of x, times W_r``. The means of all non-empty
(relation, node) pairs are one sparse product; the pairs of a relation, padded to whole chunks of K rows, are then
multiplied by its matrix as one batched product over chunks; a second sparse product adds up the pairs of each node.
All of it is deterministic, and every array has a size that depends on the numbers of pairs and relations alone.

Shapes: N rows, M columns, E edges, R relations, P pairs, C chunks, K rows of a chunk, S = C * K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency, offset_dtype, supplied_by_adjacency

SHARE = 8  # chunks per relation if pairs were spread evenly: rows that stand for no pair are at most an eighth of them
LEAST_ROWS, MOST_ROWS = 16, 4096


@dataclass(frozen=True)
class RelationSlots:
    """Three sparse matrices over the slots.

    ``means [S x M]`` averages the neighbours of every pair (plain; use ``.mean()``), ``collect [N x S]`` adds up the
    pairs of a node, ``matrices [C x R]`` has one entry per chunk: its relation.
    """

    means: Adjacency
    collect: Adjacency
    matrices: Adjacency


@dataclass(frozen=True)
class SlotArrays:
    """The CSR arrays of :class:`RelationSlots`, and those of the transpose of ``collect``."""

    means: tuple[Tensor, Tensor]
    collect: tuple[Tensor, Tensor]
    spread: tuple[Tensor, Tensor]
    chunk_relation: Tensor


def chunk_rows(pairs: int, relations: int) -> int:
    """K: a power of two such that padding every relation to whole chunks adds little."""
    rows = max(pairs // (SHARE * max(relations, 1)), 1)
    return min(max(1 << (rows.bit_length() - 1), LEAST_ROWS), MOST_ROWS)


def num_chunks(pairs: int, relations: int) -> int:
    """C: enough chunks however the pairs are spread over the relations."""
    return -(-pairs // chunk_rows(pairs, relations)) + relations


def relation_slots(adj: Adjacency) -> RelationSlots:
    """The slots of an adjacency with relations, built once."""
    if adj.relation is None:
        raise InputError("this layer needs the relation of every edge; give the graph relation=, one number per edge")
    return adj.derived("relation slots", lambda: make_relation_slots(adj))


@supplied_by_adjacency
def make_relation_slots(adj: Adjacency) -> RelationSlots:
    """Count the pairs (which reads one number from the device) and build."""
    keys = pair_keys(adj)
    pairs = int((keys[1:] != keys[:-1]).sum()) + 1 if keys.numel() else 0
    return as_matrices(slot_arrays(adj, max(pairs, 1)), adj, Adjacency)


def pair_keys(adj: Adjacency) -> Tensor:
    """``relation * N + row`` of every edge, ascending ``[E]`` int64."""
    return torch.sort(adj.relation.long() * adj.num_rows + adj.rows()).values


def as_matrices(arrays: SlotArrays, adj: Adjacency, kind: type[Adjacency]) -> RelationSlots:
    """The arrays as adjacencies of class ``kind``."""
    slots, chunks = arrays.means[0].numel() - 1, arrays.chunk_relation.numel()
    collect, spread = kind(*arrays.collect, slots), kind(*arrays.spread, adj.num_rows)
    collect.derived("transposed", lambda: spread)
    each = torch.arange(chunks + 1, dtype=torch.int32, device=adj.device)
    return RelationSlots(
        kind(*arrays.means, adj.num_cols), collect, kind(each, arrays.chunk_relation, adj.num_relations)
    )


def slot_arrays(adj: Adjacency, pairs: int, existing: Tensor | None = None) -> SlotArrays:
    """Build for at most ``pairs`` pairs, with nothing read back; of the edges only the first ``existing [1]`` count."""
    rows, relations = adj.num_rows, adj.num_relations

    def numbers(count: int) -> Tensor:
        return torch.arange(count, device=adj.device)

    key = adj.relation.long() * rows + adj.rows()
    beyond = relations * rows  # the key of what does not exist
    if existing is not None:
        key = torch.where(numbers(adj.num_edges) < existing, key, beyond)
    key, order = torch.sort(key, stable=True)
    fresh = torch.ones_like(key)
    fresh[1:] = key[1:] != key[:-1]
    pair_of_edge = torch.where(key < beyond, fresh.cumsum(0) - 1, pairs)  # edges that do not exist: pair P
    # Edges of a pair write the same number, so the order of the writes does not count.
    pair_key = key.new_full((pairs + 1,), beyond).scatter_(0, pair_of_edge, key)[:pairs]
    size, chunks = chunk_rows(pairs, relations), num_chunks(pairs, relations)
    starts = torch.searchsorted(pair_key, numbers(relations + 1) * rows)  # first pair of every relation
    per_relation = (starts.diff() + size - 1) // size
    chunk_starts = torch.cat([per_relation.new_zeros(1), per_relation.cumsum(0)])
    relation_of_pair = (pair_key // max(rows, 1)).clamp(max=relations)
    slot = chunk_starts[relation_of_pair] * size + numbers(pairs) - starts[relation_of_pair]
    slot = torch.where(pair_key < beyond, slot, chunks * size)
    every_slot = numbers(chunks * size + 1)
    slot_of_edge = torch.cat([slot, slot.new_full((1,), chunks * size)])[pair_of_edge]
    row_of_pair = torch.where(pair_key < beyond, pair_key % max(rows, 1), rows)
    by_row, pair_order = torch.sort(row_of_pair, stable=True)
    chunk_relation = torch.searchsorted(chunk_starts[1:].contiguous(), numbers(chunks), right=True)
    by_edge, by_pair = offset_dtype(adj.num_edges), offset_dtype(pairs)
    return SlotArrays(
        means=(torch.searchsorted(slot_of_edge, every_slot).to(by_edge), adj.indices[order]),
        collect=(
            torch.searchsorted(by_row, numbers(rows + 1)).to(by_pair),
            slot[pair_order].clamp(max=chunks * size - 1).to(torch.int32),
        ),
        spread=(
            torch.searchsorted(slot, every_slot).to(by_pair),
            row_of_pair.clamp(max=rows - 1).to(torch.int32),
        ),
        chunk_relation=chunk_relation.clamp(max=relations - 1).to(torch.int32),
    )


# ---- chunk_matmul: rows in chunks, each chunk times a matrix of its own.
#
#     out[t, c K + k, :] = x[t, c K + k, :] @ weight[t, c, :, :]
#
# It is a batched product of torch's, forward and backward; what is Weft's is the rule for ``vmap``: members that share
# ``x`` put their matrices side by side, so that ``x`` is read once and never repeated T times.
#
# Shapes: T tasks, C chunks, K rows of a chunk, S = C * K rows, I features in, O features out.


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x [S, I]`` or ``[T, S, I]`` times ``weight [C, I, O]`` or ``[T, C, I, O]``."""
    chunks = x.unflatten(-2, (weight.shape[-3], -1))
    if x.dim() == 2 and weight.dim() == 4:
        return _apart(torch.bmm(chunks, _together(weight)), weight.shape[0]).flatten(-3, -2)
    return torch.matmul(chunks, weight).flatten(-3, -2)


def _weight_gradient(x: Tensor, grad: Tensor, chunks: int) -> Tensor:
    """``x^T grad`` chunk by chunk: ``[C, I, O]``, with a leading T if ``x`` or ``grad`` has one."""
    inputs, gradients = (t.unflatten(-2, (chunks, -1)) for t in (x, grad))
    if x.dim() == 2 and grad.dim() == 3:
        return _apart(torch.bmm(inputs.mT, _together(gradients)), grad.shape[0])
    return torch.matmul(inputs.mT, gradients)


def _together(parts: Tensor) -> Tensor:
    """``[T, C, A, O]`` to ``[C, A, T O]``."""
    return parts.permute(1, 2, 0, 3).flatten(2)


def _apart(wide: Tensor, tasks: int) -> Tensor:
    """``[C, A, T O]`` to ``[T, C, A, O]``."""
    return wide.unflatten(-1, (tasks, -1)).permute(2, 0, 1, 3).contiguous()


class _ChunkMatmul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, weight = inputs
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.shapes = x.shape, weight.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_shape, weight_shape = ctx.shapes
        grad_x = _product(grad, weight.mT).sum_to_size(x_shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, _weight_gradient(x, grad, weight_shape[-3]).sum_to_size(weight_shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        x = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        weight = weight if in_dims[1] is None else weight.movedim(in_dims[1], 0)
        return _ChunkMatmul.apply(x, weight), 0


def chunk_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x [S, I]`` in C equal chunks of rows, each times its matrix of ``weight [C, I, O]``: ``[S, O]``."""
    return _ChunkMatmul.apply(x, weight)
