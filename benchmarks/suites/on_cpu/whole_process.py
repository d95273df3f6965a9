"""One GCN of 200 epochs from ``python`` to exit, as a script: Weft against PyG, one thread each.

    python -m benchmarks.suites.on_cpu.whole_process [--data DIR] [--out whole_process.json]

Kipf and Welling's settings on Cora where DIR/cora.npz is, else on the graph that comes with Weft. Both scripts read the
same file and evaluate after every epoch; runs alternate, and the first of each side, which fills caches on disk, is not
counted. ``cpu_seconds`` is what the process computed, which a busy machine changes less than what a clock says.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import Recorder, common_arguments, find, print_table
from weft.graph.catalog.listing import data_folders

WEFT = """
import weft
graph = weft.open({path!r})
task = weft.Task(graph=graph, model="gcn", hidden=16, dropout=0.5, input_dropout=0.5, feature_norm="row", lr=0.01,
                 weight_decay=5e-4, decay="first", epochs={epochs})
result = weft.run(task, device="cpu", progress=False)
print(result.metrics["test_accuracy"])
"""

PYG = """
import numpy as np
import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

data = np.load({path!r})
x = torch.zeros(*map(int, data["x_shape"]))
rows = np.repeat(np.arange(x.shape[0]), np.diff(data["x_indptr"]))
x[torch.from_numpy(rows), torch.from_numpy(data["x_indices"].astype(np.int64))] = torch.from_numpy(
    data["x_data"].astype(np.float32))
x = x / x.sum(1, keepdim=True).clamp(min=1.0)
edge_index = torch.from_numpy(np.stack([data["src"], data["dst"]]).astype(np.int64))
y, train, val, test = (torch.from_numpy(data[name].astype(np.int64)) for name in ("y", "train", "val", "test"))

class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GCNConv(x.shape[1], 16, cached=True)
        self.second = GCNConv(16, int(y.max()) + 1, cached=True)

    def forward(self):
        h = F.dropout(x, 0.5, self.training)
        h = F.dropout(self.first(h, edge_index).relu(), 0.5, self.training)
        return self.second(h, edge_index)

torch.manual_seed(0)
model = GCN()
groups = [dict(params=model.first.parameters(), weight_decay=5e-4), dict(params=model.second.parameters())]
optimizer = torch.optim.Adam(groups, lr=0.01)
best = found = 0.0
for _ in range({epochs}):
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model()[train], y[train]).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = model().argmax(1) == y
    score = hits[val].float().mean().item()
    if score > best:
        best, found = score, hits[test].float().mean().item()
print(found)
"""
SCRIPTS = {"weft": WEFT, "pyg": PYG}


def graph_file(folder: Path) -> Path:
    """Cora, or the graph that comes with Weft."""
    from weft.graph.catalog.names import DEMO

    return folder / "cora.npz" if (folder / "cora.npz").exists() else DEMO


def run_script(side: str, path: Path, epochs: int, folder: Path) -> dict[str, Any]:
    """One process: seconds by the clock and of its own, and the accuracy that it prints."""
    script = folder / f"gcn_with_{side}.py"
    script.write_text(SCRIPTS[side].format(path=str(path), epochs=epochs))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(word for word in sys.path if word)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": own, "accuracy": float(done.stdout.split()[-1])}


def measure(args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every side ``--runs`` times, in turn, after one that is not counted."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SCRIPTS}
    path = graph_file(args.data)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs + 1):
            for side, runs in found.items():
                runs.append(run_script(side, path, args.epochs, Path(folder)))
    return {side: runs[1:] for side, runs in found.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians."""
    return {name: round(median(run[name] for run in runs), 3) for name in runs[0]}


def table(cells: list[dict[str, Any]]) -> list[list[Any]]:
    """A row per measure, with how many times as fast Weft is."""
    weft, pyg = (find(cells, side=side) or {} for side in SCRIPTS)
    names = [name for name in ("seconds", "cpu_seconds") if name in weft and name in pyg]
    return [[name, weft[name], pyg[name], round(pyg[name] / weft[name], 2)] for name in names]


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=data_folders()[0])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Run both scripts and print how they compare."""
    args = arguments()
    recorder = Recorder("whole_process", args)
    found = recorder.prepare("processes", lambda: measure(args)) or {}
    for side, runs in found.items():
        recorder.cell({"side": side}, lambda r=runs: summary(r))
    print_table(["", "Weft", "PyG", "times as fast"], table(recorder.cells))
    recorder.save()


if __name__ == "__main__":
    main()
