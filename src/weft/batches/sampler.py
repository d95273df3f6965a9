"""NeighbourSampler: from seeds to the blocks of a batch, on the CPU or the GPU, with the same result.

Shapes: N nodes, E edges, S seeds, M nodes of a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import Block, MiniBatch, OfTensors, PaddedAdjacency, Subgraph, exact_device
from weft.core.errors import InputError
from weft.core.settings import most_picks, resolve
from weft.graph.graph import Graph
from weft.ops.csr.adjacency import Adjacency, loop_weights, row_sums
from weft.ops.random_bits import signed64, splitmix
from weft.ops.sampling.compact_triton import Compactor, DeviceHop, sample_hops_triton
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.gather_rows import gather_rows_triton
from weft.ops.sampling.paper_cuda import kernels as paper_kernels
from weft.ops.sampling.paper_cuda import launch_paper, sample_paper
from weft.ops.sampling.reference import (
    FULL,
    HopSample,
    RelationFanouts,
    RelationRows,
    check_fanout,
    check_seeds,
    make_clock,
    picks_at_most,
    relabel_torch,
    sample_relations_torch,
    sample_reservoir_torch,
)
from weft.ops.sampling.reservoir_triton import launch_reservoir, sample_reservoir_triton
from weft.ops.sampling.sample_triton import LARGEST_FANOUT, CachedLists, launch_sample, sample_triton

# ---- The hops of a batch behind one interface: compiled on the CPU, Triton on the GPU, or any sampler of one hop.
#
# A :class:`HopSampler` returns, for seeds and fan-outs, one :class:`Hop` per fan-out, seeds outwards. With
# ``expand="all"`` every hop samples for all nodes found before it (the rows of a block), with ``expand="new"`` for
# those alone that the hop before it found (a local subgraph).
#
# Shapes: S seeds, D rows, M nodes, P edges.

Fanout = int | tuple[int, ...]  # of all relations together, or of each


@dataclass(frozen=True)
class Hop:
    """One hop in local ids: row i is node ``first + i``.

    ``indptr [D+1]``, ``indices [P]`` int32, ``edges [P]`` int64 or None, ``nodes [M]`` int32: all nodes then known.
    """

    indptr: Tensor
    indices: Tensor
    edges: Tensor | None
    nodes: Tensor
    first: int = 0


# ``(seeds [S] int32, fanouts, clock, expand)`` to the hops, seeds outwards; used by one thread at a time.
HopSampler = Callable[[Tensor, Sequence[Fanout], Tensor, str], list[Hop]]


def cpu_hops(sampler: CpuSampler, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
    """Compiled sampling on the CPU, relabelling fused."""
    sampler.begin(seeds, clock)
    hops, first = [], 0
    for number, fanout in enumerate(fanouts):
        count = sampler.nodes.numel()
        take = sampler.hop if isinstance(fanout, int) else sampler.hop_of_relations
        sample, local = take(fanout, number, first)
        hops.append(Hop(sample.indptr, local.indices, sample.edges, local.nodes, first))
        first = count if expand == "new" else 0
    return hops


def torch_hops(
    sample_hop: Callable[[Tensor, Fanout, Tensor, int], HopSample],
    seeds: Tensor,
    fanouts: Sequence[Fanout],
    clock: Tensor,
    expand: str,
) -> list[Hop]:
    """Any sampler of one hop with relabelling in torch."""
    nodes, first, hops = seeds, 0, []
    for number, fanout in enumerate(fanouts):
        sample = sample_hop(nodes[first:], fanout, clock, number).trimmed()
        local = relabel_torch(nodes, sample.sources)
        hops.append(Hop(sample.indptr, local.indices, sample.edges, local.nodes, first))
        first = nodes.numel() if expand == "new" else 0
        nodes = local.nodes
    return hops


def local_edges(hops: Sequence[Hop]) -> Tensor:
    """The edges ``[2, P]`` int64 of all hops, sources above destinations, as positions in the nodes of the last."""
    pairs = []
    for hop in hops:
        rows = torch.arange(hop.first, hop.first + hop.indptr.numel() - 1, device=hop.indptr.device)
        rows = torch.repeat_interleave(rows, hop.indptr.diff().long(), output_size=hop.indices.numel())
        pairs.append(torch.stack([hop.indices.long(), rows]))
    return torch.cat(pairs, 1)


class TritonHops:
    """O(k) sampling and compaction on the GPU, with one read of all sizes at the end of a batch."""

    def __init__(self, indptr: Tensor, indices: Tensor, device: torch.device, **options: Any) -> None:
        self._arrays, self._options = (indptr, indices), options  # of :func:`sample_hops_triton`
        self._compactor = Compactor(indptr.numel() - 1, device)

    def padded(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor) -> list[DeviceHop]:
        """The hops padded to their capacity, sizes on the device; nothing is read back."""
        return sample_hops_triton(*self._arrays, seeds, list(fanouts), clock, self._compactor, **self._options)

    def __call__(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
        """See :class:`HopSampler`; ``expand`` must be "all"."""
        assert expand == "all", "the local subgraph is sampled hop by hop"
        hops, trimmed = self.padded(seeds, fanouts, clock), []
        sizes = torch.stack([torch.cat([hop.num_rows, hop.num_nodes, hop.indptr[-1:]]) for hop in hops]).tolist()
        for hop, (rows, nodes, edges) in zip(hops, sizes, strict=True):
            picked = None if hop.edges is None else hop.edges[:edges]
            trimmed.append(Hop(hop.indptr[: rows + 1], hop.indices[:edges], picked, hop.nodes[:nodes]))
        return trimmed


COMPARED = ("paper", "reservoir")  # other samples of the same distribution
BACKENDS = ("auto", "cpu", "gpu", *COMPARED)
DIRECTIONS = ("in", "out")
DEGREES = ("sampled", "full")
EDGES_AT_ONCE = 1 << 26  # of a pass over all edges


class NeighbourSampler:
    """Samples neighbours hop by hop.

    ``fanouts[0]`` is the number of neighbours of each seed, ``fanouts[1]`` of each node found then, and so on (PyG's
    order); -1 takes all. A hop may also be a list with a number per relation, or a dict from relations to numbers
    (``"each"``: those that are not named): then so many of each relation are taken, not of all together. ``replace``
    draws with replacement; ``weight [E]`` (in the graph's CSR order) draws without replacement with these odds.
    ``direction="in"`` follows edges to their sources, "out" to their destinations.

    ``backend``: "cpu" and "gpu" give the same batches bit for bit; "auto" is the graph's device; "reservoir" and
    "paper" (TurboGNN's, in CUDA C++) draw other samples of the same distribution, both the same.

    ``degrees`` selects GCN's normalisation: "sampled" (default, as PyG on a ``NeighborLoader`` batch) or "full"; see
    :class:`Block`. ``subgraph=True`` gives local edge lists for modules that take ``(x, edge_index)``, and with
    ``edge_attr=True`` the features of their edges.

    ``device`` is where batches are made, the graph's own unless given. A GPU can sample a graph in pinned host memory
    (uniform sampling with fan-outs up to 1,024); ``cached``: ids of nodes whose neighbour lists it keeps on the device.

    A batch depends on (seed, epoch, batch) and its seeds alone. Any thread may call :meth:`sample`.
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[Any],
        replace: bool = False,
        weight: Tensor | None = None,
        direction: str = "in",
        backend: str = "auto",
        *,
        seed: int = 0,
        degrees: str = "sampled",
        subgraph: bool = False,
        edge_attr: bool = False,
        threads: int = 1,
        device: torch.device | str | None = None,
        cached: Tensor | None = None,
    ) -> None:
        choices = (("backend", backend, BACKENDS), ("direction", direction, DIRECTIONS), ("degrees", degrees, DEGREES))
        for name, value, allowed in choices:
            if value not in allowed:
                raise InputError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        fanouts = resolved(fanouts, graph)
        for fanout in fanouts:
            check_fanout(most_picks(fanout), replace, weight is not None)
        uniform, apart = not replace and weight is None, any(not isinstance(fanout, int) for fanout in fanouts)
        if apart and (not uniform or backend in COMPARED):
            raise InputError("fan-outs per relation are sampled uniformly without replacement, by backend 'auto'")
        if apart and degrees == "full":
            raise InputError("degrees='full' weights the edges of one fan-out per hop; use degrees='sampled'")
        if weight is not None and weight.numel() != graph.num_edges:
            raise InputError(f"weight has {weight.numel()} numbers but the graph has {graph.num_edges} edges")
        if backend in COMPARED and not (uniform and is_plain(fanouts)):
            raise InputError(
                f"backend={backend!r} samples uniformly without replacement, with fan-outs from 1 to {LARGEST_FANOUT}; "
                "use 'auto' for other kinds"
            )
        if edge_attr and (graph.edge_attr is None or not subgraph):
            raise InputError("edge_attr=True needs a graph whose edges have features, and subgraph=True")
        self.graph, self.fanouts, self.replace, self.seed = graph, tuple(fanouts), replace, seed
        self.direction, self.subgraph, self.threads, self.edge_attr = direction, subgraph, threads, edge_attr
        self.device = graph.device if device is None else exact_device(device)
        on_gpu = self.device.type == "cuda"
        if backend in ("cpu", "gpu") and (backend == "gpu") != on_gpu:
            raise InputError(f"backend={backend!r} cannot make batches on {self.device}; use 'auto' or another device")
        self.backend = backend if backend != "auto" else "gpu" if on_gpu else "cpu"
        plain = is_plain(fanouts) and weight is None and direction == "in" and not subgraph and not apart
        _check_device(graph, self.device, plain)
        self.adj = graph.adj if direction == "in" else graph.adj.transposed()
        self._weight = None if weight is None else self._reordered(weight.to(torch.float32)).contiguous()
        self._edge_weight = None if graph.adj.weight is None else self._reordered(graph.adj.weight)
        self._relation = None if graph.relation is None else self._reordered(graph.relation)
        self._edge_attr = self._reordered(graph.edge_attr) if edge_attr and graph.edge_attr is not None else None
        self._rows = RelationRows.of(self.adj, self._relation, graph.num_relations) if apart else None
        self._degrees, self._full = degrees, None
        self._offsets = self.adj.indptr.to(self.device)  # read twice per row: worth 4 or 8 bytes per node there
        away = cached is not None and cached.numel() > 0 and self.adj.device != self.device
        self.cached = cached_lists(self.adj, cached, self.device) if away else None
        if backend == "paper" and on_gpu:  # compiled here: not while a step is captured, and refused before the first
            paper_kernels(self._offsets, self.device)
        self._idle: dict[int, list[HopSampler]] = {}
        self._lock = threading.Lock()

    @property
    def full_degrees(self) -> tuple[Tensor, Tensor]:
        """``(D^-1/2 [N], degree [N])`` of the whole graph, where batches are made."""
        if self._full is None:
            scale, degree = gcn_degrees(self.adj)
            self._full = scale.to(self.device), degree.to(self.device)
        return self._full

    def _reordered(self, values: Tensor) -> Tensor:
        """Numbers per edge of the graph in the order of the matrix that is sampled."""
        return values if self.direction == "in" else values[self.adj.perm.long()]

    def sample(self, seeds: Tensor, epoch: int = 0, batch: int = 0) -> MiniBatch | Subgraph:
        """The batch of ``seeds [S]`` (node ids, repeated ones keep their rows)."""
        seeds = check_seeds(seeds, self.graph.num_nodes).to(self.device)
        clock = make_clock(self.seed, epoch, batch, self.device)
        with self._hop_sampler() as sampler:
            hops = sampler(seeds, self.fanouts, clock, "new" if self.subgraph else "all")
        if not self.subgraph:
            blocks = [self._block(hop) for hop in reversed(hops)]
            return MiniBatch(tuple(blocks), hops[-1].nodes, seeds, epoch, batch)
        edges, parts = local_edges(hops), [self._per_edge(hop) for hop in hops]
        joined = {
            name: None if parts[0][name] is None else torch.cat([part[name] for part in parts]) for name in parts[0]
        }
        if self._edge_attr is not None:
            picked = [self._edge_attr.index_select(0, self._in_matrix(hop.edges).long()) for hop in hops]
            joined["edge_attr"] = torch.cat(picked)
        counts = [seeds.numel(), *(hop.nodes.numel() for hop in hops)]
        added = [after - before for before, after in pairwise(counts)]
        return Subgraph(
            edges if self.direction == "in" else edges.flip(0),
            hops[-1].nodes,
            seeds.numel(),
            epoch=epoch,
            batch=batch,
            num_relations=self.graph.num_relations,
            by_hop=[(nodes, hop.indices.numel()) for nodes, hop in zip(added, hops, strict=True)],
            **joined,
        )

    def sample_padded(self, seeds: Tensor, clock: Tensor) -> list[DeviceHop]:
        """The hops of a batch on the GPU, padded to their capacity, seeds outwards, with nothing read back.

        For steps that are captured as a CUDA graph: shapes depend on the number of seeds alone, and a replay samples
        for what ``seeds [S]`` int32 (valid ids) and ``clock [3]`` then hold. Needs uniform sampling and fan-outs from
        1 to 1,024.
        """
        with self._hop_sampler() as sampler:
            if not isinstance(sampler, TritonHops):
                raise InputError(f"backend={self.backend!r} with fan-outs {list(self.fanouts)} has no padded batches")
            return sampler.padded(seeds, self.fanouts, clock)

    @contextmanager
    def _hop_sampler(self) -> Iterator[HopSampler]:
        """Borrow a hop sampler for exclusive use: it keeps a table with one entry per node."""
        # The work of one CUDA stream is in order, so an idle table may be used again there, not on another stream.
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        with self._lock:
            idle = self._idle.setdefault(stream, [])
            sampler = idle.pop() if idle else None
        sampler = sampler or self._make_hops()
        yield sampler
        with self._lock:  # after an error the table is in an unknown state and is dropped
            idle.append(sampler)

    def _make_hops(self) -> HopSampler:
        indptr, indices, rows = self.adj.indptr, self.adj.indices, self._rows
        fits = is_plain(self.fanouts) and not self.subgraph
        if rows is not None:
            if self.backend == "cpu":
                return partial(cpu_hops, CpuSampler(rows.indptr, rows.indices, relations=rows.relations))
            plain = rows.plain_indptr()
            if fits:
                relations = RelationFanouts(rows, self.fanouts)
                return TritonHops(plain, rows.indices, self.device, edges=True, relations=relations)

            def sample(seeds: Tensor, fanout: int | tuple[int, ...], clock: Tensor, hop: int) -> HopSample:
                if isinstance(fanout, int):
                    return sample_triton(plain, rows.indices, seeds, fanout, clock, hop, edges=True)
                return sample_relations_torch(rows, seeds, fanout, clock, hop)

            return partial(torch_hops, sample)
        if self.backend == "cpu":
            options = {"replace": self.replace, "weight": self._weight, "threads": self.threads}
            return partial(cpu_hops, CpuSampler(indptr, indices, **options))
        if self.backend in COMPARED and self.device.type != "cuda":
            return partial(torch_hops, partial(sample_reservoir_torch, indptr, indices))
        launches = {"paper": (launch_paper, sample_paper), "reservoir": (launch_reservoir, sample_reservoir_triton)}
        kinds = {} if self.backend in COMPARED else {"replace": self.replace}
        padded, kernel = (partial(f, **kinds) for f in launches.get(self.backend, (launch_sample, sample_triton)))
        if self._weight is None and fits:
            edges = self._edge_weight is not None or self._relation is not None
            options = {"edges": edges, "cached": self.cached, "sample_hop": padded}
            return TritonHops(self._offsets, indices, self.device, **options)
        weighted = {} if self._weight is None else {"weight": self._weight}
        return partial(torch_hops, partial(kernel, indptr, indices, edges=True, **weighted))

    def _per_edge(self, hop: Hop) -> dict[str, Tensor | None]:
        edges = hop.edges if hop.edges is None else self._in_matrix(hop.edges)
        if edges is None:
            return {"edges": None, "weight": None, "relation": None}
        values = {"weight": self._edge_weight, "relation": self._relation}
        picked = {name: None if value is None else _values_at(value, edges) for name, value in values.items()}
        return {"edges": edges if self.direction == "in" else _values_at(self.adj.perm, edges).long(), **picked}

    def relation_at(self, edges: Tensor | None) -> Tensor | None:
        """Relations at picked ``edges``, of which those beyond the existing ones may be anything; None without any."""
        if self._relation is None or edges is None:
            return None
        return _values_at(self._relation, self._in_matrix(edges.clamp(0, max(self._relation.numel() - 1, 0))))

    def _in_matrix(self, edges: Tensor) -> Tensor:
        """Positions of picked edges in ``self.adj``: rows per relation have them in another order."""
        return edges if self._rows is None else _values_at(self._rows.order, edges).long()

    def _block(self, hop: Hop) -> Block:
        sizes = {"num_relations": self.graph.num_relations}
        block = Block(hop.indptr, hop.indices, hop.nodes.numel(), **self._per_edge(hop), **sizes)
        if self._degrees == "sampled":
            return block
        scale, degree = self.full_degrees
        rows = hop.nodes[: block.num_dst]
        return replaced(block, gcn_scale=_values_at(scale, hop.nodes), degree=_values_at(degree, rows))


def gcn_degrees(adj: Adjacency, first: int = 0) -> tuple[Tensor, Tensor]:
    """``(D^-1/2 [N], degree [N])`` of the rows of ``adj``, of which the first is node ``first``, D with added loops.

    Edges are read in chunks. A loop that the graph has keeps its weight, as in :meth:`Adjacency.with_self_loops`.
    """
    total, loops = (make(adj.num_rows, device=adj.device) for make in (torch.zeros, torch.ones))
    for rows, edges, of in edge_chunks(adj, adj.device):
        value = (of + first != adj.indices[edges]).float()
        if adj.weight is not None:
            weight, is_loop = adj.weight[edges].float(), value == 0
            loops[rows] = loop_weights(of[is_loop] - rows.start, weight[is_loop], rows.stop - rows.start)
            value *= weight
        total[rows] = row_sums(value, adj.indptr[rows.start : rows.stop + 1].long() - edges.start)
    scale = (total + loops).rsqrt()
    scale = torch.where(torch.isinf(scale), torch.zeros_like(scale), scale)
    return scale, adj.indptr.diff().long()


def padded_block(
    indptr: Tensor, indices: Tensor, nodes: Tensor, num_nodes: int, degrees: Callable[[], tuple[Tensor, Tensor]] | None
) -> PaddedAdjacency:
    """The block of a padded hop; ``degrees``: ``(D^-1/2 [N], degree [N])`` of the whole graph, if GCN counts by it."""

    def full() -> tuple[Tensor, Tensor]:
        there = nodes.clamp(0, num_nodes - 1).long()  # beyond the existing ones they hold anything
        scale, degree = degrees()
        return scale.index_select(0, there), degree.index_select(0, there[: indptr.numel() - 1])

    return PaddedAdjacency(indptr, indices, nodes.numel(), full=None if degrees is None else full)


def resolved(fanouts: Sequence[Any], graph: Graph) -> tuple[Fanout, ...]:
    """Fan-outs as they are sampled: a number, or one per relation of the graph, for every hop."""
    if len(fanouts) == 0:
        raise InputError("fanouts=[] must hold one number per layer, such as [15, 10, 5]")
    fanouts = [int(fanout) if isinstance(fanout, Integral) else fanout for fanout in fanouts]
    if all(isinstance(fanout, int) for fanout in fanouts):
        return tuple(fanouts)
    return resolve(fanouts, graph.num_relations, graph.stats().relation_edges)


def is_plain(fanouts: Sequence[Fanout]) -> bool:
    """Whether every hop can be sampled by the GPU's own kernels, nothing read back."""
    counts = [k for fanout in fanouts for k in ((fanout,) if isinstance(fanout, int) else fanout)]
    return all(k != FULL and k <= LARGEST_FANOUT for k in counts)


def _check_device(graph: Graph, device: torch.device, plain: bool) -> None:
    """A GPU reads a graph on it, or for plain sampling one in pinned memory; a CPU one in its memory."""
    if graph.device.type == device.type:
        return
    if device.type == "cpu" or not graph.adj.indices.is_pinned():
        raise InputError(f"{device} cannot sample a graph on {graph.device}; move it with graph.to() or pin its memory")
    if not plain:
        raise InputError(
            "a GPU samples a graph in host memory only uniformly, along in-edges, as blocks and with fan-outs from 1 "
            f"to {LARGEST_FANOUT}; move the graph with graph.to({str(device)!r})"
        )


def _values_at(values: Tensor, ids: Tensor) -> Tensor:
    """``values[ids]``, also when a GPU has the ids and pinned host memory the values."""
    if values.device == ids.device:
        return values[ids.long()]
    return gather_rows_triton(values[:, None], ids)[:, 0]


def edge_chunks(adj: Adjacency, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """All edges in chunks of whole rows: the rows, the edges, and the row of each of these int32, on ``device``."""
    rows = max(1, int(EDGES_AT_ONCE * adj.num_rows / max(adj.num_edges, 1)))
    for first in range(0, adj.num_rows, rows):
        last = min(first + rows, adj.num_rows)
        begin, end = int(adj.indptr[first]), int(adj.indptr[last])
        count = adj.indptr[first : last + 1].to(device).diff().long()
        ids = torch.arange(first, last, device=device, dtype=torch.int32)
        yield slice(first, last), slice(begin, end), torch.repeat_interleave(ids, count, output_size=end - begin)


def cached_lists(adj: Adjacency, nodes: Tensor, device: torch.device) -> CachedLists:
    """The neighbour lists of ``nodes [R]`` of a graph in host memory, on ``device``."""
    nodes = nodes.cpu().long()
    begin, count = adj.indptr[nodes].long(), adj.degrees()[nodes]
    first = count.cumsum(0) - count
    total = int(count.sum())
    if total >= 2**31:
        raise InputError(
            f"a cache of {total:,} neighbours is too large; keep fewer than 2^31 of them, or the whole graph"
        )
    positions = torch.repeat_interleave(begin - first, count, output_size=total) + torch.arange(total)
    starts = torch.full((adj.num_rows,), -1, dtype=torch.int32)
    starts[nodes] = first.to(torch.int32)
    read = torch.zeros(2, dtype=torch.int64, device=device)
    return CachedLists(adj.indices[positions].to(device), starts.to(device), read)


# ---- The order of the training seeds: a permutation per epoch, cut into batches, resumable anywhere.
#
# Shapes: S seeds, B batch size.

ORDER_STREAM = 0x5EED  # keeps these draws apart from those of the samplers


@dataclass(frozen=True)
class SeedBatch(OfTensors):
    """Seeds ``[B]`` of one batch and which batch it is."""

    epoch: int
    batch: int
    seeds: Tensor


class SeedOrder:
    """Batches of ``batch_size`` seeds in an order that depends on (seed, epoch) alone; the last one may be smaller."""

    def __init__(self, seeds: Tensor, batch_size: int, seed: int = 0) -> None:
        if batch_size < 1:
            raise InputError(f"batch={batch_size} must be at least 1 seed per batch")
        if seeds.numel() == 0:
            raise InputError("there are no training seeds; give the graph a train split")
        self.seeds, self.batch_size, self.seed = seeds, batch_size, seed

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.seeds.numel() // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        """The order ``[S]`` int64 of the seeds in an epoch: sorted by random 64-bit keys."""
        positions = torch.arange(self.seeds.numel(), device=self.seeds.device)
        key = torch.tensor([signed64(self.seed), signed64(epoch)], device=self.seeds.device)
        key = splitmix(splitmix(splitmix(key[0]) + key[1]) + ORDER_STREAM)
        # A sort by full 64-bit keys: equal ones are too rare to matter and keep their order.
        return torch.sort(splitmix(key ^ splitmix(positions)), stable=True).indices

    def epoch(self, epoch: int, start: int = 0) -> Iterator[SeedBatch]:
        """The batches of an epoch from batch ``start`` on."""
        if not 0 <= start <= len(self):
            raise InputError(f"batch {start} must be from 0 to {len(self)}, the batches of an epoch")
        order = self.permutation(epoch)
        for batch in range(start, len(self)):
            part = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield SeedBatch(epoch, batch, self.seeds[part])

    def epochs(self, count: int, epoch: int = 0, batch: int = 0) -> Iterator[SeedBatch]:
        """The batches of all epochs up to ``count``, resumed at (epoch, batch)."""
        for number in range(epoch, count):
            yield from self.epoch(number, batch if number == epoch else 0)


# ---- Upper bounds on the size of a sampled batch, from the fan-outs alone.


@dataclass(frozen=True)
class BatchSize:
    """``rows[h]`` nodes that hop h samples for, ``edges[h]`` that it picks at most, ``nodes`` of the whole batch.

    ``new_edges``: what all hops pick together if each samples only for the nodes that the hop before it found.
    """

    rows: tuple[int, ...]
    edges: tuple[int, ...]
    nodes: int

    @property
    def new_edges(self) -> int:
        """Of a local subgraph."""
        per_row = (edges // max(rows, 1) for rows, edges in zip(self.rows, self.edges, strict=True))
        new = (after - before for before, after in pairwise((0, *self.rows)))
        return sum(count * most for count, most in zip(new, per_row, strict=True))


def capacity(
    fanouts: Sequence[int | tuple[int, ...]], seeds: int, num_nodes: int, num_edges: int | None = None
) -> BatchSize:
    """The most that ``seeds`` and their sampled neighbours can be; hop h samples for every node found before it.

    A fan-out of -1 takes all neighbours, and so each edge of the graph once at most; where their number is not known,
    only the number of nodes bounds it. Of a hop with a fan-out per relation each edge is picked once at most, too.
    """
    rows, edges, nodes = [], [], seeds
    for fanout in fanouts:
        rows.append(nodes)
        most = most_picks(fanout)
        picked = nodes * most if most >= 0 else nodes * num_nodes if num_edges is None else num_edges
        if not isinstance(fanout, int) and num_edges is not None:
            picked = num_edges if most < 0 else picks_at_most(most, seeds, nodes, num_edges)
        edges.append(picked)
        nodes = min(nodes + picked, max(num_nodes, seeds))
    return BatchSize(tuple(rows), tuple(edges), nodes)
