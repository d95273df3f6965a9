"""PyG's sampled training: its NeighborLoader, and steps as its examples write them.

Shapes: S seeds of a batch, M nodes of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.epochs import dense_features
from benchmarks.harness.recorder import NotHere
from weft.graph.graph import Graph


def check_pyg_samples() -> str:
    """What PyG samples with; NotHere if it cannot."""
    try:
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
    except ImportError as error:
        raise NotHere("needs torch_geometric") from error
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        raise NotHere("PyG's NeighborLoader needs pyg-lib or torch-sparse, and neither is installed")
    return "pyg-lib" if WITH_PYG_LIB else "torch-sparse"


def has_hop_sizes() -> bool:
    """Whether its batches say how many nodes and edges each hop has, which trimming needs."""
    try:
        return check_pyg_samples() == "pyg-lib"
    except NotHere:
        return False


def pyg_loader(
    graph: Graph, fanouts: Sequence[int], batch: int, workers: int = 0, features: bool = True, shuffle: bool = True
) -> Any:
    """A loader over the training nodes of ``graph``."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    data = Data(edge_index=graph.edge_index(), num_nodes=graph.num_nodes)
    if features:
        data.x, data.y = dense_features(graph), graph.y
    kept = {"persistent_workers": True} if workers else {}
    options = {"batch_size": batch, "shuffle": shuffle, "num_workers": workers, **kept}
    return NeighborLoader(data, list(fanouts), input_nodes=graph.train, **options)


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    trimmed: bool = False,
) -> Iterator[int]:
    """One step per batch, the loss over its seeds; yields the number of seeds after each."""
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        hops = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        } if trimmed else {}  # fmt: skip
        logits = model(batch.x, batch.edge_index, **hops)[: batch.batch_size]
        loss(logits, batch.y[: batch.batch_size]).backward()
        optimizer.step()
        yield batch.batch_size
