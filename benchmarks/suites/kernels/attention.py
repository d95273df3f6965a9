"""One attention layer, forward and backward: Weft's fused GATConv against PyG's, eager and compiled.

    python -m benchmarks.suites.kernels.attention --shapes arxiv --out attention.json

The whole layer on both sides: the linear map, scores, softmax, aggregation, bias, and gradients of the input
and of every weight, for a random gradient of the output. Both start from the same weights; without dropout
their results are compared, too. ``weft-replayed`` is Weft's layer recorded as a CUDA graph, as in training.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.epochs import compile_static, ordered_edges
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import Memory, record_graph, time_until
from weft.graph.graph import Graph
from weft.nn import from_pyg

SIDES = ("weft", "weft-replayed", "pyg", "compiled", "compiled-graphs")
Grads = tuple[Tensor, ...]


class Layer:
    """PyG's layer and what goes through it; the same for every side."""

    def __init__(self, model: str, graph: Graph, args: Namespace, dropout: float) -> None:
        from torch_geometric.nn import GATConv, GATv2Conv

        torch.manual_seed(0)
        self.graph = graph
        kind = {"gat": GATConv, "gatv2": GATv2Conv}[model]
        width = args.heads * args.head_features
        self.pyg = kind(args.in_features, args.head_features, heads=args.heads, dropout=dropout)
        self.pyg = self.pyg.to(graph.device)
        self.x = torch.randn(graph.num_nodes, args.in_features, device=graph.device, requires_grad=True)
        self.grad = torch.randn(graph.num_nodes, width, device=graph.device)

    def backward(self, layer: nn.Module, out: Tensor) -> tuple[Tensor, Grads]:
        """The result and its gradients: of x first, then of the weights."""
        return out, torch.autograd.grad(out, [self.x, *layer.parameters()], self.grad)

    def weft(self) -> Callable[[], tuple[Tensor, Grads]]:
        """Weft's layer with PyG's weights."""
        layer = from_pyg(self.pyg).train()
        layer.dropout.clock = torch.tensor([1, 0], device=self.x.device)
        adj = self.graph.adj
        return lambda: self.backward(layer, layer(self.x, adj))

    def theirs(self, side: str, order: str) -> Callable[[], tuple[Tensor, Grads]]:
        """PyG's layer on edges that have their self loops already, as its documentation asks."""
        from torch_geometric.utils import add_self_loops, remove_self_loops

        edges = remove_self_loops(ordered_edges(self.graph, order))[0]
        edges = add_self_loops(edges, num_nodes=self.graph.num_nodes)[0]
        layer = self.pyg.train()
        layer.add_self_loops = False
        mode = "reduce-overhead" if side == "compiled-graphs" else None
        forward = compile_static(layer, (self.x, edges), mode) if side.startswith("compiled") else layer
        return lambda: self.backward(layer, forward(self.x, edges))


def measure(side: str, layer: Layer, order: str, reference: dict[str, Tensor]) -> dict[str, Any]:
    """Time and peak memory of one side, and how far its result is from PyG's."""
    device = layer.x.device
    memory = Memory(device)
    call = layer.weft() if side.startswith("weft") else layer.theirs(side, order)
    out, grads = call()
    found: dict[str, Any] = {}
    if layer.pyg.dropout == 0.0:
        # Cloned: a compiled graph writes its next result over this one.
        result = {"out": out.detach().cpu(), "grad_x": grads[0].cpu()}  # not beside what is measured
        reference = reference if reference else reference.update(result) or result
        found = {f"{name}_difference": _relative(result[name], reference[name]) for name in result}
    del out, grads
    memory.restart()
    call()
    peaks = {"peak_gb": memory.peak_gb(), "added_gb": memory.added_gb()}
    repeated, kept = call, None
    if side == "weft-replayed" and device.type == "cuda":
        graph, kept = record_graph(call)
        repeated = graph.replay
    timing = time_until(repeated, device, warmup=5, repeats=50, seconds=3.0, least=5)
    del kept
    if side.startswith("compiled"):
        torch._dynamo.reset()
    return {"ms": round(timing.ms, 4), **peaks, **found, "timing": timing.to_dict()}


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def run_shape(recorder: Recorder, shape: str, args: Namespace) -> None:
    """Every model, rate and side on one shape."""
    graph = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale))
    if graph is None:
        return
    for model in listed(args.models):
        for dropout in (float(text) for text in listed(args.dropout)):
            reference: dict[str, Tensor] = {}
            for side in (side for side in SIDES if side in listed(args.sides)):
                key = {"shape": shape, "model": model, "dropout": dropout, "side": side}

                def work(m=model, p=dropout, s=side, r=reference) -> dict[str, Any]:
                    return measure(s, Layer(m, fresh(graph), args, p), args.edge_order, r)

                recorder.cell(key, work)


def table(cells: list[dict[str, Any]]) -> list[list[Any]]:
    """A row a shape, model and rate: milliseconds, PyG's over Weft's, memory."""
    rows = []
    keys = dict.fromkeys((cell["shape"], cell["model"], cell["dropout"]) for cell in cells)
    for shape, model, dropout in keys:
        side = {name: find(cells, shape=shape, model=model, dropout=dropout, side=name) or {} for name in SIDES}
        ms = {name: side[name].get("ms") for name in SIDES}
        weft = ms["weft"]
        over = [ms[name] / weft if weft and ms[name] else None for name in ("pyg", "compiled", "compiled-graphs")]
        memory = [side[name].get("peak_gb") for name in ("weft", "pyg", "compiled", "compiled-graphs")]
        less = [other / memory[0] if memory[0] and other else None for other in memory[2:3]]
        rows.append([shape, model, dropout, *ms.values(), *over, *memory, *less])
    return rows


HEADER = [
    "shape", "model", "dropout", "Weft ms", "replayed", "PyG", "compiled", "compiled graphs",
    "PyG/Weft", "compiled/Weft", "compiled graphs/Weft",
    "Weft GB", "PyG GB", "compiled GB", "compiled graphs GB", "compiled/Weft GB",
]  # fmt: skip


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="arxiv")
    parser.add_argument("--models", default="gat,gatv2")
    parser.add_argument("--dropout", default="0,0.5", help="rates on the attention coefficients")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-features", type=int, default=16)
    parser.add_argument("--in-features", type=int, default=128)
    parser.add_argument("--edge-order", default="source", choices=("source", "destination"))
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("attention", args)
    for shape in listed(args.shapes):
        run_shape(recorder, shape, args)
    print_table(HEADER, table(recorder.cells))
    recorder.save()


if __name__ == "__main__":
    main()
