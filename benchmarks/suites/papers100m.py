"""ogbn-papers100M's shape, generated on the GPU, and one full-graph GCN forward pass over it.

    python -m benchmarks.suites.papers100m --out papers100m.json

Half-precision features and weights, three layers, no gradients (so no transpose is built). Prints seconds and
peak memory of every phase. Shapes: N nodes, E edges, H hidden, C classes.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, print_table
from benchmarks.harness.timing import Memory, synchronize
from weft import ops
from weft.graph.graph import Graph
from weft.nn import GCN, GCNConv
from weft.ops.csr.adjacency import Adjacency


class Passage:
    """What flows from phase to phase: the graph, its normalised matrix, and the activations."""

    def __init__(self, shape: str, device: torch.device, args: Namespace) -> None:
        self.shape, self.device, self.args = shape, device, args
        self.dtype = getattr(torch, args.dtype)
        self.graph: Graph | None = None
        self.matrix: Adjacency | None = None
        self.diagonal: Tensor | None = None
        self.h: Tensor | None = None

    def generate(self) -> dict[str, Any]:
        """The graph on the device, features in half precision."""
        self.graph = make_graph(self.shape, self.device, self.args.scale)
        self.h = self.graph.x.to(self.dtype)
        self.graph.x = None  # the activations replace it; the first layer's input need not outlive the layer
        self.model = GCN(self.h.shape[1], self.args.hidden, self.graph.num_classes, layers=self.args.layers)
        self.model = self.model.to(self.device, self.dtype).eval()
        about = {"nodes": self.graph.num_nodes, "edges": self.graph.num_edges}
        return {**about, "features": self.h.shape[1], "classes": self.graph.num_classes}

    def normalise(self) -> dict[str, Any]:
        """``D^-1/2 (A + I) D^-1/2`` with its self loops stored."""
        self.matrix = self.graph.adj.gcn()
        return {"entries": self.matrix.num_edges}

    def normalise_apart(self) -> dict[str, Any]:
        """The same with ``I`` kept as a diagonal: nothing of the edges' size is made."""
        adj = self.graph.adj
        scale = (adj.degrees() + 1).float().rsqrt()
        self.matrix = adj.scaled(row_scale=scale, col_scale=scale)
        self.diagonal = (scale * scale).to(self.dtype)[:, None]
        return {"entries": adj.num_edges}

    def layer(self, place: int) -> dict[str, Any]:
        """One convolution of the model, in place of the activations."""
        conv = self.model.convs[place]
        epilogue = self.model.epilogues[place] if place < len(self.model.epilogues) else None
        if self.diagonal is None:
            self.h = conv(self.h, self.graph.adj, epilogue=epilogue)
        else:
            self.h = self._layer_apart(conv, self.h)
            self.h = self.h.add_(conv.bias) if epilogue is None else epilogue(self.h, conv.bias)
        return {"width": conv.out_features}

    def _layer_apart(self, conv: GCNConv, x: Tensor) -> Tensor:
        """The convolution without its bias; the narrower side is aggregated, as in the layer itself."""
        if conv.out_features <= conv.in_features:
            x = ops.linear(x, conv.weight)
        out = ops.spmm(self.matrix, x).addcmul_(x, self.diagonal)
        return out if x.shape[1] == conv.out_features else ops.linear(out, conv.weight)

    def check(self) -> dict[str, Any]:
        """Every logit is a number and they differ."""
        if not all(bool(part.isfinite().all()) for part in self.h.split(4_000_000)):
            raise RuntimeError("some logits are not finite")
        return {"spread": float(self.h[:100_000].float().std())}


def timed(passage: Passage, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` tells, its seconds and its peak memory."""
    memory = Memory(passage.device)
    start = time.perf_counter()
    with torch.no_grad():
        found = work()
    synchronize(passage.device)
    return {"phase_seconds": round(time.perf_counter() - start, 3), "peak_gb": memory.peak_gb(), **found}


def forward(recorder: Recorder, passage: Passage, name: str) -> list[str]:
    """All layers as cells; the names of those that ran."""
    phases = [(f"{name} {place + 1}", lambda p=place: passage.layer(p)) for place in range(passage.args.layers)]
    done = []
    for phase, work in phases:
        cell = recorder.cell({"phase": phase}, lambda w=work: timed(passage, w))
        if cell["status"] != "ok":
            break
        done.append(phase)
    return done


def main() -> None:
    """Generate, normalise, run the layers cold and, with the input made again, once more warm."""
    args = arguments()
    recorder = Recorder("papers100m", args)
    passage = Passage(args.shape, recorder.device, args)
    made = recorder.cell({"phase": "generate"}, lambda: timed(passage, passage.generate))
    if made["status"] == "ok":
        normalise = passage.normalise if args.loops == "stored" else passage.normalise_apart
        cell = recorder.cell({"phase": f"normalise ({args.loops})"}, lambda: timed(passage, normalise))
        if cell["status"] != "ok":
            passage.graph.adj._derived.clear()
            work = passage.normalise_apart
            recorder.cell({"phase": "normalise (apart)"}, lambda: timed(passage, work))
        run(recorder, passage)
    keys = ("phase", "status", "phase_seconds", "peak_gb")
    print_table(keys, [[cell.get(key) for key in keys] for cell in recorder.cells])
    for name, seconds in recorder.about.get("forward_seconds", {}).items():
        print(f"{name} forward: {seconds:.3f} s")
    recorder.save()


def run(recorder: Recorder, passage: Passage) -> None:
    """The forward pass twice: the first compiles kernels and builds the work list."""
    shape, totals = passage.h.shape, {}
    for name in ("cold", "warm"):
        if name == "warm":
            passage.h = None  # make room first: the input and the logits are the largest tensors
            passage.h = torch.rand(shape, device=passage.device, dtype=passage.dtype)
        done = forward(recorder, passage, f"{name} layer")
        if len(done) < passage.args.layers:
            break
        totals[name] = sum(cell["phase_seconds"] for cell in recorder.cells if cell["phase"] in done)
        recorder.cell({"phase": f"check ({name})"}, lambda: timed(passage, passage.check))
    recorder.save(forward_seconds=totals)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", default="papers100m")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--loops", default="stored", choices=("stored", "apart"))
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
