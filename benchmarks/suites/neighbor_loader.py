"""Sampled training on a CPU: Weft against PyG's NeighborLoader, sampling alone and whole steps, in one run.

    python -m benchmarks.suites.neighbor_loader --out neighbor_loader.json

SAGE of 3 layers, fan-out [15, 10, 5], batches of 1,024 seeds, the arxiv shape, the same number of threads on both
sides. PyG needs torch-sparse or pyg-lib; it is given each number of worker processes in ``--pyg-workers`` in the first
turn, and the fastest in the others. Sides alternate ``--runs`` times; each time, ``--steps`` batches are timed after
``--warmup`` others, and ``epoch_seconds`` is the median of the mean time per step, times the steps of an epoch:
extrapolated, no evaluation.

Sampling: both sides give the local subgraph of a batch, edges and node ids, without features. Training: PyG runs its
``GraphSAGE`` on that subgraph, as its examples do; Weft has a block per layer, so that each layer computes only the
rows that are needed. With pyg-lib PyG can leave rows out as well (its ``trim_to_layer``); torch-sparse lacks what that
needs, so ``trimmed`` is a side only with pyg-lib. ``cpu_ms``: processor time of this process per step, which other work
on the machine does not change much; with worker processes their share is missing from it.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.baselines.neighbor_loader import check_pyg_samples, has_hop_sizes, pyg_loader, train_steps
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed, print_table
from weft.batches import NeighbourSampler, Pipeline, SeedOrder, Stage
from weft.batches.sampled import Sampling
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun

MOST_EPOCHS = 100_000  # more than are trained: nothing is evaluated


def fanouts(args: Namespace) -> list[int]:
    """Neighbours per hop."""
    return [int(text) for text in listed(args.fanout)]


def clocks() -> tuple[float, float]:
    """Seconds on the wall, and of this process on all processors."""
    return time.perf_counter(), time.process_time()


def per_step(start: tuple[float, float], args: Namespace) -> dict[str, float]:
    """Milliseconds of a step since ``start``."""
    wall, cpu = (now - then for now, then in zip(clocks(), start, strict=True))
    return {"ms": round(1e3 * wall / args.steps, 3), "cpu_ms": round(1e3 * cpu / args.steps, 3)}


def timed(items: Iterator[Any], args: Namespace) -> tuple[dict[str, float], list[Any]]:
    """Milliseconds per item and the items, without the first ``--warmup``."""
    for _ in range(args.warmup):
        next(items)
    start = clocks()
    found = [next(items) for _ in range(args.steps)]
    return per_step(start, args), found


def rates(taken: dict[str, float], sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Rates of batches of these (edges, nodes)."""
    edges, nodes = (sum(one) / len(sizes) for one in zip(*sizes, strict=True))
    return {**taken, "batches_s": round(1e3 / taken["ms"], 2), "nodes": int(nodes),
            "mega_edges_s": round(edges / taken["ms"] / 1e3, 3)}  # fmt: skip


# ---- Weft --------------------------------------------------------------------------------------------


def weft_sampling(graph: Graph, workers: int, args: Namespace) -> dict[str, Any]:
    """Local subgraphs by ``workers`` threads."""
    sampler, order = NeighbourSampler(graph, fanouts(args), subgraph=True), SeedOrder(graph.train, args.batch)
    stage = Stage("sample", lambda seeds: sampler.sample(seeds.seeds, seeds.epoch, seeds.batch), workers)
    pipeline = Pipeline([stage], depth=max(2, workers))
    batches = pipeline.run(order.epochs(MOST_EPOCHS))
    try:
        return rates(*timed(((b.edge_index.shape[1], b.nodes.numel()) for b in batches), args))
    finally:
        batches.close()  # type: ignore[attr-defined]


def weft_training(graph: Graph, workers: int, args: Namespace) -> Callable[[], dict[str, Any]]:
    """Steps of a group of one task; made once, called for every run."""
    task = Task(graph=graph, model="sage", layers=len(fanouts(args)), hidden=args.hidden, dropout=0.5, lr=0.003,
                epochs=MOST_EPOCHS, eval_every=MOST_EPOCHS)  # fmt: skip
    sampling = Sampling(tuple(fanouts(args)), args.batch, workers=workers)
    group = GroupRun([task], graph, Plan(("0",), device="cpu"), graph.device, make_source=sampling)

    def steps() -> dict[str, Any]:
        clock = Ticks(args)
        while not clock.taken:
            group.advance(MOST_EPOCHS, clock.stop)
        return clock.taken

    return steps


class Ticks:
    """``stop()`` after every step: the clock starts after ``--warmup`` steps and ends ``--steps`` later."""

    def __init__(self, args: Namespace) -> None:
        self._args, self._count, self._since = args, 0, clocks()
        self.taken: dict[str, float] = {}

    def stop(self) -> bool:
        """Whether enough has been timed."""
        self._count += 1
        if self._count == self._args.warmup:
            self._since = clocks()
        elif self._count == self._args.warmup + self._args.steps:
            self.taken = per_step(self._since, self._args)
        return bool(self.taken)


# ---- PyG ---------------------------------------------------------------------------------------------


def forever(loader: Any) -> Iterator[Any]:
    """The batches of epoch after epoch."""
    return chain.from_iterable(iter(loader) for _ in repeat(None))


def pyg_sampling(graph: Graph, workers: int, args: Namespace) -> dict[str, Any]:
    """Local subgraphs by ``workers`` processes (0: this one)."""
    loader = pyg_loader(graph, fanouts(args), args.batch, workers, features=False)
    return rates(*timed(((b.num_edges, b.num_nodes) for b in forever(loader)), args))


def pyg_training(graph: Graph, workers: int, trimmed: bool, args: Namespace) -> dict[str, Any]:
    """Steps of PyG's GraphSAGE."""
    from torch_geometric.nn import GraphSAGE

    model = GraphSAGE(graph.num_features, args.hidden, len(fanouts(args)), graph.num_classes, dropout=0.5)
    loader = pyg_loader(graph, fanouts(args), args.batch, workers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return timed(train_steps(model, optimizer, forever(loader), F.cross_entropy, trimmed), args)[0]


# ---- cells -------------------------------------------------------------------------------------------


def sides(graph: Graph, args: Namespace) -> dict[tuple[str, str, int], Callable[[], dict[str, Any]]]:
    """What is timed, by (work, side, workers)."""
    found: dict[tuple[str, str, int], Callable[[], dict[str, Any]]] = {}
    for workers in map(int, listed(args.weft_workers)):
        found["sampling", "weft", workers] = lambda w=workers: weft_sampling(graph, w, args)
        found["training", "weft", workers] = weft_training(fresh(graph), workers, args)
    for workers in map(int, listed(args.pyg_workers)):
        found["sampling", "pyg", workers] = lambda w=workers: pyg_sampling(graph, w, args)
        found["training", "pyg", workers] = lambda w=workers: pyg_training(graph, w, False, args)
        if has_hop_sizes():
            found["training", "pyg trimmed", workers] = lambda w=workers: pyg_training(graph, w, True, args)
    return {key: call for key, call in found.items() if key[0] in listed(args.works)}


def run_all(recorder: Recorder, graph: Graph, args: Namespace) -> None:
    """Every side in turn, as often as asked."""
    made = recorder.prepare("sides", lambda: sides(graph, args)) or {}
    about = {"shape": args.shape, "hidden": args.hidden, "fanout": args.fanout, "batch": args.batch}
    for turn in range(args.runs):
        for (work, side, workers), call in made.items():
            if turn and workers != fastest(recorder.cells, work, side):
                continue
            recorder.cell({"work": work, "side": side, "workers": workers, "turn": turn, **about}, call, free=False)


def fastest(cells: list[dict[str, Any]], work: str, side: str) -> int | None:
    """The number of workers with which the first turn was fastest."""
    first = [c for c in cells if (c["work"], c["side"], c["turn"], c["status"]) == (work, side, 0, "ok")]
    return min(first, key=lambda cell: cell["ms"])["workers"] if first else None


def summary(cells: list[dict[str, Any]], steps_per_epoch: int) -> list[dict[str, Any]]:
    """Per work: each side's fastest number of workers, medians over the runs, and PyG's time over Weft's."""
    rows = []
    for work in dict.fromkeys(cell["work"] for cell in cells):
        best: dict[str, dict[str, Any]] = {}
        for side in dict.fromkeys(c["side"] for c in cells if c["work"] == work):
            workers = fastest(cells, work, side)
            same = [
                c for c in cells if (c["work"], c["side"], c["workers"], c["status"]) == (work, side, workers, "ok")
            ]
            if not same:
                continue
            spread = sorted(c["ms"] for c in same)
            one = {"side": side, "workers": workers, "ms": median(spread), "low": spread[0], "high": spread[-1],
                   "runs": len(same), "cpu_ms": median(c["cpu_ms"] for c in same),
                   "epoch_seconds": round(median(spread) * steps_per_epoch / 1e3, 2)}  # fmt: skip
            if "mega_edges_s" in same[0]:
                one |= {name: median(c[name] for c in same) for name in ("mega_edges_s", "batches_s", "nodes")}
            key = side.split()[0]
            if key not in best or one["ms"] < best[key]["ms"]:
                best[key] = one
        ratio = best["pyg"]["ms"] / best["weft"]["ms"] if len(best) == 2 else None
        rows.append({"work": work, **best, "ratio": ratio})
    return rows


def print_report(recorder: Recorder, rows: list[dict[str, Any]]) -> None:
    """A row per work and side."""
    recorder.save(summary=rows)
    table = [
        [row["work"], side, one["workers"], one["ms"], one["low"], one["high"], one["cpu_ms"], one.get("batches_s"),
         one.get("mega_edges_s"), one["epoch_seconds"], row["ratio"] if side == "weft" else None]
        for row in rows for side in ("weft", "pyg") if (one := row.get(side))
    ]  # fmt: skip
    header = ["work", "side", "workers", "ms", "low", "high", "cpu ms", "batches/s", "M edges/s", "epoch s", "PyG/Weft"]
    print_table(header, table)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--shape", default="arxiv")
    parser.add_argument("--works", default="sampling,training")
    parser.add_argument("--fanout", default="15,10,5", help="neighbours per hop, a layer for each")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--weft-workers", default="1", help="threads that sample, to choose from")
    parser.add_argument("--pyg-workers", default="0,1,2", help="processes that sample, to choose from")
    parser.add_argument("--threads", type=int, help="of torch on both sides; its own number unless given")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="batches before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="timed batches")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    recorder = Recorder("neighbor_loader", args)
    graph = recorder.prepare(f"graph {args.shape}", lambda: make_graph(args.shape, recorder.device, args.scale))
    if graph is None:
        return
    try:
        recorder.about["pyg_samples_with"] = check_pyg_samples()
    except NotHere as missing:
        recorder.say(f"PyG is left out: {missing}")
        args.pyg_workers = ""
    recorder.about["steps_per_epoch"] = -(-graph.train.numel() // args.batch)
    run_all(recorder, graph, args)
    print_report(recorder, summary(recorder.cells, recorder.about["steps_per_epoch"]))


if __name__ == "__main__":
    main()
