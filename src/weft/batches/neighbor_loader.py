"""NeighborLoader: PyG's loader of sampled batches, drawn by Weft's sampler.

Shapes: N nodes, E edges, S seeds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import Subgraph, exact_device
from weft.batches.pipeline import Pipeline, Stage
from weft.batches.sampler import NeighbourSampler, SeedOrder
from weft.core.errors import InputError
from weft.core.gpus import check_device_name
from weft.core.settings import Rule
from weft.core.wording import nearest_names
from weft.graph.check import as_ids, as_vector, check_range
from weft.graph.graph import Graph
from weft.nn.conv import without_weights
from weft.nn.pyg.edges import edges_of

# Other arguments of PyG's loader: those that have one possible value here, and hints that change no batch.
FIXED: dict[str, Any] = {"subgraph_type": "directional", "directed": True, "disjoint": False}
FIXED |= {"temporal_strategy": "uniform", "time_attr": None, "input_time": None}
FIXED |= {"neighbor_sampler": None, "transform_sampler_output": None}
HINTS = ("is_sorted", "filter_per_worker", "persistent_workers", "prefetch_factor")


class NeighborLoader:
    """Batches of sampled neighbourhoods of a PyG ``Data``, in place of ``torch_geometric.loader.NeighborLoader``.

    A batch is a ``Data`` with ``x``, ``y`` and every other attribute of its nodes and edges, ``edge_index``, ``n_id``
    (seeds first), ``e_id``, ``input_id``, ``batch_size``, ``num_sampled_nodes`` and ``num_sampled_edges``. Neighbours
    are drawn uniformly without replacement where the edges lie, or on ``device``, to which batches are then moved: by
    Weft's kernels on a GPU, by compiled code on a CPU. ``input_nodes`` is a mask ``[N]``, ids ``[S]``, or None for
    all nodes. Order and draws depend on ``seed`` and the number of the pass alone. ``num_workers`` are threads, which
    prepare batches in advance on a CPU. Arguments of PyG's loader that have no counterpart are refused.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],
        input_nodes: Any = None,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        replace: bool = False,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name in FIXED and value is not FIXED[name] and value != FIXED[name]:
                raise InputError(f"NeighborLoader: {name}={value!r} is not supported; leave it out")
            if name not in (*FIXED, *HINTS):
                names = (*inspect.signature(type(self)).parameters, *FIXED)
                raise InputError(f"NeighborLoader has no argument {name!r}{nearest_names(name, names)}")
        for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("seed", seed, 0)):
            Rule(int, low=least).check("NeighborLoader: ", name, value)
        edge_index = None if hasattr(data, "edge_types") else getattr(data, "edge_index", None)
        edges = None if edge_index is None else edges_of(edge_index, data.num_nodes, builds=True)
        if edges is None:
            raise InputError(
                f"NeighborLoader takes a PyG Data with an edge_index [2, E] of its nodes, not this "
                f"{type(data).__name__}; HeteroData is converted with to_homogeneous()"
            )
        if not isinstance(num_neighbors, Sequence) or not all(type(count) is int for count in num_neighbors):
            raise InputError(f"num_neighbors={num_neighbors!r} must list a number per hop, such as [15, 10] (-1: all)")
        self.data, self.num_neighbors, self.batch_size, self.drop_last = data, num_neighbors, batch_size, drop_last
        self.num_workers, self.transform = num_workers, transform
        self._shuffle, self._seed, self._target, self._pins = shuffle, seed, device, pin_memory
        where = exact_device(check_device_name(str(device or edge_index.device)))
        if where.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"NeighborLoader: device={device!r}: torch finds no CUDA device here")
        if weight_attr is not None and weight_attr not in data:
            raise InputError(f"weight_attr={weight_attr!r}: {data!r} has no such attribute")
        self._order = None if edges.order is None else edges.order.to(where)
        weight = None if weight_attr is None else data[weight_attr].to(where)
        self._sampler = NeighbourSampler(
            Graph(without_weights(edges.adj)).to(where),
            list(num_neighbors),
            replace=replace,
            weight=weight if weight is None or self._order is None else weight[self._order],
            seed=seed,
            subgraph=True,
            threads=max(num_workers, 1),
        )
        self.input_nodes, self._input_ids = _seeds(input_nodes, data.num_nodes)
        self.dataset, self._epoch = range(self.input_nodes.numel()), 0

    def __len__(self) -> int:
        """Batches per epoch."""
        count = len(self.dataset)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        order = torch.arange(len(self.dataset))
        if self._shuffle:
            order = SeedOrder(order, self.batch_size, self._seed).permutation(epoch)
        ids = enumerate(order.split(self.batch_size)[: len(self)])

        def sample(item: tuple[int, Tensor]) -> tuple[Subgraph, Tensor]:
            number, positions = item
            local: Any = self._sampler.sample(self.input_nodes[positions], epoch, number)
            return local, self._input_ids[positions]

        # Kernels of a GPU are launched in advance as it is; two batches per worker are what torch's loader prepares.
        depth = max(2 * self.num_workers, 1) if self._sampler.device.type == "cpu" else 1
        return Pipeline([Stage("sample", sample), Stage("gather", self._gather)], depth).run(ids)

    def _gather(self, item: tuple[Subgraph, Tensor]) -> Any:
        """The ``Data`` of a sampled subgraph, as PyG's loader makes it."""
        from torch_geometric.loader.utils import filter_data

        local, input_id = item
        picked = local.edges if self._order is None else self._order[local.edges]
        batch = filter_data(self.data, local.nodes.long(), *local.edge_index, picked)
        for name, values in (("n_id", local.nodes.long()), ("e_id", picked)):
            if name not in batch:
                batch[name] = values
        batch.input_id, batch.batch_size = input_id, local.num_seeds
        batch.num_sampled_nodes = [local.num_seeds, *(nodes for nodes, _ in local.by_hop or ())]
        batch.num_sampled_edges = [edges for _, edges in local.by_hop or ()]
        if self._target is not None:
            batch = batch.to(self._target)
        elif self._pins and torch.cuda.is_available():
            batch = batch.pin_memory()
        return batch if self.transform is None else self.transform(batch)


def _seeds(nodes: Any, count: int) -> tuple[Tensor, Tensor]:
    """The seeds ``[S]`` and what a batch calls them in ``input_id``: ids of a mask, else their positions."""
    if isinstance(nodes, tuple) and nodes[:1] == (None,):  # as PyG has it, with the type of the nodes
        nodes = nodes[1]
    nodes = torch.arange(count) if nodes is None else as_vector(nodes, "input_nodes").cpu()
    is_mask = nodes.dtype == torch.bool
    seeds = nodes.nonzero()[:, 0] if is_mask else as_ids(nodes, "input_nodes").long()
    if not seeds.numel() or (is_mask and nodes.numel() != count):
        what = f"input_nodes of shape {list(nodes.shape)} and type {nodes.dtype}, with {seeds.numel()} nodes,"
        raise InputError(f"{what} must be a mask of {count} nodes, or node ids, and have at least one")
    check_range(seeds, count, "input_nodes", "nodes of the data")
    return seeds, seeds if is_mask else torch.arange(seeds.numel())
