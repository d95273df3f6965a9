"""Loaded: batches of a loader of the user's, such as PyG's ``NeighborLoader``; evaluation is Weft's own, exact.

Shapes: M nodes of a batch, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from weft.batches.block import Subgraph, exact_device, from_pyg, local_adjacency
from weft.batches.pipeline import named_errors
from weft.batches.sampled import Sampling
from weft.batches.source import Batch, MakeSource, OneByOne, SourceRequest
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops.reduce import ONE_RANK


def loading_for(task: Task, loader: Any, plan: Plan | None = None) -> MakeSource:
    """The source of batches of ``task`` and of the tasks that share its group."""
    placement = None if plan is None else plan.places
    sampling = Sampling(task.fanouts, task.batch, captured=False, placement=placement)
    return partial(Loaded, loader=loader, sampling=sampling)


class Loaded(OneByOne):
    """The loader's batches, epoch after epoch, each as one local subgraph for all layers.

    ``sampling`` has their size, and evaluates as the plan says.
    """

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, loader: Any, sampling: Sampling) -> None:
        self._request, self._loader, self._most = request, loader, sampling.batch
        self._device = exact_device(request.device or request.graph.device)
        if not hasattr(loader, "__iter__") or not hasattr(loader, "__len__"):
            raise InputError(
                f"batches= must be a loader that can be passed over again and has a length, not {loader!r}"
            )
        if len(loader) == 0:
            raise InputError("the loader has no batches")
        self.steps_per_epoch = len(loader)
        # Seeds of an epoch: what the loader says, else what a list of batches has, else full batches.
        dataset = getattr(loader, "dataset", None)
        if dataset is not None and hasattr(dataset, "__len__"):
            dropped = len(dataset) % sampling.batch if getattr(loader, "drop_last", False) else 0
            self._seeds = max(len(dataset) - dropped, 1)
        elif isinstance(loader, (list, tuple)):
            self._seeds = sum(from_pyg(batch).num_seeds for batch in loader)
        else:
            self._seeds = self.steps_per_epoch * sampling.batch
        whole = sampling(request)  # reads features, and evaluates
        self._store = whole.store
        self.reads, self.logits, self.rows, self.labels = whole.reads, whole.logits, whole.rows, whole.labels
        self._pass: tuple[int, int, Iterator[Any]] | None = None  # epoch, batches taken, and the rest

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The loader's next pass, or the rest of one that was left; that of another process cannot be continued."""
        if first == 0:
            self._pass = (epoch, 0, named_errors(self._loader))
        elif self._pass is None or self._pass[:2] != (epoch, first):
            raise InputError("batches= comes from a loader, which cannot continue inside of an epoch; start afresh")
        batches = self._pass[2]
        for number in range(first, self.steps_per_epoch):
            batch = next(batches, None)
            if batch is None:
                raise InputError(f"the loader ended after {number} batches; its length is {self.steps_per_epoch}")
            self._pass = (epoch, number + 1, batches)
            yield self._batch(from_pyg(batch))

    def example(self) -> Batch:
        """A first batch; the loader begins again after it."""
        for batch in named_errors(self._loader):
            return self._batch(from_pyg(batch))
        raise InputError("the loader has no batches")

    def _batch(self, local: Subgraph) -> Batch:
        if local.num_seeds > self._most:
            raise InputError(
                f"the loader gave {local.num_seeds} seeds, the task says batch={self._most}; "
                "give the task the loader's batch_size"
            )
        self._check(local)
        graph, x, device = self._request.graph, self._request.x, self._device
        local = replace(local.to(device), num_relations=graph.num_relations)
        features = self._store.read(local.nodes) if local.x is None else local.x.to(x.dtype)
        if local.y is None:
            labels = graph.y[local.nodes.to(graph.y.device).long()].to(device)
        else:
            labels = local.y.reshape(local.y.shape[0], *graph.y.shape[1:]).to(graph.y.dtype)
        rows = torch.arange(local.num_seeds, device=device)
        share = torch.full((1,), local.num_seeds / self._seeds, device=device)
        return Batch(features, local_adjacency(local), labels, rows, share)

    def _check(self, local: Subgraph) -> None:
        """An :class:`InputError` for a batch that does not fit the graph, or lacks what the model takes of edges."""
        graph, width = self._request.graph, self._request.x.shape[1]
        had = {"edge_weight": local.weight, "edge_type": local.relation, "edge_attr": local.edge_attr}
        lacking = next((name for name in self._request.of_edges if had[name] is None), None)
        if lacking is not None:
            raise InputError(
                f"a batch of the loader has no {lacking}, which the graph has and the model takes; give the loader's "
                "data one, or the model a graph without"
            )
        attr = graph.edge_attr if "edge_attr" in self._request.of_edges else None
        if attr is not None and local.edge_attr is not None and local.edge_attr.shape[1:] != attr.shape[1:]:
            raise InputError(
                f"edge_attr of a batch is {list(local.edge_attr.shape)}; that of the graph is {list(attr.shape)}"
            )
        relation, relations = local.relation, graph.num_relations
        if relation is not None and relation.numel():
            low, high = (int(end) for end in torch.aminmax(relation))
            if not 0 <= low <= high < relations:
                raise InputError(
                    f"edge_type of the batch must be below {relations}, the number of the graph's relations"
                )
        if local.x is not None and local.x.shape[1:] != (width,):
            raise InputError(f"x of a batch is {list(local.x.shape)}; the graph has {width} features per node")
        if local.y is not None and local.y.numel() != prod((local.y.shape[0], *graph.y.shape[1:])):
            raise InputError(f"y of a batch is {list(local.y.shape)}; that of the graph is {list(graph.y.shape)}")
