"""The sharded SpMM: schedules against each other, with the remote half of the rows in pinned host memory.

One GPU stands for rank 0 of two. The rows of rank 1 lie in pinned host memory, read over PCIe by the kernel itself: a
slower link than NVLink, and one that every machine with a GPU has. ``--link device`` keeps them on the device instead.

Per shape and width: four schedules of the kernel (``weft.ops.sparse.sharded_spmm_triton``) and, as a baseline without
neighbour pieces, fetching every remote row once and running Weft's plain SpMM over the block. Then pieces of several
sizes, and the path of the tuner's search. Bytes that cross the link are counted per schedule: once per remote edge, or
once per remote row.

    python -m benchmarks.suites.sharded --shapes arxiv,reddit --features 16,64 --out sharded.json
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import time_calls, time_until
from weft import ops
from weft.dist.partition_arrays import halo_of, own_rows, to_block
from weft.dist.shard_walk import shard_walk
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.gather_rows_triton import gather_rows_triton
from weft.ops.sparse.sharded_spmm_triton import (
    SCHEDULES,
    ShardedLaunch,
    ShardWalk,
    address_table,
    sharded_spmm_triton,
)
from weft.planner.kernel_tuner import KernelConfig, KernelShape, search_for
from weft.planner.partition import split_by_edges

PLAIN = "fetch, then plain spmm"
PIECES = (1, 4, 16, 32)
FLOAT = 4


class HalfOfAGraph:
    """Rank 0 of two: its rows, and what it reads of rank 1."""

    def __init__(self, adj: Adjacency, link: str) -> None:
        self.device = adj.device
        self.bounds = split_by_edges(adj.indptr.cpu().numpy(), 2).bounds
        self.low, self.high, self.nodes = 0, self.bounds[1], adj.num_rows
        self.indptr, self.columns, _, _ = own_rows(adj, self.low, self.high)
        self.halo = halo_of(self.columns, self.low, self.high).long()
        self.block = Adjacency(
            self.indptr,
            to_block(self.columns, self.halo.int(), self.low, self.high),
            self.high + self.halo.numel(),
        )
        self.remote_edges = int((self.columns >= self.high).sum())
        self._link, self._walks = link, dict[int, ShardWalk]()

    def walk(self, ps: int) -> ShardWalk:
        """The edges in pieces of ``ps``."""
        if ps not in self._walks:
            self._walks = {ps: shard_walk(self.indptr, self.columns, self.bounds, 0, ps)}
        return self._walks[ps]

    def rows(self, features: int) -> tuple[Tensor, Tensor]:
        """Own rows on the device, and those of rank 1 where they lie."""
        near = torch.randn(self.high, features, device=self.device)
        far = torch.randn(self.nodes - self.high, features)
        return near, far.pin_memory() if self._link == "pinned" else far.to(self.device)

    def fetch(self, near: Tensor, far: Tensor) -> Tensor:
        """Baseline: every remote row once, by the kernel that sampled training gathers with, then plain SpMM."""
        fetched = gather_rows_triton(far, self.halo - self.high)
        return ops.spmm(self.block, torch.cat([near, fetched]))


def on_gpu(recorder: Recorder) -> None:
    """Raise unless there is one."""
    if recorder.device.type != "cuda":
        raise NotHere("needs a GPU")


def link_speed(far: Tensor, device: torch.device) -> float:
    """GB/s of one large copy from where remote rows lie."""
    target = torch.empty_like(far, device=device)
    return far.numel() * FLOAT / time_calls(lambda: target.copy_(far), device, warmup=2, repeats=5).ms / 1e6


def schedules(half: HalfOfAGraph, features: int, launch: ShardedLaunch) -> dict[str, Callable[[], Tensor]]:
    """Every side on the same rows."""
    near, far = half.rows(features)
    table, counts = address_table([near, far], half.device)
    walk = half.walk(launch.ps)
    sides: dict[str, Callable[[], Tensor]] = {
        name: partial(sharded_spmm_triton, near, table, counts, walk, None, launch, name) for name in SCHEDULES
    }
    return {**sides, PLAIN: partial(half.fetch, near, far)}


def compare(recorder: Recorder, half: HalfOfAGraph, features: int, side: str, args: Namespace) -> dict[str, Any]:
    """Milliseconds of one side, bytes over the link, and the share of the link's bandwidth."""
    on_gpu(recorder)
    launch = ShardedLaunch(args.ps, args.dist, args.warps)
    calls = schedules(half, features, launch)
    expected, found = calls[PLAIN](), calls[side]()
    error = float((expected - found).norm() / expected.norm())
    if not error < 1e-4:
        raise RuntimeError(f"{side} differs from the baseline by {error:.2g}")
    timing = time_until(calls[side], half.device, warmup=2, repeats=20, seconds=args.cell_seconds)
    rows = half.remote_edges if side in ("interleaved", "apart") else half.halo.numel()
    moved = rows * features * FLOAT
    speed = link_speed(half.rows(features)[1], half.device)
    return {
        "ms": round(timing.ms, 4),
        "link_mb": round(moved / 1e6, 2),
        "link_gb_s": round(moved / timing.ms / 1e6, 2),
        "link_share": round(moved / timing.ms / 1e6 / speed, 3),
        "copy_gb_s": round(speed, 2),
        "timing": timing.to_dict(),
    }


def pieces(recorder: Recorder, half: HalfOfAGraph, features: int, ps: int, args: Namespace) -> dict[str, Any]:
    """Milliseconds with pieces of ``ps`` neighbours."""
    on_gpu(recorder)
    call = schedules(half, features, ShardedLaunch(ps, args.dist, args.warps))[SCHEDULES[0]]
    return {"ms": round(time_until(call, half.device, warmup=2, repeats=10, seconds=args.cell_seconds).ms, 4)}


def tune(recorder: Recorder, half: HalfOfAGraph, features: int, args: Namespace) -> dict[str, Any]:
    """The search from its first to its last configuration."""
    on_gpu(recorder)
    local = half.columns.numel() - half.remote_edges
    search = search_for(KernelShape(features, local, half.remote_edges, half.high))

    def took(config: KernelConfig) -> float:
        call = schedules(half, features, ShardedLaunch(config.ps, config.dist, config.wpb))[SCHEDULES[0]]
        return time_until(call, half.device, warmup=2, repeats=5, seconds=args.cell_seconds / 4).ms

    while not search.finished:
        search.tell(took(search.next()))
    path = [{**asdict(config), "ms": round(ms, 4)} for config, ms in search.trials.items()]
    first, best = path[0]["ms"], search.trials[search.best]
    return {"iterations": len(path), "first_ms": first, "best_ms": round(best, 4), "gain": first / best, "path": path}


def main() -> None:
    """Run everything, print a table."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=listed, default=["arxiv", "reddit"])
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller graphs, to try it out")
    parser.add_argument("--features", type=lambda text: [int(word) for word in listed(text)], default=[16, 64])
    parser.add_argument("--link", choices=("pinned", "device"), default="pinned")
    parser.add_argument("--ps", type=int, default=16)
    parser.add_argument("--dist", type=int, default=2)
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--cell-seconds", type=float, default=0.5)
    args = parser.parse_args()
    recorder = Recorder("sharded", args)
    sides = (*SCHEDULES, PLAIN)
    for shape in args.shapes:
        half = recorder.prepare(
            shape, lambda shape=shape: HalfOfAGraph(make_graph(shape, recorder.device, args.scale).adj, args.link)
        )
        if half is None:
            continue
        about = {"rows": half.high, "remote_rows": half.halo.numel(), "remote_edges": half.remote_edges}
        recorder.about.setdefault("graphs", {})[shape] = about
        for features in args.features:
            where = {"shape": shape, "features": features}
            for side in sides:
                recorder.cell({**where, "side": side}, partial(compare, recorder, half, features, side, args))
            for ps in PIECES:
                recorder.cell({**where, "side": f"ps={ps}"}, partial(pieces, recorder, half, features, ps, args))
            recorder.cell({**where, "side": "tuner"}, partial(tune, recorder, half, features, args))
    _summary(recorder, args, sides)


def _summary(recorder: Recorder, args: Namespace, sides: tuple[str, ...]) -> None:
    rows = []
    for shape in args.shapes:
        for features in args.features:
            cells = {side: find(recorder.cells, shape=shape, features=features, side=side) for side in sides}
            first = cells["fetch_interleaved"]
            for side, cell in cells.items():
                if cell is not None and first is not None:
                    rows.append((shape, features, side, cell["ms"], cell["ms"] / first["ms"], cell["link_share"]))
    print_table(("shape", "F", "side", "ms", "x fetch_interleaved", "share of link"), rows)
    recorder.save()


if __name__ == "__main__":
    main()
