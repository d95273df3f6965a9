"""Which launch parameters suit SpMM: tries candidates per shape and width and prints the best few.

First the launch candidates over the default work list, then the best two of them over the other work lists:
every distinct launch costs a second or two of compilation, every work list a fraction of one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, listed
from benchmarks.harness.timing import time_calls
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import PackedCSR
from weft.ops.csr.worklist import WorkList, build_worklist, thresholds
from weft.ops.launch.backend import next_power_of_2
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_triton import SpmmLaunch, choose_launch, spmm_triton

LIGHTS, CHUNKS = (16, 32, 64), (256, 1024, 2048, 4096)
SHOWN = 5
Candidate = tuple[SpmmLaunch, int, int]  # launch, light, chunk


def launches(matrix: Adjacency, num_features: int) -> list[SpmmLaunch]:
    """About a dozen: the default first, then other tile sizes, warps, unrolling and feature tiles."""
    default = choose_launch(matrix.num_cols, num_features, 4, matrix.num_edges / max(matrix.num_rows, 1))
    wide = min(next_power_of_2(num_features), 128)
    shapes = [  # elements of a tile, warps, unrolling, feature tile
        (1024, 4, 2, wide), (1024, 4, 8, wide), (512, 4, 4, wide), (512, 2, 4, wide), (256, 1, 4, wide),
        (256, 2, 8, wide), (2048, 4, 4, wide), (2048, 8, 4, wide), (4096, 8, 2, wide),
        (1024, 4, 4, max(wide // 2, 16)), (512, 2, 4, max(wide // 4, 16)), (1024, 4, 4, wide * 2),
    ]  # fmt: skip
    found = [default]
    for elements, warps, unroll, features in shapes:
        if features > next_power_of_2(num_features):
            continue
        rows = max(1, elements // features)
        found.append(SpmmLaunch(rows, rows, features, unroll, warps))
    return list(dict.fromkeys(found))


def other_worklists(num_edges: int, num_rows: int) -> list[tuple[int, int]]:
    """``(light, chunk)`` pairs beside the default."""
    default = thresholds(num_edges, num_rows)
    return [(light, chunk) for light in LIGHTS for chunk in CHUNKS if (light, chunk) != default]


class Trial:
    """One matrix and one x; times candidates."""

    def __init__(self, matrix: Adjacency, num_features: int, repeats: int) -> None:
        self.matrix, self._repeats = matrix, repeats
        self._x = torch.randn(matrix.num_cols, num_features, device=matrix.device)
        self._work: dict[tuple[int, int], WorkList] = {}

    def _csr(self, light: int, chunk: int) -> PackedCSR:
        if (light, chunk) not in self._work:
            self._work[light, chunk] = build_worklist(self.matrix.indptr, light, chunk)
        empty = self.matrix.indices.new_empty(0)
        return PackedCSR(self.matrix.indptr, self.matrix.indices, empty, empty, self._work[light, chunk])

    def _call(self, candidate: Candidate) -> Callable[[], Tensor]:
        launch, light, chunk = candidate
        csr, matrix = self._csr(light, chunk), self.matrix
        if matrix.device.type != "cuda":  # no GPU: the reference stands in, to try the sweep out
            return lambda: spmm_torch(self._x, None, matrix.row_scale, matrix.col_scale, csr)
        return lambda: spmm_triton(self._x, None, matrix.row_scale, matrix.col_scale, csr, launch)

    def ms(self, candidate: Candidate) -> float:
        """Median milliseconds of a call."""
        call, device = self._call(candidate), self.matrix.device
        return time_calls(call, device, warmup=1, repeats=self._repeats).ms


def explore(recorder: Recorder, trial: Trial, num_features: int) -> dict[str, Any]:
    """The best candidates of one cell, and how the default did."""
    matrix = trial.matrix
    light, chunk = thresholds(matrix.num_edges, matrix.num_rows)
    first: list[Candidate] = [(one, light, chunk) for one in launches(matrix, num_features)]
    times = _times(recorder, trial, first)
    best = sorted(times, key=times.__getitem__)[:2]
    second = [(one, *pair) for one, _, _ in best for pair in other_worklists(matrix.num_edges, matrix.num_rows)]
    times |= _times(recorder, trial, second)
    ranked = sorted(times.items(), key=lambda item: item[1])
    return {
        "default_ms": times.get(first[0]),
        "best_ms": ranked[0][1] if ranked else None,
        "tried": len(ranked),
        "best": [_plain(candidate, ms) for candidate, ms in ranked[:SHOWN]],
    }


def _times(recorder: Recorder, trial: Trial, candidates: list[Candidate]) -> dict[Candidate, float]:
    times: dict[Candidate, float] = {}
    for candidate in candidates:
        if recorder.left <= 0:
            break
        try:
            times[candidate] = trial.ms(candidate)
        except Exception as error:
            recorder.say(f"{candidate} failed: {type(error).__name__}: {str(error)[:120]}")
    return times


def _plain(candidate: Candidate, ms: float) -> dict[str, Any]:
    launch, light, chunk = candidate
    return {"ms": round(ms, 4), "launch": list(astuple(launch)), "light": light, "chunk": chunk}


def sweep(args: Namespace) -> None:
    """Every shape and width; prints compact lines last."""
    recorder = Recorder("spmm_sweep", args)
    for shape in listed(args.shapes):
        graph = recorder.prepare(f"graph {shape}", lambda s=shape: make_graph(s, recorder.device, args.scale))
        if graph is None:
            continue
        matrix = graph.adj.gcn()
        for width in (int(text) for text in listed(args.features)):
            repeats = 5 if matrix.num_edges * width < 2**33 else 3
            recorder.cell(
                {"shape": shape, "features": width},
                lambda m=matrix, w=width, r=repeats: explore(recorder, Trial(m, w, r), w),
            )
    print("launch = (rows, edges, features, unroll, warps)")
    for cell in recorder.cells:
        if cell["status"] != "ok":
            continue
        print(f"{cell['shape']} F={cell['features']}: default {cell['default_ms']:.4f} ms")
        for one in cell["best"]:
            print(f"  {one['ms']:.4f} {tuple(one['launch'])} light={one['light']} chunk={one['chunk']}")
