"""One training epoch: PyG eager, PyG compiled (with and without CUDA graphs), cuSPARSE eager and Weft, in one run.

    python -m benchmarks.suites.epoch --shapes arxiv,cora,pubmed,products --out epoch.json

Every side trains the same architecture (hidden 64, dropout 0.5, float32 without TF32). Times are medians of
single epochs on the device's own clock; memory is the peak of one epoch, graph and features included.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.baselines.epochs import MODELS, Setting, cusparse_epoch, pyg_epoch
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import Memory, time_calls
from benchmarks.harness.weft_side import weft_epoch
from weft.graph.data.graph import Graph

LAYERS = {"cora": 2, "pubmed": 4, "arxiv": 3, "products": 3}
SIDES = ("weft", "pyg", "cusparse", "compiled", "compiled-graphs", "weft-every-step")
LARGE = 20_000_000  # edges from which fewer epochs are timed, and nothing is compiled unless asked for


def schedule(graph: Graph, side: str) -> tuple[int, int]:
    """Epochs to warm up and to time; a CPU is for trying this out."""
    if graph.device.type != "cuda":
        return 1, 3
    if graph.num_edges >= LARGE:
        return (3, 20) if side.startswith("weft") else (3, 5)
    return (10, 50) if side.startswith("weft") else (5, 30)


def build(side: str, model: str, graph: Graph, setting: Setting, order: str) -> tuple[Callable[[], None], dict]:
    """The epoch of one side and what to note about it; memory is measured on ``note["eager"]`` if given."""
    if side.startswith("weft"):
        weft = weft_epoch(model, graph, setting, first_layer_once=side == "weft")
        note = {"recorded": weft.recorded, "first_layer": weft.first_layer, "notes": weft.notes}
        return weft.train, {**note, "eager": weft.eager}
    if side == "cusparse":
        return cusparse_epoch(model, graph, setting), {}
    compiled = side.startswith("compiled")
    mode = "reduce-overhead" if side == "compiled-graphs" else None
    return pyg_epoch(model, graph, setting, compiled=compiled, mode=mode, order=order), {"edge_order": order}


def measure(side: str, model: str, graph: Graph, setting: Setting, order: str) -> dict[str, Any]:
    """Time and memory of one side's epoch."""
    warmup, repeats = schedule(graph, side)
    memory = Memory(graph.device)
    start = time.perf_counter()
    epoch, note = build(side, model, fresh(graph), setting, order)
    epoch()
    setup = time.perf_counter() - start
    timing = time_calls(epoch, graph.device, warmup=warmup - 1, repeats=repeats)
    setup_peak = memory.peak_gb()
    memory.restart()
    # A replayed graph allocates nothing; the same step without the recording shows what it holds.
    note.pop("eager", epoch)()
    found = {
        "ms": round(timing.ms, 4),
        "peak_gb": _rounded(memory.peak_gb()),
        "added_gb": _rounded(memory.added_gb()),
        "peak_with_setup_gb": _rounded(setup_peak),
        "setup_seconds": round(setup, 2),
        **note,
        "timing": timing.to_dict(),
    }
    if side.startswith("compiled"):
        torch._dynamo.reset()
    return found


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
        tried = {"pyg", "compiled", "compiled-graphs"} & set(wanted)
        found = recorder.prepare(f"edge order {shape}", lambda: faster_order(graph, setting)) if tried else None
        order = found or "source"
        recorder.say(f"{shape}: PyG gets its edges by {order}")
    for model in listed(args.models):
        for side in (side for side in SIDES if side in wanted):
            if side.startswith("compiled") and graph.num_edges >= LARGE and not args.compile_large:
                continue
            if side == "weft-every-step" and model == "gat":
                continue  # attention depends on the weights: nothing is computed once
            recorder.cell(
                {"shape": shape, "model": model, "side": side},
                lambda m=model, s=side: measure(s, m, graph, setting, order),
            )


BASELINES = ("pyg", "compiled", "compiled-graphs", "cusparse")


def table(cells: list[dict[str, Any]], shapes: list[str], models: list[str]) -> list[list[Any]]:
    """A row a shape and model: milliseconds, the baselines' over Weft's, memory."""
    rows = []
    for shape in shapes:
        for model in models:
            side = {name: find(cells, shape=shape, model=model, side=name) or {} for name in SIDES}
            ms = {name: side[name].get("ms") for name in SIDES}
            over = [ms[name] / ms["weft"] if ms[name] and ms["weft"] else None for name in BASELINES]
            memory = [side[name].get("peak_gb") for name in ("weft", *BASELINES)]
            times = [ms[name] for name in ("weft", "weft-every-step", *BASELINES)]
            rows.append([shape, model, *times, *over, *memory])
    return rows


HEADER = [
    "shape", "model", "Weft ms", "(first layer every step)", "PyG", "compiled", "compiled graphs", "cuSPARSE",
    "PyG/Weft", "compiled/Weft", "compiled graphs/Weft", "cuSPARSE/Weft",
    "Weft GB", "PyG GB", "compiled GB", "compiled graphs GB", "cuSPARSE GB",
]  # fmt: skip
RATIOS = slice(8, 12)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="arxiv,cora,pubmed,products")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--edge-order", default="faster", choices=("faster", "source", "destination"))
    parser.add_argument("--compile-large", action="store_true", help="compile on large graphs as well")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("epoch", args)
    shapes = listed(args.shapes)
    for shape in shapes:
        run_shape(recorder, shape, args)
    rows = table(recorder.cells, shapes, listed(args.models))
    print_table(HEADER, rows)
    worst = [min(x for x in row[RATIOS] if x) for row in rows if any(row[RATIOS])]
    if worst:
        print(f"the best baseline over Weft: at worst {min(worst):.2f}x")
    recorder.save()


if __name__ == "__main__":
    main()
