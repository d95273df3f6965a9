"""Sampled training end to end: seconds per epoch of SAGE, by where features lie and how stages overlap.

    python -m benchmarks.suites.sampled_epoch --out sampled_epoch.json

SAGE, 3 layers of 256, fan-out [15, 10, 5], batches of 1,024 seeds, on the products shape (196,615 training nodes: 193
steps per epoch). Cells: features on the GPU or in pinned host memory; ``depth`` 1 (synchronous) or more (pipelined);
one task, or a sweep of 8 that shares batches. ``--steps`` steps are timed after ``--warmup``, and
``epoch_seconds`` is their mean time the number of steps of an epoch: extrapolated, without evaluation. ``stages`` has
each stage's seconds at work per step and as a share of the step; stages of a pipeline overlap, so shares may add up to
more than 1, and on a GPU a stage's time is that of its host thread. PyG's NeighborLoader with the same model is a side
if torch_sparse or pyg_lib is installed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed, print_table
from benchmarks.harness.timing import Memory, synchronize
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.batches.sampled_source import Sampled, Sampling
from weft.runtime.batches.source import SourceRequest
from weft.runtime.group import GroupRun

MOST_EPOCHS = 2000  # more than are trained: nothing is evaluated
PLACES = ("device", "pinned")


class Clock:
    """``stop()`` after every step: reads the clock after ``warmup`` steps and after ``steps`` more, then ends."""

    def __init__(self, device: torch.device, warmup: int, steps: int, at_start: Callable[[], None]) -> None:
        self._device, self._begin, self._end, self._at_start = device, warmup, warmup + steps, at_start
        self._done, self._since, self.seconds = 0, 0.0, 0.0

    def stop(self) -> bool:
        """Whether enough has been timed."""
        self._done += 1
        if self._done == self._begin:
            synchronize(self._device)
            self._at_start()
            self._since = time.perf_counter()
        elif self._done == self._end:
            synchronize(self._device)
            self.seconds = time.perf_counter() - self._since
        return self._done >= self._end


def tasks_of(graph: Graph, count: int, args: Namespace) -> list[Task]:
    """``count`` tasks that differ in their rate and seed."""
    about = {"layers": len(fanouts(args)), "hidden": args.hidden, "dropout": 0.5}
    often = {"epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return [
        Task(graph=graph, model="sage", name=f"sage-{place}", seed=place, lr=0.003 * (1 + place / 8), **about, **often)
        for place in range(count)
    ]


def fanouts(args: Namespace) -> tuple[int, ...]:
    """Neighbours per hop."""
    return tuple(int(text) for text in listed(args.fanout))


def source_of(place: str, depth: int, args: Namespace) -> Callable[[SourceRequest], Sampled]:
    """Batches of sampled neighbourhoods with features from ``place``."""
    # One synchronous cell is the captured step, which has no stages; deeper ones are made by stages.
    sampling = Sampling(fanouts(args), args.batch, depth=depth, workers=args.workers, captured=depth == 1)

    def make(request: SourceRequest) -> Sampled:
        if place == "pinned":
            request = replace(request, x=request.x.cpu().pin_memory())
        return Sampled(request, sampling)

    return make


def measure(graph: Graph, place: str, depth: int, count: int, args: Namespace) -> dict[str, Any]:
    """Seconds of steps, of each stage, and of an epoch by extrapolation."""
    device = graph.device
    if place == "pinned" and device.type != "cuda":
        raise NotHere("pinned host memory is read by a GPU; there is none")
    tasks, memory = tasks_of(graph, count, args), Memory(device)
    join = "stacked" if count > 1 else "solo"
    plan = Plan(tuple(task.name for task in tasks), join=join, device=device.type, replay=device.type == "cuda")
    run = GroupRun(tasks, graph, plan, device, make_source=source_of(place, depth, args))
    source = run.stacks[0].source
    before: dict[str, tuple[int, float]] = {}

    def note_reports() -> None:
        before.update({one.name: (one.items, one.busy_seconds) for one in source.pipeline.reports})

    clock = Clock(device, args.warmup, args.steps, note_reports)
    while not clock.seconds:
        run.advance(MOST_EPOCHS, clock.stop)
    step = clock.seconds / args.steps
    stages = {one.name: _stage(one, before[one.name], step) for one in source.pipeline.reports}
    alone = 1 - sum(stage["share"] for stage in stages.values()) if depth == 1 else None
    return {
        "ms": round(1e3 * step, 4),
        "ms_per_task": round(1e3 * step / count, 4),
        "epoch_seconds": round(step * source.steps_per_epoch, 4),
        "extrapolated": args.steps != source.steps_per_epoch,
        "steps": args.steps,
        "steps_per_epoch": source.steps_per_epoch,
        "stages": stages,
        "training_share": None if alone is None else round(alone, 4),
        "peak_gb": memory.peak_gb(),
        "notes": run.notes,
    }


def _stage(report: Any, before: tuple[int, float], step: float) -> dict[str, float]:
    items, busy = report.items - before[0], report.busy_seconds - before[1]
    per_item = busy / max(items, 1)
    return {"ms": round(1e3 * per_item, 4), "share": round(per_item / step, 4), "held_back": report.held_back}


# ---- PyG ---------------------------------------------------------------------------------------------


def measure_pyg(graph: Graph, args: Namespace) -> dict[str, Any]:
    """The same model on batches of PyG's NeighborLoader, one after another in this process."""
    device, batches = graph.device, pyg_batches(graph, args)
    from torch_geometric.nn import GraphSAGE

    model = GraphSAGE(graph.num_features, args.hidden, len(fanouts(args)), graph.num_classes, dropout=0.5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
    model.train()
    clock = Clock(device, args.warmup, args.steps, lambda: None)
    for batch in batches:
        batch = batch.to(device)
        optimizer.zero_grad()
        logits = model(batch.x, batch.edge_index)[: batch.batch_size]
        F.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
        optimizer.step()
        if clock.stop():
            break
    step, per_epoch = clock.seconds / args.steps, -(-graph.train.numel() // args.batch)
    found = {"ms": round(1e3 * step, 4), "ms_per_task": round(1e3 * step, 4), "steps": args.steps}
    epoch = {"epoch_seconds": round(step * per_epoch, 4), "extrapolated": True, "steps_per_epoch": per_epoch}
    return {**found, **epoch}


def pyg_batches(graph: Graph, args: Namespace) -> Iterator[Any]:
    """Batches without end; NotHere if PyG cannot sample."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
    except ImportError as error:
        raise NotHere("needs torch_geometric") from error
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        raise NotHere("PyG's NeighborLoader needs pyg_lib or torch_sparse, and neither is installed")
    data = Data(x=graph.x.cpu(), edge_index=graph.edge_index().cpu(), y=graph.y.cpu(), num_nodes=graph.num_nodes)
    options = {"batch_size": args.batch, "input_nodes": graph.train.cpu(), "shuffle": True}
    loader = NeighborLoader(data, num_neighbors=list(fanouts(args)), **options)

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    return forever()


# ---- cells -------------------------------------------------------------------------------------------


def run_all(recorder: Recorder, graph: Graph, args: Namespace) -> None:
    """One task in every place and depth, then sweeps on shared batches, then PyG."""
    single = [(place, depth, 1) for place in listed(args.places) for depth in map(int, listed(args.depths))]
    deepest = max(map(int, listed(args.depths)))
    swept = [(place, deepest, count) for place in listed(args.places) for count in map(int, listed(args.tasks))]
    for place, depth, count in dict.fromkeys([*single, *swept]):
        key = {"shape": args.shape, "features": place, "depth": depth, "tasks": count, "side": "weft"}
        recorder.cell(key, lambda p=place, d=depth, c=count: measure(fresh(graph), p, d, c, args))
    key = {"shape": args.shape, "features": "host", "depth": 1, "tasks": 1, "side": "pyg"}
    recorder.cell(key, lambda: measure_pyg(graph, args))


def print_report(recorder: Recorder) -> None:
    """A row per cell."""
    rows = []
    for cell in recorder.cells:
        if cell["status"] != "ok":
            print(f"{cell['side']} {cell['features']}: {cell.get('reason') or cell.get('error')}")
            continue
        shares = {name: one["share"] for name, one in cell.get("stages", {}).items()}
        rows.append([cell["side"], cell["features"], cell["depth"], cell["tasks"], cell["ms"], cell["ms_per_task"],
                     cell["epoch_seconds"], *(shares.get(name) for name in ("sample", "fetch", "transfer")),
                     cell.get("training_share"), cell.get("peak_gb")])  # fmt: skip
    print_table(["side", "features", "depth", "T", "ms per step", "per task", "epoch s (extrapolated)",
                 "sample share", "fetch share", "transfer share", "training share", "GB"], rows)  # fmt: skip
    recorder.save()


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", default="products")
    parser.add_argument("--places", default=",".join(PLACES), help="where features lie: device, pinned")
    parser.add_argument("--depths", default="1,3", help="1: synchronous; more: pipelined")
    parser.add_argument("--tasks", default="1,8", help="sizes of sweeps on shared batches")
    parser.add_argument("--fanout", default="15,10,5", help="neighbours per hop, a layer for each")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1, help="threads that sample on a CPU")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("sampled_epoch", args)
    graph = recorder.prepare(f"graph {args.shape}", lambda: make_graph(args.shape, recorder.device, args.scale))
    if graph is not None:
        run_all(recorder, graph, args)
    print_report(recorder)


if __name__ == "__main__":
    main()
