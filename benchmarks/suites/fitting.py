"""Which configurations of PyG's models fit into a memory budget: what ``weft.estimate`` says, and what a run takes.

    python -m benchmarks.suites.fitting --budget 4GiB --out fitting.json

Configurations (GCN, GraphSAGE, GAT; 2 to 4 layers; widths to 1,024) are drawn with a fixed seed. One that should fit
is trained by ``weft.run`` within the budget; one that is not is trained without a budget, so that what it takes shows
whether it was refused rightly. *Taken* is what torch's allocator reserved beyond what it held before.
"""

from __future__ import annotations

import gc
import random
from argparse import Namespace
from typing import Any

import torch

import weft
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments
from benchmarks.report.markdown import print_rows
from weft.core.units import parse_bytes, show_bytes
from weft.graph.graph import Graph


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Settings of ``count`` tasks."""
    from torch_geometric.nn import GAT, GCN, GraphSAGE

    draw = random.Random(seed)
    settings = []
    for _ in range(count):
        model, layers = draw.choice((GCN, GraphSAGE, GAT)), draw.choice((2, 3, 4))
        hidden = draw.choice((64, 128, 256, 512, 1024))
        settings.append({"model": model, "model_args": {"hidden_channels": hidden, "num_layers": layers}})
    return settings


def reserved(device: torch.device) -> int:
    """The most bytes that torch's allocator has held since the last call; it then holds as few as it can."""
    if device.type != "cuda":
        return 0
    most = torch.cuda.max_memory_reserved(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return most


def measure(graph: Graph, settings: dict[str, Any], budget: int, epochs: int) -> dict[str, Any]:
    """One configuration: estimated, and trained for some epochs."""
    device, rest = graph.device, {name: value for name, value in settings.items() if name != "model"}
    estimate = weft.estimate(settings["model"], graph, **rest)
    fits = estimate.fits(budget=budget)
    task = weft.Task(graph=graph, mode="full", epochs=epochs, **settings)
    reserved(device)
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    found = {"fits": bool(fits), "predicted": estimate.peak_bytes, "bound": estimate.bound_bytes, "error": ""}
    try:
        weft.run(task, device=str(device), budget=budget if fits else None, progress=False)
    except weft.WeftError as error:
        found["error"] = str(error)
    return {**found, "taken": reserved(device) - before}


def main() -> None:
    """All configurations, then the table."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", default="ogbn-arxiv")
    parser.add_argument("--scale", type=float, default=1.0, help="of its nodes and edges")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--epochs", type=int, default=3)
    args: Namespace = parser.parse_args()
    recorder, budget = Recorder("fitting", args), parse_bytes(args.budget)
    graph = recorder.prepare("graph", lambda: make_graph(args.shape, recorder.device, args.scale))
    for number, settings in enumerate(drawn(args.count, args.seed) if graph is not None else ()):
        name = f"{number:02} {settings['model'].__name__} " + " x ".join(map(str, settings["model_args"].values()))
        recorder.cell({"name": name}, lambda s=settings: measure(graph, s, budget, args.epochs))
    recorder.save(budget=budget)
    rows = [
        (
            cell["name"],
            "fits" if cell["fits"] else "refused",
            *(show_bytes(cell[key]) for key in ("bound", "predicted", "taken")),
            f"{cell['predicted'] / cell['taken']:.2f}" if cell["taken"] else "",
            cell["error"],
        )
        for cell in recorder.cells
        if cell["status"] == "ok"
    ]
    print_rows(("configuration", f"in {args.budget}", "bound", "predicted", "taken", "ratio", "error"), rows)


if __name__ == "__main__":
    main()
