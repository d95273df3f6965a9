"""Cases that ranks train, and what rank 0 found of each; a module of its own so that spawned ranks can import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.graphs_for_tests import tiny_graph
from weft.batches.sharded import Shard
from weft.core.plan import Plan
from weft.core.task import Task
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardGraph
from weft.graph.graph import Graph
from weft.nn.gcn import GCNConv
from weft.nn.sage import SAGEConv
from weft.ops.sharded.sharded_spmm import ShardedLaunch
from weft.planner.partition import split_by_edges
from weft.runtime.group import GroupRun

CPU = torch.device("cpu")


class TwoBranches(nn.Module):
    """A user's module over Weft's layers, with torch's own dropout between them."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 8) -> None:
        super().__init__()
        self.left, self.right = GCNConv(in_features, hidden), SAGEConv(in_features, hidden)
        self.out = GCNConv(2 * hidden, out_features)

    def forward(self, x: Tensor, adj: Any) -> Tensor:
        both = torch.cat([self.left(x, adj), self.right(x, adj)], -1).relu()
        return self.out(F.dropout(both, 0.3, self.training), adj)


def hub_graph() -> Graph:
    """Node 20 of 40 has an edge from and to every node; a directed ring besides."""
    ids = torch.arange(40)
    hub = torch.full((40,), 20)
    src, dst = torch.cat([ids, hub, ids]), torch.cat([hub, ids, (ids + 1) % 40])
    torch.manual_seed(3)
    graph = Graph.from_edges(
        src, dst, 40, x=torch.randn(40, 6), y=ids % 3, edge_weight=torch.rand(120), directed=True, name="hub"
    )
    return graph.random_split(train=15, val=10, seed=1)


def directed_graph() -> Graph:
    """Edges one way only, some loops, nodes without edges, labels learned on few nodes at one end."""
    torch.manual_seed(5)
    src, dst = torch.randint(0, 30, (2, 90))
    x = torch.randn(36, 5)
    splits = {"train": torch.arange(4), "val": torch.arange(4, 20), "test": torch.arange(20, 30)}
    return Graph.from_edges(src, dst, 36, x=x, y=torch.arange(36) % 3, directed=True, name="directed", **splits)


GRAPHS = {
    "tiny": tiny_graph,
    "weighted": lambda: tiny_graph(weighted=True),
    "sparse": lambda: tiny_graph(sparse=True),
    "multilabel": lambda: tiny_graph(multilabel=True),
    "hub": hub_graph,
    "directed": directed_graph,
}


@dataclass(frozen=True)
class Case:
    """A group of tasks on one of ``GRAPHS``; ``bounds``: node ranges, by edges if None."""

    name: str
    tasks: tuple[Task, ...]
    graph: str = "tiny"
    epochs: int = 10
    bounds: tuple[int, ...] | None = None
    first_layer: str = "per_step"
    plan: dict[str, Any] = field(default_factory=dict)
    way: str = "staged"  # of the sum on a GPU

    def group(self, graph: Graph, device: torch.device = CPU, **options: Any) -> GroupRun:
        join = "stacked" if len(self.tasks) > 1 else "solo"
        names = tuple(task.label for task in self.tasks)
        plan = Plan(names, join=join, first_layer=self.first_layer, **self.plan)
        return GroupRun(self.tasks, graph, plan, device, **options)


def train_alone(case: Case, device: torch.device = CPU) -> dict[str, Any]:
    """The case on one rank."""
    return _outcome(case.group(GRAPHS[case.graph](), device), case)


def train_sharded(ranks: Ranks, case: Case, poison: bool = True) -> dict[str, Any]:
    """The same over ``ranks``."""
    whole = GRAPHS[case.graph]()
    bounds = case.bounds or split_by_edges(whole.adj.indptr.tolist(), ranks.ranks).bounds
    ranks.staging.poison, ranks.staging.launch = poison, ShardedLaunch(way=case.way)
    graph = ShardGraph(whole, bounds, ranks)
    return _outcome(case.group(graph, ranks.device, make_source=partial(Shard, ranks=ranks)), case)


def _outcome(run: GroupRun, case: Case) -> dict[str, Any]:
    updates = run.advance(case.epochs)
    state = [stack.state for stack in run.stacks]
    # Weights over sparse features lie transposed on one rank, and as they are over several.
    flats = [stack.members.layout.in_order(row) for stack in run.stacks for row in stack.state.flat]
    return {
        "rows": torch.tensor([update.rows for update in updates], dtype=torch.float64),
        "weights": torch.cat(flats).cpu(),
        "buffers": {name: value.cpu().clone() for one in state for name, value in one.buffers.items()},
        "stacks": len(run.stacks),
    }


def train_all(ranks: Ranks, cases: list[Case]) -> list[dict[str, Any]]:
    """Every case in turn: what the ranks run."""
    torch.set_num_threads(1)
    return [train_sharded(ranks, case) for case in cases]


def work(ranks: Ranks, cases: list[Case]) -> None:
    """A spawned rank."""
    found = train_all(ranks, cases)
    ranks.gather_objects([(one["rows"], one["weights"]) for one in found])
