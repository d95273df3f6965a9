"""Steps of users' modules as they are and through Inductor: an epoch, memory, and what compiling takes and should take.

    python -m benchmarks.suites.compiled --out compiled.json

``pyg-*``: PyG's models as they come, called with ``(x, edge_index)``; normalisation and self loops are theirs to add in
every call. ``chain``: Weft's layers with activations, norms and dense layers of torch's between them, alone or stacked.
``gcn``: a built-in model, of which nothing is left to fuse. *Plain* is Weft's step as it is, recorded where it can be;
*compiled* the same through Inductor. ``foreseen_*`` is what the plan reckons with (``weft.planner.cost.inductor``).
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baselines.modules import opaque_module
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import Memory, time_until
from benchmarks.harness.weft_side import MOST_EPOCHS, eager_memory, group_epoch
from weft.core.task import Task
from weft.engine.estimator import Estimator
from weft.engine.graphs import Graphs
from weft.graph.graph import Graph
from weft.nn import GCNConv
from weft.ops import Adjacency
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.machine_profiles import PROFILES

CASES: dict[str, tuple[str, int]] = {
    "pyg-gcn": ("pyg-gcn", 1),
    "pyg-sage": ("pyg-sage", 1),
    "pyg-gin": ("pyg-gin", 1),
    "pyg-gat": ("pyg-gat", 1),
    "chain": ("chain", 1),
    "chain-8": ("chain", 8),
    "gcn": ("gcn", 1),
}


class Chain(nn.Module):
    """``h = norm(GCN(h)); h = drop(gelu(h) * sigmoid(h) + silu(linear(h)))``, twice, and a last GCN layer."""

    def __init__(self, in_features: int, out_features: int, hidden: int = 64) -> None:
        super().__init__()
        sizes = (in_features, hidden, hidden)
        self.convs = nn.ModuleList(GCNConv(*sizes[place : place + 2]) for place in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.dense = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.drop, self.last = nn.Dropout(0.5), GCNConv(hidden, out_features)

    def forward(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Logits ``[N, C]``."""
        for conv, norm, dense in zip(self.convs, self.norms, self.dense, strict=True):
            h = norm(conv(x, adj))
            x = self.drop(F.gelu(h) * torch.sigmoid(h) + F.silu(dense(h)))
        return self.last(x, adj)


def model_of(name: str) -> Any:
    """What a task takes as its model."""
    return Chain if name == "chain" else opaque_module(name) if name.startswith("pyg") else name


def tasks_of(case: str, graph: Graph) -> list[Task]:
    """The tasks of a case, evaluated at the very end only."""
    name, members = CASES[case]
    model, often = model_of(name), {"epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return [
        Task(graph=graph, model=model, seed=seed, name=f"{case}-{seed}", convert=False, **often)
        for seed in range(members)
    ]


def measure(case: str, side: str, graph: Graph, args: Namespace) -> dict[str, Any]:
    """Milliseconds of an epoch, seconds until it could begin, and memory."""
    tasks = tasks_of(case, graph)
    plan = replace(plan_as_one_group(tasks, graph.stats(), graph.device.type), compiled=side == "compiled")
    memory = Memory(graph.device)
    begin = time.perf_counter()
    weft = group_epoch(tasks, graph, plan=plan)
    preparing = time.perf_counter() - begin
    timing = time_until(weft.train, graph.device, warmup=3, repeats=30, seconds=args.seconds, least=5)
    peak, added = eager_memory(memory, weft)
    return {
        "ms": timing.ms,
        "preparing_seconds": preparing,
        "recorded": weft.recorded,
        "peak_gb": peak,
        "added_gb": added,
        "notes": weft.notes,
        "timing": timing.to_dict(),
        **(foreseen(tasks, graph) if side == "compiled" else {}),
    }


def foreseen(tasks: list[Task], graph: Graph) -> dict[str, float]:
    """What the plan expects compiling to save an epoch, and to take."""
    estimator = Estimator(PROFILES["h200"], None, Graphs(find=lambda task: graph))
    plan = plan_as_one_group(tasks, graph.stats(), "cuda")
    found = estimator.compiling(estimator.together(tasks, plan), tasks[0], plan)
    if found is None:
        return {}
    return {"foreseen_saved_ms": found.saved * 1e3, "foreseen_compile_seconds": found.seconds}


def print_report(recorder: Recorder, args: Namespace) -> None:
    """A row a case."""
    rows = []
    for case in listed(args.cases):
        plain, fast = (find(recorder.cells, case=case, side=side) or {} for side in ("plain", "compiled"))
        if not plain.get("ms") or not fast.get("ms"):
            rows.append([case, plain.get("ms"), fast.get("ms"), *[None] * 7])
            continue
        compiling = fast["preparing_seconds"] - plain["preparing_seconds"]
        saved = plain["ms"] - fast["ms"]
        ratio, expected = (
            plain["ms"] / fast["ms"],
            (fast.get("foreseen_saved_ms"), fast.get("foreseen_compile_seconds")),
        )
        times = (plain["ms"], fast["ms"], ratio, saved, expected[0], compiling, expected[1])
        rows.append([case, *times, plain["peak_gb"], fast["peak_gb"]])
    names = [
        "plain ms",
        "compiled ms",
        "ratio",
        "saved ms",
        "foreseen",
        "compile s",
        "foreseen",
        "GB plain",
        "GB compiled",
    ]
    print_table(["case", *names], rows)
    recorder.save()


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--shape", default="arxiv")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed seconds of one cell")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("compiled", args)
    graph = recorder.prepare(f"graph {args.shape}", lambda: make_graph(args.shape, recorder.device, args.scale))
    for case in listed(args.cases) if graph is not None else []:
        for side in ("plain", "compiled"):
            recorder.cell({"case": case, "side": side}, lambda c=case, s=side: measure(c, s, fresh(graph), args))
    print_report(recorder, args)


if __name__ == "__main__":
    main()
