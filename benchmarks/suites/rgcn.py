"""R-GCN on relational shapes: one epoch of Weft and of PyG's RGCNConv and FastRGCNConv, and sampled steps.

    python -m benchmarks.suites.rgcn --out rgcn.json

Two layers over 64 random features, hidden 16 as in the R-GCN paper, ``bases`` or ``blocks`` 8 (a layer that the blocks
do not divide has full matrices, on every side), dropout 0.5, float32 without TF32, Adam (PyG: fused). Full-graph cells
are medians of single epochs without evaluation; ``weft-every-step`` denies Weft the first layer's means computed once.
Sampled cells time ``--steps`` steps: neighbours of all relations together (``fanout`` 15, 10) or of each relation
(``each`` 1, 1), sampling included. PyG's NeighborLoader is a side if pyg_lib or torch_sparse is installed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed, print_table
from benchmarks.harness.timing import Memory, synchronize, time_until
from benchmarks.harness.weft_side import eager_memory, group_epoch
from weft.batches.sampled import Sampling
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.runtime.device.process import matmul_precision
from weft.runtime.group import GroupRun

MOST_EPOCHS = 2000  # more than are trained: nothing is evaluated
SHARED = {"bases": {"bases": 8}, "blocks": {"blocks": 8}}
FANOUTS = {"together": (15, 10), "each": ({"each": 1}, {"each": 1})}
SIDES = ("weft", "weft-every-step", "pyg", "pyg-fast")


class Clock:
    """``stop()`` after every step: reads the clock after ``warmup`` steps and after ``steps`` more, then ends."""

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._begin, self._end = device, warmup, warmup + steps
        self._done, self._since, self.seconds = 0, 0.0, 0.0

    def stop(self) -> bool:
        """Whether enough has been timed."""
        self._done += 1
        if self._done in (self._begin, self._end):
            synchronize(self._device)
            now = time.perf_counter()
            self._since, self.seconds = now, now - self._since if self._done == self._end else 0.0
        return self._done >= self._end


def task_of(graph: Graph, sharing: str, hidden: int, **more: Any) -> Task:
    """The task of Weft's side."""
    often = {"epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return Task(graph=graph, model="rgcn", hidden=hidden, dropout=0.5, **SHARED[sharing], **often, **more)


class PygRGCN(nn.Module):
    """Two layers of PyG's, with the same decomposition."""

    def __init__(self, kind: type[nn.Module], graph: Graph, sharing: str, hidden: int) -> None:
        super().__init__()
        widths = (graph.num_features, hidden, graph.num_classes)
        self.convs = nn.ModuleList(
            kind(inputs, outputs, graph.num_relations, **_pyg_options(sharing, inputs, outputs))
            for inputs, outputs in pairwise(widths)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Logits of all nodes."""
        x = F.dropout(self.convs[0](x, edge_index, edge_type).relu(), 0.5, self.training)
        return self.convs[1](x, edge_index, edge_type)


def _pyg_options(sharing: str, inputs: int, outputs: int) -> dict[str, int]:
    if sharing == "bases":
        return {"num_bases": 8}
    return {} if inputs % 8 or outputs % 8 else {"num_blocks": 8}


def pyg_epoch(graph: Graph, sharing: str, hidden: int, fast: bool) -> Callable[[], None]:
    """One eager epoch of PyG on the whole graph."""
    try:
        from torch_geometric.nn import FastRGCNConv, RGCNConv
    except ImportError as error:
        raise NotHere("needs torch_geometric") from error
    model = PygRGCN(FastRGCNConv if fast else RGCNConv, graph, sharing, hidden).to(graph.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=graph.device.type == "cuda")
    edge_index, edge_type, rows = graph.edge_index(), graph.relation.long(), graph.train

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(graph.x, edge_index, edge_type)[rows], graph.y[rows]).backward()
        optimizer.step()

    return epoch


def measure(graph: Graph, sharing: str, side: str, args: Namespace) -> dict[str, Any]:
    """Milliseconds and peak memory of one epoch on the whole graph."""
    memory, note = Memory(graph.device), {}
    with matmul_precision("fp32"):
        if side.startswith("weft"):
            task = task_of(graph, sharing, args.hidden)
            plan = plan_as_one_group([task], graph.stats(), graph.device.type)
            plan = plan if side == "weft" else replace(plan, first_layer="per_step")
            weft = group_epoch([task], graph, plan=plan)
            epoch, note = weft.train, {"recorded": weft.recorded, "notes": weft.notes}
        else:
            epoch = pyg_epoch(graph, sharing, args.hidden, fast=side == "pyg-fast")
        timing = time_until(epoch, graph.device, warmup=2, repeats=30, seconds=args.seconds)
        peak = eager_memory(memory, weft)[0] if side.startswith("weft") else memory.peak_gb()
    return {"ms": round(timing.ms, 4), "peak_gb": peak, **note, "timing": timing.to_dict()}


def measure_sampled(graph: Graph, how: str, args: Namespace) -> dict[str, Any]:
    """Milliseconds of a sampled step."""
    device = graph.device
    task = task_of(graph, "bases", args.hidden, mode="sampled", fanout=list(FANOUTS[how]), batch=args.batch)
    plan = Plan((task.label,), device=device.type, replay=device.type == "cuda")
    memory = Memory(device)
    run = GroupRun([task], graph, plan, device, make_source=Sampling(task.fanouts, task.batch))
    clock = Clock(device, args.warmup, args.steps)
    while not clock.seconds:
        run.advance(MOST_EPOCHS, clock.stop)
    step = clock.seconds / args.steps
    per_epoch = run.stacks[0].source.steps_per_epoch
    about = {"steps": args.steps, "steps_per_epoch": per_epoch, "recorded": run.recorded, "notes": run.notes}
    return {
        "ms": round(1e3 * step, 4),
        "epoch_ms": round(1e3 * step * per_epoch, 2),
        "peak_gb": memory.peak_gb(),
        **about,
    }


def measure_pyg_sampled(graph: Graph, args: Namespace) -> dict[str, Any]:
    """Milliseconds of a step on a batch of PyG's NeighborLoader, neighbours of all relations together."""
    from torch_geometric.nn import RGCNConv

    batches = pyg_batches(graph, args)
    model = PygRGCN(RGCNConv, graph, "bases", args.hidden).to(graph.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=graph.device.type == "cuda")
    clock = Clock(graph.device, args.warmup, args.steps)
    for batch in batches:
        batch = batch.to(graph.device)
        optimizer.zero_grad()
        logits = model(batch.x, batch.edge_index, batch.edge_type)[: batch.batch_size]
        F.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
        optimizer.step()
        if clock.stop():
            break
    return {"ms": round(1e3 * clock.seconds / args.steps, 4), "steps": args.steps}


def pyg_batches(graph: Graph, args: Namespace) -> Any:
    """Batches without end; NotHere if PyG cannot sample."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
    except ImportError as error:
        raise NotHere("needs torch_geometric") from error
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        raise NotHere("PyG's NeighborLoader needs pyg_lib or torch_sparse, and neither is installed")
    here = {"x": graph.x, "y": graph.y, "edge_index": graph.edge_index(), "edge_type": graph.relation.long()}
    data = Data(**{name: value.cpu() for name, value in here.items()}, num_nodes=graph.num_nodes)
    options = {"batch_size": args.batch, "input_nodes": graph.train.cpu(), "shuffle": True}
    loader = NeighborLoader(data, num_neighbors=list(FANOUTS["together"]), **options)
    return (batch for _ in iter(int, 1) for batch in loader)


def run_all(recorder: Recorder, shape: str, graph: Graph, args: Namespace) -> None:
    """Full-graph cells of both decompositions, then sampled ones."""
    for sharing in listed(args.sharing):
        for side in SIDES:
            key = {"shape": shape, "mode": "full", "sharing": sharing, "side": side}
            recorder.cell(key, lambda s=sharing, w=side: measure(fresh(graph), s, w, args))
    for how in FANOUTS:
        key = {"shape": shape, "mode": f"sampled {how}", "sharing": "bases", "side": "weft"}
        recorder.cell(key, lambda h=how: measure_sampled(fresh(graph), h, args))
    key = {"shape": shape, "mode": "sampled together", "sharing": "bases", "side": "pyg"}
    recorder.cell(key, lambda: measure_pyg_sampled(graph, args))


def print_report(recorder: Recorder) -> None:
    """A row per cell; ``ms`` is of an epoch on the whole graph, or of a sampled step."""
    rows = []
    for cell in recorder.cells:
        failed = "" if cell["status"] == "ok" else str(cell.get("reason") or cell.get("error"))[:60]
        about = [cell[name] for name in ("shape", "mode", "sharing", "side")]
        rows.append([*about, cell.get("ms"), cell.get("epoch_ms"), cell.get("peak_gb"), cell.get("recorded"), failed])
    print_table(["shape", "mode", "sharing", "side", "ms", "sampled epoch ms", "GB", "captured", "why not"], rows)
    recorder.save()


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="bgs,am")
    parser.add_argument("--sharing", default=",".join(SHARED))
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=5, help="sampled steps before the timed ones")
    parser.add_argument("--steps", type=int, default=20, help="sampled steps that are timed")
    parser.add_argument("--seconds", type=float, default=2.0, help="about the most that timing a cell takes")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("rgcn", args)
    for shape in listed(args.shapes):
        graph = recorder.prepare(f"graph {shape}", lambda s=shape: make_graph(s, recorder.device, args.scale))
        if graph is not None:
            run_all(recorder, shape, graph, args)
            del graph
    print_report(recorder)


if __name__ == "__main__":
    main()
