"""What a process takes on a CPU against what its plan predicts: 20 runs, each in a fresh process.

    OMP_NUM_THREADS=1 python -m benchmarks.suites.on_cpu.memory [--out memory.json]

``predicted_mib`` is the plan's ``process_bytes``, made in the process that then trains for ``--epochs`` epochs;
``taken_mib`` is the peak of the resident set from the call of ``weft.run`` on, as the system counts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from typing import Any

from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table

MIB = 1 << 20
SEEDS4, SEEDS8 = [0, 1, 2, 3], list(range(8))

CASES: dict[str, dict[str, Any]] = {
    "demo-gcn": {"graph": "demo", "model": "gcn"},
    "demo-gat-x2": {"graph": "demo", "model": "gat", "hidden": 64, "seed": [0, 1]},
    "demo-gcn-x8": {"graph": "demo", "model": "gcn", "hidden": 64, "seed": SEEDS8},
    "cora-gcn": {"graph": "shape:cora", "model": "gcn", "hidden": 16, "dropout": 0.5},
    "cora-sage": {"graph": "shape:cora", "model": "sage", "hidden": 64},
    "cora-gin-x4": {"graph": "shape:cora", "model": "gin", "hidden": 64, "seed": SEEDS4},
    "cora-gatv2-x4": {"graph": "shape:cora", "model": "gatv2", "hidden": 64, "seed": SEEDS4},
    "citeseer-gcn": {"graph": "shape:citeseer", "model": "gcn", "hidden": 64},
    "pubmed-gcn-x4": {"graph": "shape:pubmed", "model": "gcn", "layers": 3, "seed": SEEDS4},
    "pubmed-sage-norm": {"graph": "shape:pubmed", "model": "sage", "norm": "batch"},
    "pubmed-gin": {"graph": "shape:pubmed", "model": "gin", "hidden": 128},
    "pubmed-gat": {"graph": "shape:pubmed", "model": "gat"},
    "pubmed-gat-x4": {"graph": "shape:pubmed", "model": "gat", "hidden": 32, "heads": 4, "seed": SEEDS4},
    "pubmed-gatv2": {"graph": "shape:pubmed", "model": "gatv2", "hidden": 64},
    "proteins-gcn-x8": {"graph": "shape:proteins", "model": "gcn", "hidden": 64, "seed": SEEDS8},
    "proteins-sage-x4": {"graph": "shape:proteins", "model": "sage", "hidden": 128, "layers": 3, "seed": SEEDS4},
    "arxiv-gcn": {"graph": "shape:ogbn-arxiv", "model": "gcn", "hidden": 64, "layers": 3},
    "arxiv-gcn-x2": {"graph": "shape:ogbn-arxiv", "model": "gcn", "hidden": 128, "seed": [0, 1]},
    "pyg-gcn-x4": {"graph": "shape:pubmed", "own": "pyg-gcn", "seed": SEEDS4},
    "own-layernorm-x4": {"graph": "shape:pubmed", "own": "own-layernorm-gcn", "seed": SEEDS4},
}

CHILD = """
import json, sys
import weft
settings = json.loads(sys.argv[1])
own = settings.pop("own", None)
if own is not None:
    from benchmarks.baselines.modules import OPAQUE, opaque_module
    from benchmarks.baselines.users_modules import users_module
    settings["model"] = opaque_module(own, layers=2) if own in OPAQUE else users_module(own)
sweep = weft.Sweep(settings.pop("graph"), epochs=int(sys.argv[2]), **settings)
report = weft.plan(sweep)
result = weft.run(sweep, device="cpu", progress=False)
print("FOUND" + json.dumps({
    "predicted": max(group.cost.process_bytes for group in report.groups),
    "tensors": max(group.cost.peak_bytes for group in report.groups),
    "taken": max(plan.measured["process_bytes"] for plan in result.plan),
}))
"""


def measure(settings: dict[str, Any], epochs: int) -> dict[str, Any]:
    """One run in a fresh process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(word for word in sys.path if word)}
    words = [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(settings), str(epochs)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    sizes = {f"{name}_mib": round(value / MIB, 1) for name, value in found.items()}
    return {**sizes, "taken_over_predicted": round(found["taken"] / found["predicted"], 3)}


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The least and the greatest ratio, and how many runs took more than 1.10 times the prediction."""
    ratios = [cell["taken_over_predicted"] for cell in cells if "taken_over_predicted" in cell]
    if not ratios:
        return {}
    return {"runs": len(ratios), "least": min(ratios), "most": max(ratios), "above_1.10": sum(r > 1.1 for r in ratios)}


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--cases", type=listed, default=list(CASES))
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Run every case and print what was predicted and taken."""
    args = arguments()
    recorder = Recorder("memory", args)
    for name in args.cases:
        recorder.cell({"case": name}, lambda n=name: measure(dict(CASES[n]), args.epochs))
    names = ("case", "tensors_mib", "predicted_mib", "taken_mib", "taken_over_predicted")
    print_table(names, [[cell.get(name) for name in names] for cell in recorder.cells])
    recorder.save(summary=summary(recorder.cells))
    print(summary(recorder.cells))


if __name__ == "__main__":
    main()
