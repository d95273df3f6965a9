"""One training epoch: PyG eager, compiled and captured, cuSPARSE eager and captured, and Weft, in one run.

    python -m benchmarks.suites.epoch --shapes arxiv,cora,pubmed,products --out epoch.json

Every side trains the same architecture (hidden 64, dropout 0.5, float32 without TF32). Times are medians of
single epochs on the device's own clock; memory is the peak of one epoch, graph and features included.

``captured`` and ``cusparse-captured`` replay the whole step with loss, backward and Adam as one CUDA graph.
``weft-every-step`` denies Weft the first layer's aggregation computed once. A side that cannot be run is recorded with
its reason.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.baselines.epochs import (
    MODELS,
    Setting,
    cusparse_captured,
    cusparse_epoch,
    pyg_captured,
    pyg_epoch,
)
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed
from benchmarks.harness.timing import Memory, time_calls
from benchmarks.harness.weft_side import weft_epoch
from weft.graph.graph import Graph
from weft.runtime.device.process import matmul_precision

LAYERS = {"cora": 2, "pubmed": 4, "arxiv": 3, "products": 3}
BASELINES = ("pyg", "compiled", "captured", "cusparse", "cusparse-captured")
SIDES = ("weft", "weft-every-step", "pyg", "cusparse", "cusparse-captured", "compiled", "captured")
PYG_SIDES = ("pyg", "compiled", "captured")
COMPILED_SIDES = ("compiled", "captured")
LARGE = 20_000_000  # edges from which fewer epochs are timed, and nothing is compiled unless asked for


def schedule(graph: Graph, side: str) -> tuple[int, int]:
    """Epochs to warm up and to time; a CPU is for trying this out."""
    if graph.device.type != "cuda":
        return 1, 3
    if graph.num_edges >= LARGE:
        return (3, 20) if side.startswith("weft") else (3, 5)
    return (10, 50) if side.startswith("weft") else (5, 30)


def build(
    side: str, model: str, graph: Graph, setting: Setting, order: str, precision: str = "fp32"
) -> tuple[Callable[[], None], dict]:
    """The epoch of one side and what to note about it; memory is measured on ``note["eager"]`` if given."""
    if side.startswith("weft"):
        weft = weft_epoch(model, graph, setting, first_layer_once=side == "weft")
        note = {"recorded": weft.recorded, "first_layer": weft.first_layer, "notes": weft.notes}
        return weft.train, {**note, "eager": weft.eager}
    if side == "cusparse":
        return cusparse_epoch(model, graph, setting), {}
    if side == "cusparse-captured":
        whole = cusparse_captured(model, graph, setting)
        return whole.train, {**whole.note, "eager": whole.eager}
    how = {"order": order, "precision": precision}
    if side == "captured":
        # Compiling for a CPU needs a C++ compiler and says nothing about a GPU: there the eager step stands in.
        whole = pyg_captured(model, graph, setting, compiled=graph.device.type == "cuda", **how)
        return whole.train, {**whole.note, "edge_order": order, "eager": whole.eager}
    return pyg_epoch(model, graph, setting, compiled=side == "compiled", **how), {"edge_order": order}


def measure(
    side: str, model: str, graph: Graph, setting: Setting, order: str, precision: str = "fp32"
) -> dict[str, Any]:
    """Time and memory of one side's epoch."""
    warmup, repeats = schedule(graph, side)
    memory = Memory(graph.device)
    start = time.perf_counter()
    try:
        with matmul_precision(precision):
            epoch, note = build(side, model, fresh(graph), setting, order, precision)
            epoch()
            setup = time.perf_counter() - start
            timing = time_calls(epoch, graph.device, warmup=warmup - 1, repeats=repeats)
            setup_peak = memory.peak_gb()
            memory.restart()
            # A replayed graph allocates nothing; the same step without the recording shows what it holds.
            note.pop("eager", epoch)()
    finally:
        if side in COMPILED_SIDES:
            torch._dynamo.reset()
    return {
        "ms": round(timing.ms, 4),
        "peak_gb": _rounded(memory.peak_gb()),
        "added_gb": _rounded(memory.added_gb()),
        "peak_with_setup_gb": _rounded(setup_peak),
        "setup_seconds": round(setup, 2),
        **note,
        "timing": timing.to_dict(),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def faster_order(graph: Graph, setting: Setting) -> str:
    """The order of edges in which PyG's GCN trains faster."""
    ms = {}
    for order in ("source", "destination"):
        epoch = pyg_epoch("gcn", graph, setting, order=order)
        ms[order] = time_calls(epoch, graph.device, warmup=1, repeats=2 if graph.num_edges >= LARGE else 5).best
        del epoch
    return min(ms, key=ms.__getitem__)


def run_shape(recorder: Recorder, shape: str, args: Namespace) -> None:
    """All models and sides on one shape."""
    graph = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale))
    if graph is None:
        return
    setting = Setting(layers=LAYERS.get(shape, 3), hidden=args.hidden)
    wanted = listed(args.sides)
    order = args.edge_order
    if order == "faster":
        tried = set(PYG_SIDES) & set(wanted)
        found = recorder.prepare(f"edge order {shape}", lambda: faster_order(graph, setting)) if tried else None
        order = found or "source"
    recorder.say(f"{shape}: PyG gets its edges by {order}")
    for model in listed(args.models):
        for side in (side for side in SIDES if side in wanted):
            recorder.cell(
                {"shape": shape, "model": model, "side": side},
                lambda m=model, s=side: checked(s, m, graph, setting, order, args),
            )


def checked(
    side: str, model: str, graph: Graph, setting: Setting, order: str, args: Namespace, precision: str = "fp32"
) -> dict[str, Any]:
    """:func:`measure`, or NotHere with the reason why this cell is left out."""
    why_not = left_out(side, model, graph, args.compile_large)
    if why_not:
        raise NotHere(why_not)
    return measure(side, model, graph, setting, order, precision)


def left_out(side: str, model: str, graph: Graph, compile_large: bool) -> str | None:
    """Why a side is not measured; None if it is."""
    if side in COMPILED_SIDES and graph.num_edges >= LARGE and not compile_large:
        return f"graphs of {LARGE:,} edges or more are compiled only with --compile-large"
    if side == "weft-every-step" and model == "gat":
        return "attention depends on the weights: nothing is computed once"
    return None


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="arxiv,cora,pubmed,products")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--edge-order", default="faster", choices=("faster", "source", "destination"),
                        help="of PyG's edges; faster: what is faster for eager GCN")  # fmt: skip
    parser.add_argument("--compile-large", action="store_true", help="compile on large graphs as well")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    from benchmarks.report import training

    args = arguments()
    recorder = Recorder("epoch", args)
    for shape in listed(args.shapes):
        run_shape(recorder, shape, args)
    recorder.print_tables(training.epoch)


if __name__ == "__main__":
    main()
