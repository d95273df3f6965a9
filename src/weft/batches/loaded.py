"""Loaded: batches of a loader of the user's, such as PyG's ``NeighborLoader``; evaluation is Weft's own, exact.

Shapes: M nodes of a batch, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import Subgraph, exact_device, from_pyg, local_adjacency
from weft.batches.pipeline import named_errors
from weft.batches.sampled import Sampling
from weft.batches.source import Batch, Infer, OneByOne, SourceRequest
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops.reduce import ONE_RANK


@dataclass(frozen=True)
class Loading:
    """Makes sources of ``loader``'s batches; ``sampling`` has their size, and evaluates as the plan says."""

    loader: Any
    sampling: Sampling

    def __call__(self, request: SourceRequest) -> Loaded:
        """The source of a stack."""
        return Loaded(request, self.loader, self.sampling)


def loading_for(task: Task, loader: Any, plan: Plan | None = None) -> Loading:
    """The source of batches of ``task`` and of the tasks that share its group."""
    about = {} if plan is None else {"placement": plan.places}
    return Loading(loader, Sampling(task.fanouts, task.batch, captured=False, **about))


class Loaded(OneByOne):
    """The loader's batches, epoch after epoch, each as one local subgraph for all layers."""

    constant, reduce = False, ONE_RANK

    def __init__(self, request: SourceRequest, loader: Any, sampling: Sampling) -> None:
        self._request, self._loader, self._most = request, loader, sampling.batch
        self._device = exact_device(request.device or request.graph.device)
        self.steps_per_epoch = _length(loader)
        self._seeds = _all_seeds(loader, self.steps_per_epoch, sampling.batch)
        self._whole = sampling(request)
        self._left: tuple[int, int, Iterator[Any]] | None = None  # epoch, batches taken, and the others

    def reads(self) -> dict[str, float]:
        """What caches had of the features that were read here."""
        return self._whole.reads()

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The loader's next pass, or the rest of one that was left; that of another process cannot be continued."""
        if first == 0:
            self._left = (epoch, 0, named_errors(self._loader))
        elif self._left is None or self._left[:2] != (epoch, first):
            raise InputError("batches= comes from a loader, which cannot continue inside of an epoch; start afresh")
        batches = self._left[2]
        for place in range(first, self.steps_per_epoch):
            batch = next(batches, None)
            if batch is None:
                raise InputError(f"the loader ended after {place} batches; its length is {self.steps_per_epoch}")
            self._left = (epoch, place + 1, batches)
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
        self._check_edges(local)
        local = self._related(local.to(self._device))
        rows = torch.arange(local.num_seeds, device=self._device)
        share = torch.full((1,), local.num_seeds / self._seeds, device=self._device)
        return Batch(self._features(local), local_adjacency(local), self._labels(local), rows, share)

    def _check_edges(self, local: Subgraph) -> None:
        """An :class:`InputError` for batches without what the model is given of edges when it is evaluated."""
        had = {"edge_weight": local.weight, "edge_type": local.relation, "edge_attr": local.edge_attr}
        lacking = next((name for name in self._request.of_edges if had[name] is None), None)
        if lacking is not None:
            raise InputError(
                f"a batch of the loader has no {lacking}, which the graph has and the model takes; give the loader's "
                "data one, or the model a graph without"
            )
        attr = self._request.graph.edge_attr if "edge_attr" in self._request.of_edges else None
        if attr is not None and local.edge_attr is not None and local.edge_attr.shape[1:] != attr.shape[1:]:
            raise InputError(
                f"edge_attr of a batch is {list(local.edge_attr.shape)}; that of the graph is {list(attr.shape)}"
            )

    def _related(self, local: Subgraph) -> Subgraph:
        relations, found = self._request.graph.num_relations, local.relation
        if found is not None and found.numel() and not 0 <= int(found.min()) <= int(found.max()) < relations:
            raise InputError(f"edge_type of the batch must be below {relations}, the number of the graph's relations")
        return replace(local, num_relations=relations)

    def _features(self, local: Subgraph) -> Tensor:
        x = self._request.x
        if local.x is None:
            return self._whole.store.read(local.nodes)
        if local.x.shape[1:] != (x.shape[1],):
            raise InputError(f"x of a batch is {list(local.x.shape)}; the graph has {x.shape[1]} features per node")
        return local.x.to(x.dtype)

    def _labels(self, local: Subgraph) -> Tensor:
        y, found = self._request.graph.y, local.y
        if found is None:
            return y[local.nodes.to(y.device).long()].to(self._device)
        shape = (found.shape[0], *y.shape[1:])
        if found.numel() != prod(shape):
            raise InputError(f"y of a batch is {list(found.shape)}; that of the graph is {list(y.shape)}")
        return found.reshape(shape).to(y.dtype)

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Exact logits of all nodes."""
        return self._whole.logits(infer, layers)

    def rows(self, split: str) -> Tensor:
        """The ids of the split's nodes."""
        return self._whole.rows(split)

    def labels(self) -> Tensor:
        """Of all nodes."""
        return self._whole.labels()


def _length(loader: Any) -> int:
    if not hasattr(loader, "__iter__") or not hasattr(loader, "__len__"):
        raise InputError(f"batches= must be a loader that can be passed over again and has a length, not {loader!r}")
    if len(loader) == 0:
        raise InputError("the loader has no batches")
    return len(loader)


def _all_seeds(loader: Any, steps: int, batch: int) -> int:
    """Seeds of an epoch: what the loader says, else what a list of batches has, else full batches."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__"):
        dropped = len(dataset) % batch if getattr(loader, "drop_last", False) else 0
        return max(len(dataset) - dropped, 1)
    if isinstance(loader, (list, tuple)):
        return sum(from_pyg(one).num_seeds for one in loader)
    return steps * batch
