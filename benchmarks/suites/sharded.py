"""The sharded SpMM: schedules against each other, with the remote half of the rows in pinned host memory.

One GPU stands for rank 0 of two. The rows of rank 1 lie in pinned host memory, read over PCIe by the kernel itself: a
slower link than NVLink, and one that every machine with a GPU has. ``--link device`` keeps them on the device instead.

Per shape and width: ``streamed`` (``weft.ops.sharded.streamed_spmm``: tiles of remote rows by the copy engine, beside
the sums) against fetching first and aggregating then with Weft's plain SpMM, by the faster of two fetches: one copy of
all remote rows, or a gather of those that are needed; and against ``streamed apart``, the same without interleaving.
Beside it what the roofline predicts. Then the schedules of pieces (``weft.ops.sharded.sharded_spmm``), of which
``fetch_first`` is ``pipelined`` without interleaving; rows left whole against rows in pieces; forward passes of a GCN
(2 layers of 16) and a GIN (5 of 64); how long a partition takes and how even it is; the path of the tuner's search on
the first shape; the streamed kernel with other numbers of tiles. All shapes have their streamed cells before any has
the others. The last table says of every goal whether it is reached.

    python -m benchmarks.suites.sharded --budget-seconds 120 --out sharded.json
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.half_graph import FLOAT, HalfOfAGraph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.sharded_verdicts import (
    COPIED,
    FETCHED,
    GATHERED,
    HEADER,
    PIPELINED,
    STREAMED,
    STREAMED_APART,
    WHOLE_ROWS,
    verdicts,
)
from benchmarks.harness.timing import time_until
from weft.dist.partition import count_remote, neighbour_pieces, own_rows, split_edges
from weft.graph.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sharded.shard import ShardedLaunch
from weft.ops.sharded.sharded_spmm import PER_EDGE
from weft.planner.kernel_tuner import KernelConfig, search_for
from weft.planner.partition import split_by_edges

APART = "fetch_first"
MODELS = {"gcn 2x16": (2, 16), "gin 5x64": (5, 64)}


def on_gpu(recorder: Recorder) -> None:
    """Raise unless there is one."""
    if recorder.device.type != "cuda":
        raise NotHere("needs a GPU")


def side_of(half: HalfOfAGraph, side: str, launch: ShardedLaunch) -> Callable[[Tensor, Tensor], Tensor]:
    """The aggregation of own and remote rows, by name."""
    plain = {COPIED: half.copied, GATHERED: half.gathered, STREAMED: half.streamed}
    plain[STREAMED_APART] = partial(half.streamed, overlap=False)
    if side.endswith(" tiles"):
        return partial(half.streamed, tiles=int(side.split()[-2]))
    return plain.get(side) or (lambda near, far: half.sharded(near, far, launch, side))


# ---- one aggregation ---------------------------------------------------------------------------------


def compare(
    recorder: Recorder, half: HalfOfAGraph, features: int, side: str, launch: ShardedLaunch, seconds: float
) -> dict[str, Any]:
    """Milliseconds of one side, bytes over the link, and the share of the link's bandwidth."""
    on_gpu(recorder)
    near, far = half.rows(features)
    call, plain = side_of(half, side, launch), half.gathered
    expected, found = plain(near, far), call(near, far)
    error = float((expected - found).norm() / expected.norm())
    if not error < 1e-4:
        raise RuntimeError(f"{side} differs from the plain aggregation by {error:.2g}")
    del expected, found
    timing = time_until(lambda: call(near, far), half.device, warmup=1, repeats=15, seconds=seconds, least=2)
    about = {"predicted_ms": round(half.predicted_ms(features, near), 4)} if side == STREAMED else {}
    rows = {COPIED: far.shape[0]}.get(side, half.remote_edges if side in PER_EDGE else half.halo.numel())
    moved, speed = rows * features * FLOAT, half.link_speed(features)
    return {
        "ms": round(timing.ms, 4),
        **about,
        "link_mb": round(moved / 1e6, 2),
        "link_gb_s": round(moved / timing.ms / 1e6, 2),
        "link_share": round(moved / timing.ms / 1e6 / speed, 3),
        "copy_gb_s": round(speed, 2),
        "timing": timing.to_dict(),
    }


def tune(recorder: Recorder, half: HalfOfAGraph, features: int, seconds: float) -> dict[str, Any]:
    """The search from its first to its last configuration."""
    on_gpu(recorder)
    search = search_for(half.shape(features))
    near, far = half.rows(features)

    def took(config: KernelConfig) -> float:
        launch = ShardedLaunch(config.ps, config.dist, config.wpb)
        call = partial(half.sharded, near, far, launch, PIPELINED)
        return time_until(call, half.device, warmup=2, repeats=5, seconds=seconds / 4).ms

    while not search.finished and recorder.left > 2:
        search.tell(took(search.next()))
    path = [{**asdict(config), "ms": round(ms, 4)} for config, ms in search.trials.items()]
    first, best = path[0]["ms"], search.trials[search.best]
    about = {"iterations": len(path), "first_ms": first, "best_ms": round(best, 4), "gain": round(first / best, 3)}
    return {**about, "finished": search.finished, "best": asdict(search.best), "path": path}


# ---- a model ------------------------------------------------------------------------------------------


def model_cell(
    recorder: Recorder, half: HalfOfAGraph, graph: Graph, model: str, side: str, launch: ShardedLaunch, seconds: float
) -> dict[str, Any]:
    """Milliseconds of a forward pass."""
    on_gpu(recorder)
    layers, hidden = MODELS[model]
    widths = [graph.num_features, *[hidden] * (layers - 1), graph.num_classes]
    call = half.forward_pass(widths, layers > 2, side_of(half, side, launch))
    return {"ms": round(time_until(call, half.device, warmup=1, repeats=10, seconds=seconds, least=2).ms, 4)}


# ---- the partition ------------------------------------------------------------------------------------


def partition_cell(adj: Adjacency, host: bool) -> dict[str, Any]:
    """Seconds from row offsets to the parts of one rank of four, and how even the ranks are.

    That is its local and remote CSR, with ids as their owners have them, and neighbours in pieces of 16.
    """
    if host:
        adj = Adjacency(adj.indptr.cpu(), adj.indices.cpu(), adj.num_cols)
    if adj.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = split_by_edges(adj.indptr.cpu().numpy(), 4)
    bounds = time.perf_counter() - begin
    indptr, columns, _, _ = own_rows(adj, *found.bounds[:2])
    split = split_edges(indptr, columns, found.bounds, 0)
    for offsets in (split.local_indptr, split.remote_indptr):
        neighbour_pieces(offsets, 16)
    if adj.device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    even = {f"imbalance_{ranks}": _imbalance(adj, ranks) for ranks in (2, 4, 8)}
    remote = sum(count_remote(adj, found.bounds)) / max(adj.num_edges, 1)
    return {"seconds": round(took, 4), "bounds_seconds": round(bounds, 5), **even, "remote_share": round(remote, 4)}


def _imbalance(adj: Adjacency, ranks: int) -> float:
    return round(split_by_edges(adj.indptr.cpu().numpy(), ranks).imbalance, 6)


# ---- all of it ----------------------------------------------------------------------------------------


def main() -> None:
    """Run everything, print tables."""
    args = _arguments()
    recorder = Recorder("sharded", args)
    for cells in (_streamed_cells, _other_cells, _tile_cells):
        for shape in args.shapes:
            graph = recorder.prepare(f"graph {shape}", partial(make_graph, shape, recorder.device, args.scale))
            if graph is None:
                continue
            half = recorder.prepare(f"half of {shape}", partial(HalfOfAGraph, graph.adj, args.link))
            if half is not None:
                cells(recorder, shape, graph, half, args)
                half = None
    _summary(recorder, args)


def _launch(args: Namespace) -> ShardedLaunch:
    return ShardedLaunch(args.ps, args.dist, args.warps)


def _streamed_cells(recorder: Recorder, shape: str, graph: Graph, half: HalfOfAGraph, args: Namespace) -> None:
    """Streamed against fetching first and against no interleaving, and both models."""
    about = {"rows": half.high, "remote_rows": half.halo.numel(), "remote_edges": half.remote_edges}
    recorder.about.setdefault("graphs", {})[shape] = {**about, "chunks": half.chunks, "cut_seconds": half.seconds}
    sides = (STREAMED, *FETCHED, STREAMED_APART)
    for features in args.features:
        for side in sides:
            work = partial(compare, recorder, half, features, side, _launch(args), args.cell_seconds)
            recorder.cell({"shape": shape, "features": features, "side": side}, work, free=False)
    for model in MODELS:
        for side in sides:
            work = partial(model_cell, recorder, half, graph, model, side, _launch(args), args.cell_seconds)
            recorder.cell({"shape": shape, "model": model, "side": side}, work, free=False)


def _other_cells(recorder: Recorder, shape: str, graph: Graph, half: HalfOfAGraph, args: Namespace) -> None:
    """The partition, the schedules of pieces, and on the first shape the tuner."""
    for where in ("device", "host"):
        cell = partial(partition_cell, graph.adj, where == "host")
        recorder.cell({"shape": shape, "side": f"partition on {where}"}, cell, free=False)
    for features in args.features:
        if shape == args.shapes[0] and features == args.features[0]:
            work = partial(tune, recorder, half, features, args.cell_seconds)
            recorder.cell({"shape": shape, "features": features, "side": "tuner"}, work, free=False)
        for side in (PIPELINED, APART, "fetch_interleaved", *(PER_EDGE if features <= args.per_edge else ())):
            work = partial(compare, recorder, half, features, side, _launch(args), args.cell_seconds)
            recorder.cell({"shape": shape, "features": features, "side": side}, work, free=False)
        whole = ShardedLaunch(0, args.dist, args.warps)
        work = partial(compare, recorder, half, features, PIPELINED, whole, args.cell_seconds)
        recorder.cell({"shape": shape, "features": features, "side": WHOLE_ROWS}, work, free=False)


def _tile_cells(recorder: Recorder, shape: str, graph: Graph, half: HalfOfAGraph, args: Namespace) -> None:
    """The streamed kernel with other numbers of tiles, to choose them by."""
    for features, tiles in itertools.product(args.features, args.tiles):
        side = f"streamed, {tiles} tiles"
        work = partial(compare, recorder, half, features, side, _launch(args), args.cell_seconds)
        recorder.cell({"shape": shape, "features": features, "side": side}, work, free=False)


def _arguments() -> Namespace:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=listed, default=["products", "orkut", "reddit", "enwiki", "ogbn-proteins"])
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller graphs, to try it out")
    parser.add_argument("--features", type=lambda text: [int(word) for word in listed(text)], default=[16, 64])
    parser.add_argument("--per-edge", type=int, default=16, help="schedules that read per edge: up to this width")
    parser.add_argument("--link", choices=("pinned", "device"), default="pinned")
    parser.add_argument("--tiles", type=lambda text: [int(word) for word in listed(text)], default=[2, 4, 8])
    parser.add_argument("--ps", type=int, default=16)
    parser.add_argument("--dist", type=int, default=2)
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--cell-seconds", type=float, default=0.2)
    return parser.parse_args()


def _summary(recorder: Recorder, args: Namespace) -> None:
    cells = recorder.cells
    rows = []
    for shape, features in itertools.product(args.shapes, args.features):
        found = {
            cell["side"]: cell for cell in cells if cell.get("shape") == shape and cell.get("features") == features
        }
        about = found.get(STREAMED, {})
        times = {side: cell.get("ms") for side, cell in found.items()}
        rows.append((shape, features, *_ratios(times), about.get("predicted_ms"), about.get("link_share")))
    print_table(("shape", "F", "streamed ms", *RATIOS, "predicted ms", "share of link"), rows)
    models = []
    for shape, model in itertools.product(args.shapes, MODELS):
        times = {
            side: (find(cells, shape=shape, model=model, side=side) or {}).get("ms")
            for side in (STREAMED, STREAMED_APART, *FETCHED)
        }
        models.append((shape, model, *_ratios(times)[:3]))
    print_table(("shape", "model", "streamed ms", *RATIOS[:2]), models)
    _print_others(cells, args)
    found = verdicts(cells, args.shapes, args.features, list(MODELS))
    print_table(HEADER, found)
    recorder.save(verdicts=[dict(zip(HEADER, row, strict=True)) for row in found])


def _print_others(cells: list[dict[str, Any]], args: Namespace) -> None:
    """Numbers of tiles, partitions and the tuner's path."""
    sides = [STREAMED, *(f"streamed, {tiles} tiles" for tiles in args.tiles)]
    print_table(
        ("shape", "F", *(f"{side} ms" for side in sides)),
        [
            (shape, width, *((find(cells, shape=shape, features=width, side=side) or {}).get("ms") for side in sides))
            for shape, width in itertools.product(args.shapes, args.features)
        ],
    )
    for shape in args.shapes:
        parts = [find(cells, shape=shape, side=f"partition on {where}") for where in ("device", "host")]
        print(
            shape,
            *(part and {key: value for key, value in part.items() if key not in ("status", "side")} for part in parts),
        )
    for cell in cells:
        if cell["side"] == "tuner" and cell["status"] == "ok":
            print("tuner", {key: value for key, value in cell.items() if key != "path"})
            print(
                *(f"{step['ps']},{step['dist']},{step['wpb']}: {step['ms']:.3g} ms" for step in cell["path"]), sep="; "
            )


RATIOS = ("fetch, then spmm", "no interleaving", "pipelined", "one kernel", "per edge", "per edge apart")


def _ratios(times: dict[str, float | None]) -> tuple[float | None, ...]:
    """The streamed milliseconds, and how many times as long the others take; of the two fetches the faster one."""
    first = times.get(STREAMED)
    fetched = min((times[side] for side in FETCHED if times.get(side)), default=None)
    others = [fetched, *(times.get(side) for side in (STREAMED_APART, PIPELINED, "fetch_interleaved", *PER_EDGE))]
    return first, *(None if first is None or other is None else other / first for other in others)


if __name__ == "__main__":
    main()
