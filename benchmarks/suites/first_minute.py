"""The first minute: wall seconds of a whole ``weft.run`` of 200 epochs, from a fresh process on, beside PyG eager.

    python -m benchmarks.suites.first_minute --out first_minute.json
    python -m benchmarks.suites.first_minute --cells pubmed-gcn,cora-gat
    OMP_NUM_THREADS=1 python -m benchmarks.suites.first_minute --device cpu --cells cora-gcn --hidden 16

Sides: ``cold`` is a fresh process with an empty kernel cache and nothing known of the machine; ``disk`` a fresh process
that finds kernels on disk, with a second run in the same process (``second_seconds``) and the epochs alone, replayed
with their evaluations (``epochs_seconds``); ``pyg`` PyG's eager loop of the same task in a fresh process. Every process
has its own ``TRITON_CACHE_DIR``, ``TORCHINDUCTOR_CACHE_DIR`` and ``WEFT_HOME``, shared by ``cold`` and ``disk`` of a
cell. Python's byte code of both is on disk before the first cell, as it is after an installation.

``seconds`` is from the call with a graph on the host to the result, evaluated after every epoch on both sides;
``first_epoch_seconds`` to the first progress event, ``fixed_seconds`` of the second run less its epochs.
``process_seconds`` also has the imports of both, starting the device and making the graph: what a user waits who types
the command. On an H200 with 16 cores the default cells take about two and a half minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.recorder import Recorder, common_arguments, listed

LAYERS = {"cora": 2, "pubmed": 4, "arxiv": 3}
CELLS = ("pubmed-gcn", "pubmed-gat", "cora-gcn", "arxiv-gcn", "arxiv-gat")
SIDES = ("cold", "disk", "pyg")
MOST_SECONDS = 180.0  # of one process


# ---- the parent: a process per cell ------------------------------------------------------------------


def environment_in(folder: Path) -> dict[str, str]:
    """The variables of a process whose caches are in ``folder`` alone, but for the byte code beside it."""
    own = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "WEFT_HOME": "home"}
    path = os.pathsep.join(word for word in sys.path if word)
    about = {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(folder.parent / "byte code"), "PYTHONDONTWRITEBYTECODE": ""}
    return {**os.environ, **{name: str(folder / part) for name, part in own.items()}, **about}


def write_byte_code(folder: Path, sides: Sequence[str]) -> None:
    """Import what the sides import, so that no cell is the first to read the sources."""
    names = ["torch", "benchmarks.harness.graphs"]
    names += ["torch_geometric.nn", "benchmarks.baselines.epochs"] if "pyg" in sides else []
    words = [sys.executable, "-W", "ignore", "-c", f"import {', '.join(names)}"]
    subprocess.run(words, env=environment_in(folder), capture_output=True, timeout=MOST_SECONDS, check=False)


def measure(side: str, shape: str, model: str, folder: Path, args: Namespace) -> dict[str, Any]:
    """What one process found; a RuntimeError with its last words if it failed."""
    if side == "disk" and not (folder / "filled").exists():
        in_process("cold", shape, model, folder, args)
    found = in_process(side, shape, model, folder, args)
    if side == "disk":  # a process that does nothing else, from its first line to its last
        found["once_process_seconds"] = in_process("once", shape, model, folder, args)["process_seconds"]
    return found


def in_process(side: str, shape: str, model: str, folder: Path, args: Namespace) -> dict[str, Any]:
    """One fresh process with the caches in ``folder``."""
    request = {"child": side, "shape": shape, "model": model, "device": str(args.device)}
    request |= {"epochs": args.epochs, "hidden": args.hidden, "scale": args.scale}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.suites.first_minute", "--child", json.dumps(request)]
    begin = time.perf_counter()
    env = environment_in(folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process ended with {done.returncode}: {last}")
    (folder / "filled").touch()
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": round(seconds, 3)}


def run_all(recorder: Recorder, args: Namespace) -> None:
    """Every chosen cell, in caches of its own."""
    with tempfile.TemporaryDirectory() as whole:
        write_byte_code(Path(whole, "none"), listed(args.sides))
        for name in listed(args.cells):
            shape, _, model = name.partition("-")
            folder = Path(whole, name)
            folder.mkdir()
            for side in (side for side in SIDES if side in listed(args.sides)):
                key = {"shape": shape, "model": model, "side": side}
                recorder.cell(key, lambda s=side, p=shape, m=model, f=folder: measure(s, p, m, f, args))


# ---- the child: one training -------------------------------------------------------------------------


def child(args: Namespace) -> dict[str, Any]:
    """One side in this process."""
    begin = time.perf_counter()
    import torch

    from benchmarks.harness.graphs import make_graph
    from weft.core.task import Task

    if args.child == "pyg":
        import torch_geometric.nn  # noqa: F401
    else:
        import weft.engine.run  # noqa: F401
    device = torch.device(args.device)
    graph = make_graph(args.shape, torch.device("cpu"), args.scale)
    task = Task(graph=graph, model=args.model, layers=LAYERS.get(args.shape, 3), hidden=args.hidden, epochs=args.epochs,
                **({"heads": 4} if args.model == "gat" else {}))  # fmt: skip
    if device.type == "cuda":
        torch.cuda.init()
    ready = time.perf_counter() - begin
    found = pyg_run(task, device) if args.child == "pyg" else weft_run(task, device, again=args.child == "disk")
    return {"ready_seconds": round(ready, 3), **found}


def weft_run(task: Any, device: Any, again: bool) -> dict[str, Any]:
    """``weft.run``, and a second one with the epochs alone if ``again``."""
    import weft
    from benchmarks.harness.graphs import fresh

    plans = []

    def once() -> dict[str, Any]:
        graph, seen = fresh(task.graph), {}
        begin = time.perf_counter()

        def note(event: Any) -> None:
            seen.setdefault(event.kind, round(time.perf_counter() - begin, 4))
            if event.kind == "preparing":
                seen["kernels"] = event.data.get("total", 0)

        result = weft.run(task.with_values(graph=graph), device=str(device), progress=False, on_event=note)
        seconds = round(time.perf_counter() - begin, 4)
        if result.status != "finished":
            raise RuntimeError(f"{result.status}: {result.message}")
        plans.append(result.plan)
        events = {"first_event_seconds": seen["preparing"], "first_epoch_seconds": seen["progress"]}
        return {"seconds": seconds, **events, "kernels_compiled": seen.get("kernels", 0)}

    found = once()
    if again:
        second, epochs = once(), epochs_alone(task, plans[-1], device)
        found |= {"second_seconds": second["seconds"], "epochs_seconds": epochs}
        found |= {"second_first_epoch_seconds": second["first_epoch_seconds"]}
        found |= {"fixed_seconds": round(second["seconds"] - epochs, 4)}
    return found


def epochs_alone(task: Any, plan: Any, device: Any) -> float:
    """The task's epochs with their evaluations, as replayed, without anything before the first."""
    from benchmarks.harness.graphs import fresh
    from benchmarks.harness.timing import synchronize
    from weft.runtime.device.process import cpu_threads
    from weft.runtime.group import GroupRun

    graph = fresh(task.graph).to(device)
    task = task.with_values(graph=graph, epochs=task.epochs + 1)
    with cpu_threads(plan.threads):
        run = GroupRun([task], graph, plan, device)
        run.advance(1)
        synchronize(device)
        begin = time.perf_counter()
        run.advance(task.epochs - 1)
        synchronize(device)
        return round(time.perf_counter() - begin, 4)


def pyg_run(task: Any, device: Any) -> dict[str, Any]:
    """PyG's eager loop from the graph on the host to the trained model."""
    from benchmarks.baselines.epochs import train_pyg
    from benchmarks.harness.timing import synchronize

    begin = time.perf_counter()
    train_pyg(task, task.graph.to(device))
    synchronize(device)
    return {"seconds": round(time.perf_counter() - begin, 4)}


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--cells", default=",".join(CELLS), help="SHAPE-MODEL,...")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table; with ``--child`` one training, printed as JSON."""
    if "--child" in sys.argv:
        print(json.dumps(child(Namespace(**json.loads(sys.argv[-1])))))
        return
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("first_minute", args)
    run_all(recorder, args)
    recorder.print_tables(runs.first_minute)


if __name__ == "__main__":
    main()
