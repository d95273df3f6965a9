"""The sharded SpMM: schedules against each other, with the remote half of the rows in pinned host memory.

One GPU stands for rank 0 of two. The rows of rank 1 lie in pinned host memory, read over PCIe by the kernel itself: a
slower link than NVLink, and one that every machine with a GPU has. ``--link device`` keeps them on the device instead.

Per shape and width: ``streamed`` (``weft.ops.sharded.streamed_spmm``: tiles of remote rows by the copy engine, beside
the sums) against fetching first and aggregating then with Weft's plain SpMM, by the faster of two fetches: one copy of
all remote rows, or a gather of those that are needed; and against ``streamed apart``, the same without interleaving.
Beside it what the roofline predicts. Then the schedules of pieces (``weft.ops.sharded.sharded_spmm``), of which
``fetch_first`` is ``pipelined`` without interleaving; rows left whole against rows in pieces; forward passes of a GCN
(2 layers of 16) and a GIN (5 of 64); how long a partition takes and how even it is; the path of the tuner's search on
the first shape. All shapes have their streamed cells before any has the others. The last table has the goals.

    python -m benchmarks.suites.sharded --budget-seconds 120 --out sharded.json
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed
from benchmarks.harness.timing import synchronize, time_calls, time_until
from benchmarks.report.markdown import print_rows
from weft import ops
from weft.dist.partition import count_remote, halo_of, neighbour_pieces, own_rows, split_edges, to_block
from weft.dist.shard_csr import shard_csr, tiled_csr
from weft.dist.sharded_adjacency import CHUNK_ROWS, MOST_CHUNKS
from weft.graph.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.gather_rows import gather_rows_triton
from weft.ops.sharded.sharded_spmm import (
    PER_EDGE,
    ShardedCSR,
    ShardedLaunch,
    address_table,
    sharded_spmm_triton,
)
from weft.ops.sharded.streamed_spmm import TiledCSR, streamed_spmm_triton
from weft.ops.sparse.spmm import spmm_triton
from weft.planner.kernel_tuner import CrossIterationSearch, KernelConfig, KernelShape, is_sensible
from weft.planner.partition import split_by_edges

FLOAT = 4


def pipelined_seconds(link: float, local: float, sums: Sequence[float], shares: Sequence[float]) -> float:
    """Seconds until the last tile is summed.

    ``link``: of all remote rows, of which a tile has its share; ``local`` and ``sums``: of summing the local edges, and
    those of each tile, with reading and writing the sums so far.
    """
    arrived, done = 0.0, local
    for share, summed in zip(shares, sums, strict=True):
        arrived += link * share
        done = max(done, arrived) + summed
    return done


class HalfOfAGraph:
    """The rows of rank 0 and what it reads of rank 1; ``seconds``: of cutting the graph, on its device."""

    def __init__(self, adj: Adjacency, link: str) -> None:
        self.device = adj.device
        begin = time.perf_counter()
        self.bounds = split_by_edges(adj.indptr.cpu().numpy(), 2).bounds
        self.high, self.nodes = self.bounds[1], adj.num_rows
        self.indptr, self.columns, _, _ = own_rows(adj, 0, self.high)
        self.halo = halo_of(self.columns, 0, self.high).long()
        block = to_block(self.columns, self.halo.int(), 0, self.high)
        synchronize(self.device)
        self.seconds = time.perf_counter() - begin
        self.halo_rows = self.halo - self.high  # on rank 1
        self.block = Adjacency(self.indptr, block, self.high + self.halo.numel())
        self.whole = Adjacency(self.indptr, self.columns, self.nodes)
        self.remote_edges = int((self.columns >= self.high).sum())
        self._pinned, self._speeds, self._far = link == "pinned", dict[int, float](), dict[int, Tensor]()
        self._csrs, self._rows = dict[tuple[int, int], ShardedCSR](), dict[int, tuple[Tensor, Tensor]]()
        self._tiled = dict[int, TiledCSR]()

    @property
    def chunks(self) -> int:
        """Chunks of remote rows, as training cuts them."""
        return min(MOST_CHUNKS, max(1, self.halo.numel() // CHUNK_ROWS))

    def shape(self, features: int) -> KernelShape:
        """For the tuner."""
        return KernelShape(features, self.columns.numel() - self.remote_edges, self.remote_edges, self.high)

    def csr(self, ps: int, chunks: int) -> ShardedCSR:
        """The edges in pieces of ``ps``; the last one is kept."""
        if (ps, chunks) not in self._csrs:
            self._csrs = {(ps, chunks): shard_csr(self.indptr, self.columns, self.bounds, 0, ps, chunks=chunks)}
        return self._csrs[ps, chunks]

    def rows(self, features: int) -> tuple[Tensor, Tensor]:
        """Own rows on the device, and those of rank 1 where they lie; the last ones are kept.

        Own rows are the first of a matrix with room for all of rank 1, so that fetching them moves nothing else.
        """
        if features not in self._rows:
            near = torch.randn(self.nodes, features, device=self.device)[: self.high]
            self._rows = {features: (near, self.far(features))}
        return self._rows[features]

    def _with_room(self, near: Tensor, more: int) -> Tensor:
        """``near`` with room for ``more`` rows below it: where it lies if there is room, else a copy."""
        size = (near.shape[0] + more, near.shape[1])
        if near.untyped_storage().nbytes() >= size[0] * size[1] * FLOAT:
            return near.as_strided(size, (size[1], 1))
        rows = torch.empty(size, device=self.device)
        rows[: near.shape[0]].copy_(near)
        return rows

    def far(self, features: int) -> Tensor:
        """Rows of rank 1 where they lie; kept."""
        if features not in self._far:
            rows = torch.randn(self.nodes - self.high, features, device=self.device)
            self._far[features] = torch.empty(rows.shape, pin_memory=True).copy_(rows) if self._pinned else rows
        return self._far[features]

    def sharded(self, near: Tensor, far: Tensor, launch: ShardedLaunch, schedule: str) -> Tensor:
        """Weft's aggregation by one of its schedules."""
        table, counts = address_table([near, far], self.device)
        csr = self.csr(launch.ps, self.chunks)
        return sharded_spmm_triton(near, table, counts, csr, None, launch, schedule)

    def tiled(self, tiles: int = 0) -> TiledCSR:
        """The edges by tile of remote rows; ``tiles``: how many, 0 for as many as training takes. All are kept."""
        if tiles not in self._tiled:
            self._tiled[tiles] = tiled_csr(self.indptr, self.columns, self.bounds, 0, tiles=tiles or None)
        return self._tiled[tiles]

    def streamed(self, near: Tensor, far: Tensor, overlap: bool = True) -> Tensor:
        """Weft's aggregation while remote rows arrive, tile by tile.

        Without ``overlap`` one after another, in one tile: what suits a schedule that waits for all of them.
        """
        return streamed_spmm_triton(near, [near, far], self.tiled(0 if overlap else 1), None, overlap)

    def predicted_ms(self, features: int, near: Tensor) -> float:
        """Of the streamed aggregation, from the link's speed and from sums over rows that are on the device."""
        csr, total = self.tiled(), torch.empty(1, self.high, features, device=self.device)
        staged = [torch.empty(1, tile.rows, features, device=self.device) for tile in csr.tiles]
        local = _ms(lambda: spmm_triton(near[None], None, None, None, csr.local, out=total), self.device)
        sums = [
            _ms(lambda t=tile, x=rows: spmm_triton(x, None, None, None, t.csr, out=total, add=True), self.device)
            for tile, rows in zip(csr.tiles, staged, strict=True)
        ]
        link = csr.staged_rows * features * FLOAT / self.link_speed(features) / 1e6
        return pipelined_seconds(link, local, sums, [tile.rows / max(csr.staged_rows, 1) for tile in csr.tiles])

    def gathered(self, near: Tensor, far: Tensor) -> Tensor:
        """Fetch, then aggregate: the remote rows that are needed, by the gather of sampled training, then SpMM."""
        rows = self._with_room(near, self.halo.numel())
        gather_rows_triton(far, self.halo_rows, rows[self.high :])
        return ops.spmm(self.block, rows)

    def copied(self, near: Tensor, far: Tensor) -> Tensor:
        """Fetch, then aggregate: all rows of rank 1 by one copy to where SpMM reads them, then SpMM."""
        rows = self._with_room(near, far.shape[0])
        rows[self.high :].copy_(far, non_blocking=True)
        return ops.spmm(self.whole, rows)

    def forward_pass(
        self, widths: Sequence[int], aggregate_first: bool, aggregate: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[], Tensor]:
        """A forward pass of rank 0 over layers of ``widths``: products on its rows, aggregations over the link.

        A GCN multiplies first and aggregates the narrower rows; a GIN aggregates first. What rank 1 would have computed
        is random numbers of the same size, where it lies. Own rows are new in every layer: fetching first copies them
        to where SpMM reads all rows, about 2 % of its time.
        """
        weights = [torch.randn(a, b, device=self.device) / a**0.5 for a, b in itertools.pairwise(widths)]
        far = {width: self.far(width) for width in (widths[:-1] if aggregate_first else widths[1:])}
        x = torch.randn(self.high, widths[0], device=self.device)

        def run() -> Tensor:
            h = x
            for place, weight in enumerate(weights, 1):
                h = h + aggregate(h, far[h.shape[1]]) if aggregate_first else h
                h = h @ weight
                h = h if aggregate_first else aggregate(h, far[h.shape[1]])
                h = h.relu() if place < len(weights) else h
            return h

        return run

    def link_speed(self, features: int) -> float:
        """GB/s of one large copy from where remote rows lie."""
        if features not in self._speeds:
            far = self.rows(features)[1]
            target = torch.empty(far.shape, device=self.device)
            took = time_calls(lambda: target.copy_(far, non_blocking=True), self.device, warmup=1, repeats=5)
            self._speeds[features] = far.numel() * FLOAT / took.ms / 1e6
        return self._speeds[features]


def _ms(call: Callable[[], Any], device: torch.device) -> float:
    return time_calls(call, device, warmup=1, repeats=5).ms


Cell = dict[str, Any]
COPIED, GATHERED = "copy all, then spmm", "gather, then spmm"
FETCHED = (COPIED, GATHERED)
STREAMED, STREAMED_APART = "streamed", "streamed apart"
PIPELINED, WHOLE_ROWS = "pipelined", "rows whole"
OVER_FETCHING, OVER_APART = 1.5, 1.2
RATIOS = {
    "fetch, then spmm": FETCHED, "no interleaving": [STREAMED_APART], "pipelined": [PIPELINED],
    "one kernel": ["fetch_interleaved"], **{side: [side] for side in PER_EDGE},
}  # fmt: skip
HEADER = ("goal", "wanted", "found", "verdict")


def milliseconds(cells: Iterable[Cell], sides: Sequence[str], **about: Any) -> float | None:
    """Of the fastest of ``sides`` that was measured."""
    found = [find(cells, **about, side=side) for side in sides]
    return min((cell["ms"] for cell in found if cell is not None), default=None)


def gain(cells: Iterable[Cell], sides: Sequence[str], **about: Any) -> float | None:
    """How many times as long as the streamed kernel the fastest of ``sides`` takes."""
    here, other = milliseconds(cells, [STREAMED], **about), milliseconds(cells, sides, **about)
    return None if here is None or other is None else other / here


def most_gain(cells: Iterable[Cell], **about: Any) -> float | None:
    """What hiding all of the link behind sums, or all sums behind the link, would gain over fetching first."""
    cell = find(cells, **about, side=COPIED)
    if cell is None:
        return None
    link = cell["link_mb"] / cell["copy_gb_s"]
    return float(cell["ms"] / max(link, cell["ms"] - link))


def verdicts(cells: list[Cell], shapes: Sequence[str], widths: Sequence[int], models: Sequence[str]) -> list[Any]:
    """The rows of the table under :data:`HEADER`."""
    grid = [{"shape": shape, "features": width} for shape, width in itertools.product(shapes, widths)]
    bounds = {_name(about): most_gain(cells, **about) for about in grid}
    rows = [
        _row(f"against fetching first, {name}", OVER_FETCHING, gain(cells, FETCHED, **about), bounds[name])
        for about in grid
        for name in [_name(about)]
    ]
    apart = {_name(about): gain(cells, [STREAMED_APART], **about) for about in grid}
    rows.append(_all_of("against no interleaving, all of them", OVER_APART, apart))
    for model in models:
        found = [gain(cells, FETCHED, shape=shape, model=model) for shape in shapes]
        known = [one for one in found if one is not None]
        words = f"{min(known):.2f} to {max(known):.2f}x" if known else "-"
        about = (f"forward pass against fetching first, {model}", "a figure", words)
        rows.append((*about, "measured" if known else "not measured"))
    return rows


def _name(about: dict[str, Any]) -> str:
    return " ".join(str(value) for value in about.values())


def _row(goal: str, wanted: float, found: float | None, most: float | None = None) -> tuple[str, ...]:
    if found is None:
        return goal, f">= {wanted}x", "-", "not measured"
    within = "" if most is None else f" of at most {most:.2f}x"
    return goal, f">= {wanted}x", f"{found:.2f}x{within}", "pass" if found >= wanted else "miss"


def _all_of(goal: str, wanted: float, found: dict[str, float | None]) -> tuple[str, ...]:
    """One line of many cells: how many reach ``wanted``, and the one that is furthest from it."""
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return goal, f">= {wanted}x", "-", "not measured"
    least, good = min(known, key=lambda name: known[name]), sum(value >= wanted for value in known.values())
    words = f"{good} of {len(found)}; least {known[least]:.2f}x ({least})"
    return goal, f">= {wanted}x", words, "pass" if good == len(found) else "miss"


APART = "fetch_first"
MODELS = {"gcn 2x16": (2, 16), "gin 5x64": (5, 64)}


def side_of(half: HalfOfAGraph, side: str, launch: ShardedLaunch) -> Callable[[Tensor, Tensor], Tensor]:
    """The aggregation of own and remote rows, by name."""
    plain = {COPIED: half.copied, GATHERED: half.gathered, STREAMED: half.streamed}
    plain[STREAMED_APART] = partial(half.streamed, overlap=False)
    return plain.get(side) or (lambda near, far: half.sharded(near, far, launch, side))


def compare(
    recorder: Recorder, half: HalfOfAGraph, features: int, side: str, launch: ShardedLaunch, seconds: float
) -> dict[str, Any]:
    """Milliseconds of one side, bytes over the link, and the share of the link's bandwidth."""
    recorder.need_gpu()
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
    recorder.need_gpu()
    shape = half.shape(features)
    search = CrossIterationSearch(lambda config: is_sensible(config, shape))
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


def model_cell(
    recorder: Recorder, half: HalfOfAGraph, graph: Graph, model: str, side: str, launch: ShardedLaunch, seconds: float
) -> dict[str, Any]:
    """Milliseconds of a forward pass."""
    recorder.need_gpu()
    layers, hidden = MODELS[model]
    widths = [graph.num_features, *[hidden] * (layers - 1), graph.num_classes]
    call = half.forward_pass(widths, layers > 2, side_of(half, side, launch))
    return {"ms": round(time_until(call, half.device, warmup=1, repeats=10, seconds=seconds, least=2).ms, 4)}


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
    offsets = adj.indptr.cpu().numpy()
    even = {f"imbalance_{ranks}": round(split_by_edges(offsets, ranks).imbalance, 6) for ranks in (2, 4, 8)}
    remote = sum(count_remote(adj, found.bounds)) / max(adj.num_edges, 1)
    return {"seconds": round(took, 4), "bounds_seconds": round(bounds, 5), **even, "remote_share": round(remote, 4)}


def main() -> None:
    """Run everything, print tables."""
    args = _arguments()
    recorder = Recorder("sharded", args)
    for cells in (_streamed_cells, _other_cells):
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
    for features, side in itertools.product(args.features, sides):
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
        for side in (PIPELINED, APART, *(PER_EDGE if features <= args.per_edge else ())):
            work = partial(compare, recorder, half, features, side, _launch(args), args.cell_seconds)
            recorder.cell({"shape": shape, "features": features, "side": side}, work, free=False)
        whole = ShardedLaunch(0, args.dist, args.warps)
        work = partial(compare, recorder, half, features, PIPELINED, whole, args.cell_seconds)
        recorder.cell({"shape": shape, "features": features, "side": WHOLE_ROWS}, work, free=False)


def _arguments() -> Namespace:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=listed, default=["products", "orkut", "reddit", "enwiki", "ogbn-proteins"])
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller graphs, to try it out")
    parser.add_argument("--features", type=lambda text: [int(word) for word in listed(text)], default=[16, 64])
    parser.add_argument("--per-edge", type=int, default=16, help="schedules that read per edge: up to this width")
    parser.add_argument("--link", choices=("pinned", "device"), default="pinned")
    parser.add_argument("--ps", type=int, default=16)
    parser.add_argument("--dist", type=int, default=2)
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--cell-seconds", type=float, default=0.2)
    return parser.parse_args()


def _summary(recorder: Recorder, args: Namespace) -> None:
    """How many times as long as streamed the other sides take, and which goals are reached."""
    rows = []
    for shape, features in itertools.product(args.shapes, args.features):
        here = {"shape": shape, "features": features}
        streamed = find(recorder.cells, **here, side=STREAMED) or {}
        others = (gain(recorder.cells, sides, **here) for sides in RATIOS.values())
        rows.append((*here.values(), *(streamed.get(key) for key in ("ms", "predicted_ms", "link_share")), *others))
    print_rows(("shape", "F", "streamed ms", "predicted ms", "share of link", *RATIOS), rows)
    found = verdicts(recorder.cells, args.shapes, args.features, list(MODELS))
    print_rows(HEADER, found)
    recorder.save(verdicts=[dict(zip(HEADER, row, strict=True)) for row in found])


if __name__ == "__main__":
    main()
