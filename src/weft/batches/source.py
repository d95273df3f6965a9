"""Batch and Source: the input of a training step besides the state, and where it comes from.

A step takes ``(state, batch)``. A source says how many steps an epoch has and yields their batches: the whole graph is
one constant batch; a sampled graph yields blocks; a shard yields its own rows.

Shapes: M rows of the input, N rows of the logits, B rows that the loss is over, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.core.errors import InputError, OutOfMemoryError, TrainingError
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.labels import Split
from weft.graph.sparse_features import SparseFeatures
from weft.nn.pyg.edges import remember
from weft.ops.csr.adjacency import Adjacency
from weft.ops.reduce import ONE_RANK, Reduce

Features = Tensor | SparseFeatures
Infer = Callable[["Batch"], Tensor]
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Batch:
    """The input of one step.

    ``x [M, F]`` dense or sparse; ``blocks``: one adjacency for all layers, or one per layer; ``y [N]`` (or ``[N, C]``)
    labels of the rows of the logits; ``rows [B]``: those of them that the loss is over; ``share [1]``: B divided by the
    rows of all batches of an epoch, over ranks: by those of the batch on all ranks, of which there are ``of_epoch [1]``
    of the epoch's; ``first``: the model's first aggregation of ``x``, where it is constant.
    ``layer``: the one layer to run, with ``x [T, M, F]`` per member from the second on (None: the whole model).
    ``shape``: batches of equal shape can replay one CUDA graph of the step (None: never captured); ``varies``: the
    fields in which they differ.
    """

    x: Features
    blocks: Adjacency | Sequence[Adjacency]
    y: Tensor
    rows: Tensor
    share: Tensor
    first: Tensor | None = None
    layer: int | None = None
    shape: Hashable = None
    varies: tuple[str, ...] = ("rows", "share")
    of_epoch: Tensor | None = None

    def without_derived(self) -> Batch:
        """The same batch, of which operators have built nothing yet."""
        if isinstance(self.blocks, Adjacency):
            return replace(self, blocks=self.blocks.without_derived())
        return replace(self, blocks=tuple(block.without_derived() for block in self.blocks))

    @cached_property
    def edge_index(self) -> Tensor:
        """Edges ``[2, E]`` int64, sources above destinations: what PyG's layers take.

        Over ranks converted layers take the adjacency behind it. The tensor has the edges between own nodes: a module
        that computes with it has other numbers if the nodes are divided otherwise, and is refused for that.
        """
        adj = self._only_block()
        edges = torch.stack([adj.indices.long(), adj.rows().long()])
        return remember(edges[:, adj.indices < adj.num_rows] if adj.spans_ranks else edges, adj)

    @cached_property
    def adj_t(self) -> Tensor:
        """The adjacency as a sparse tensor ``[N, N]`` of torch, rows are destinations: what PyG's layers take too."""
        adj = self._only_block()
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        values = torch.ones(adj.num_edges, dtype=dtype, device=adj.device) if adj.weight is None else adj.weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the format a beta
            size = (adj.num_rows, adj.num_cols)
            matrix = torch.sparse_csr_tensor(adj.indptr.long(), adj.indices.long(), values, size)
        return remember(matrix, adj)

    @property
    def edge_weight(self) -> Tensor | None:
        """Weights of the edges ``[E]``, in the same order."""
        return self._only_block().weight

    @property
    def edge_type(self) -> Tensor | None:
        """Relations of the edges ``[E]`` int64, in the same order; None without relations."""
        relation = self._only_block().relation
        return None if relation is None else relation.long()

    @property
    def edge_attr(self) -> Tensor | None:
        """Features of the edges ``[E]`` or ``[E, D]``, in the same order."""
        return self._only_block().edge_attr

    def _only_block(self) -> Adjacency:
        if isinstance(self.blocks, Adjacency):
            return self.blocks
        raise InputError(
            f"a model that takes edge_index needs one subgraph for all layers; this batch has {len(self.blocks)} blocks"
        )

    def prepared(self) -> Batch:
        """The batch as a step takes it; one that is made on the device (sampled, gathered) is made here."""
        return self.built(self.fetched(0))

    def fetched(self, buffer: int) -> Any:
        """Sample and gather on the device, into buffers number ``buffer``; nothing where the batch is there already."""
        return None

    def built(self, fetched: Any) -> Batch:
        """The batch as a step takes it, of what :meth:`fetched` gave; everything derived from it is derived anew."""
        return self

    def tensors(self) -> list[Tensor]:
        """Every tensor that another batch of this shape has other values in, in a fixed order."""
        return [tensor for name in self.varies for tensor in _tensors_of(getattr(self, name))]

    def static_copy(self) -> Batch:
        """The same batch with memory of its own, for a CUDA graph: batches of its shape are copied into it."""
        return replace(self, **{name: _cloned(getattr(self, name)) for name in self.varies})

    def copy_(self, other: Batch) -> None:
        """Copy the values of ``other``, a batch of the same shape."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors_of(part)]
    return [] if value is None else list(value.tensors())


def _cloned(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(part) for part in value)
    return None if value is None else value.clone()


@dataclass(frozen=True)
class SourceRequest:
    """The source that a stack requests: batches of ``graph`` with features ``x`` and first aggregation ``first``.

    ``subgraph``: one adjacency for all layers, because the model does not take a block per layer. ``padding``: whether
    batches may have rows that stand for no node; not where a norm is over all rows. ``device``: where it trains (None:
    where the graph is). ``of_edges``: what the model is given per edge: some of ``edge_weight``, ``edge_type`` and
    ``edge_attr``.
    """

    graph: Graph
    x: Features
    first: Tensor | None = None
    subgraph: bool = False
    padding: bool = False
    device: torch.device | None = None
    of_edges: tuple[str, ...] = ()


class Source(Protocol):
    """Where the batches of a stack come from.

    ``constant``: every step of every epoch has the same batch, :meth:`batches` yields it again and again, and so a
    whole epoch with its evaluation can be captured. ``overlaps``: the next batch is to be made on the device while the
    current one trains (:mod:`weft.runtime.epoch`). ``rows``: where the nodes of the splits are in what
    :meth:`logits` gives, ``{"train": ..., "val": ..., "test": ...}``. ``reduce``: how rows on other ranks count in.
    """

    steps_per_epoch: int
    constant: bool
    overlaps: bool
    reduce: Reduce

    def reads(self) -> dict[str, float]:
        """What was read of features and edges, and which shares caches had; empty without caches."""

    def counters(self) -> list[Tensor]:
        """What making a batch on the device writes besides the batch: a trial run of a captured step restores it."""

    def batches(self, epoch: int, first: int = 0) -> Iterable[Batch]:
        """The batches of ``epoch`` from step ``first`` on."""

    def example(self) -> Batch:
        """A batch to try a model on before the first epoch."""

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Logits ``[T, N, C]`` for an evaluation; ``infer(batch)`` runs the members' models in evaluation mode.

        ``layers``: how many layers the models have, where each can be run alone; None where it cannot.
        """

    def rows(self, split: str) -> Tensor:
        """The rows of :meth:`logits` that are the nodes of ``split``."""

    def labels(self) -> Tensor:
        """Labels of all rows of :meth:`logits`."""


@runtime_checkable
class BeginsAhead(Protocol):
    """A source whose host may begin the batches of the next epoch while one ends."""

    def expect(self, epoch: int | None) -> None:
        """Epoch ``epoch`` comes after the one that is trained next; None: none does."""

    def close(self) -> None:
        """No epoch follows: give up what was begun."""


MakeSource = Callable[[SourceRequest], Source]


class OneByOne:
    """Of sources whose batches are there when they are handed out: nothing is made meanwhile, and nothing counted."""

    overlaps = False

    def reads(self) -> dict[str, float]:
        """Nothing: there is no cache."""
        return {}

    def counters(self) -> list[Tensor]:
        """None."""
        return []


class FullGraph(OneByOne):
    """The whole graph, every time: one step per epoch, one constant batch."""

    steps_per_epoch, constant, reduce = 1, True, ONE_RANK

    def __init__(self, request: SourceRequest) -> None:
        self._graph = graph = request.graph
        share = torch.ones(1, device=graph.device)
        self.batch = Batch(request.x, graph.adj, graph.y, graph.train, share, request.first, shape="full graph")

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The one batch, unless it is done already."""
        if first == 0:
            yield self.batch

    def example(self) -> Batch:
        """The batch itself."""
        return self.batch

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Of all nodes."""
        return infer(self.batch)

    def rows(self, split: str) -> Tensor:
        """The ids of the split's nodes."""
        return getattr(self._graph, split)

    def labels(self) -> Tensor:
        """Of all nodes."""
        return self._graph.y


# ---- Members of a stack on different splits of one graph: which rows each of them trains and is evaluated on.
#
# One forward and one backward pass over the graph serve all of them; only loss and metrics are over rows of their own.
#
# Shapes: T members, K members of one split.


@dataclass(frozen=True)
class MembersOfSplit:
    """The members that have one split: their positions in the stack, also as a tensor ``[K]``."""

    positions: tuple[int, ...]
    index: Tensor
    split: Split


class StackSplits:
    """The members of a stack, split by split; no parts if the graph has but one split.

    Tensors are made here, not in a step, which may be captured as a CUDA graph.
    """

    def __init__(self, tasks: Sequence[Task], graph: Graph, device: torch.device) -> None:
        by_split: dict[int, list[int]] = {}
        for position, task in enumerate(tasks if graph.num_splits > 1 else ()):
            by_split.setdefault(task.split if isinstance(task.split, int) else 0, []).append(position)
        self.parts = [
            MembersOfSplit(tuple(members), torch.tensor(members, device=device), graph.split_rows(number))
            for number, members in by_split.items()
        ]
        order = [member for part in self.parts for member in part.positions]
        self._back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device, dtype=torch.int64)

    def compute(self, logits: Any, of_part: Callable[[int, Any], Tensor]) -> Tensor:
        """``of_part(number, logits [K, N, C])`` of every part, in the order of the members ``[T, ...]``.

        ``logits`` may be whatever a user's model returns: every tensor of it has a row per member.
        """
        if len(self.parts) == 1:
            return of_part(0, logits)
        results = []
        for number, part in enumerate(self.parts):
            rows = pytree.tree_map_only(Tensor, lambda output, part=part: output.index_select(0, part.index), logits)
            results.append(of_part(number, rows))
        return torch.cat(results).index_select(0, self._back)


class OnSplit:
    """A source whose splits are those of one :class:`Split`."""

    def __init__(self, source: Source, split: Split) -> None:
        self._source, self._split = source, split

    @property
    def reduce(self) -> Reduce:
        """As the source has it."""
        return self._source.reduce

    def rows(self, split: str) -> Tensor:
        """The nodes of ``"train"``, ``"val"`` or ``"test"``."""
        return getattr(self._split, split)

    def labels(self) -> Tensor:
        """Of all nodes."""
        return self._source.labels()


# ---- Errors of a part of the work by its name; memory that ran out stays what it is, so that less can be tried.

OF_THE_HOST = ("can't allocate memory", "std::bad_alloc")  # torch's allocator, and its C++ for what is small
# Not from torch's allocator: a context or a captured graph, the code of a kernel, handles of NVIDIA's libraries.
OF_THE_DEVICE = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "_STATUS_ALLOC_FAILED")


def is_memory_error(error: BaseException) -> bool:
    """Whether it says that memory ran out, on the device or on the host."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*OF_THE_HOST, *OF_THE_DEVICE))


@contextmanager
def named_failures(what_failed: str, besides: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Inside, errors become a :class:`TrainingError` that begins with ``what_failed``.

    Memory that ran out passes as it is, and so do the kinds of errors in ``besides``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, besides) or is_memory_error(error):
            raise
        raise failure(what_failed, error) from error


def failure(what_failed: str, error: BaseException) -> TrainingError:
    """The error that says what failed, and of what."""
    return TrainingError(f"{what_failed}: {type(error).__name__}: {error}")
