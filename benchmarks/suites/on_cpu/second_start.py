"""How long a second process takes until it trains on a large graph, with and without forms remembered by the first.

    OMP_NUM_THREADS=1 python -m benchmarks.suites.on_cpu.second_start [--scale 0.1] [--out second_start.json]

The graph has the products shape, saved as a folder. Sides: ``none`` remembers nothing, ``first`` makes the forms and
writes them, ``second`` finds them. ``start_s`` are CPU seconds of the process from ``weft.run`` to the event before the
first epoch, imports of torch not included; ``losses`` must be the same on all sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table

CHILD = """
import json, sys, time
import torch, weft, weft.engine.run
marks = {}
task = weft.Task(graph=sys.argv[1], model=sys.argv[2], hidden=16, epochs=2)
begin = time.process_time()
result = weft.run(task, device="cpu", progress=False,
                  on_event=lambda event: marks.setdefault(event.kind, time.process_time() - begin))
print("FOUND" + json.dumps({"start_s": marks["start"], "losses": result.history["loss"]}))
"""
SIDES = ("none", "first", "second")


def child(graph: Path, model: str, home: Path, limit: str) -> dict[str, Any]:
    """One run in a fresh process."""
    paths = os.pathsep.join(word for word in sys.path if word)
    env = {**os.environ, "PYTHONPATH": paths, "WEFT_HOME": str(home), "WEFT_FORMS": limit}
    words = [sys.executable, "-W", "ignore", "-c", CHILD, str(graph), model]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.rpartition("FOUND")[2])
    return found


def measure(graph: Path, model: str, folder: Path, runs: int) -> dict[str, Any]:
    """Median CPU seconds of every side; the first process is one, the others are ``runs``."""
    home = folder / model
    child(graph, model, home, "0")  # the pages of the graph are in memory, kernels are compiled
    none = [child(graph, model, home, "0") for _ in range(runs)]
    first = [child(graph, model, home, "16GiB")]
    second = [child(graph, model, home, "16GiB") for _ in range(runs)]
    sides = dict(zip(SIDES, (none, first, second), strict=True))
    losses = {tuple(one["losses"]) for found in sides.values() for one in found}
    taken = {f"{side}_s": round(median(one["start_s"] for one in found), 3) for side, found in sides.items()}
    return {**taken, "same_losses": len(losses) == 1, "none_over_second": round(taken["none_s"] / taken["second_s"], 2)}


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--models", type=listed, default=["gcn", "sage"])
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Measure every model and print the seconds of all sides."""
    import weft

    args = arguments()
    recorder = Recorder("second_start", args)
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "products"
        recorder.prepare("graph", lambda: weft.load(f"shape:ogbn-products?scale={args.scale}").save(graph))
        for model in args.models:
            recorder.cell({"model": model}, lambda m=model: measure(graph, m, Path(folder), args.runs))
    names = ("model", *(f"{side}_s" for side in SIDES), "none_over_second", "same_losses")
    print_table(names, [[cell.get(name) for name in names] for cell in recorder.cells])
    recorder.save()


if __name__ == "__main__":
    main()
