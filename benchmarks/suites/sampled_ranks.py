"""Sampled training over ranks that share one GPU: the losses of one rank, and seconds per epoch.

    python -m benchmarks.suites.sampled_ranks --budget-seconds 90 --out sampled_ranks.json
    python -m benchmarks.suites.sampled_ranks --quick --device cpu       a tiny graph on two CPU ranks, to try it out

SAGE, 3 layers of 256, fan-out [15, 10, 5], batches of 1,024 seeds of all ranks together, no dropout, on the products
shape (scaled by ``--scale``). One rank trains as it does by default, with sampling and steps in CUDA graphs; so does
each of several, which sum their gradients on the host. Ranks that share a GPU take turns on it, so more of them are no
faster: what is compared are numbers. ``largest difference`` is of the training losses and validation losses of all
epochs from those of one rank, relative. ``predicted`` is what ``weft plan --gpus`` says of as many H200s with NVLink.
Members of ``--members`` share batches.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed
from benchmarks.report.markdown import print_rows
from weft.engine.plan import plan, shard_groups

LOSSES = ("loss", "val_loss")


def task_on(graph: str | Path, args: Namespace, **more: Any) -> weft.Task:
    """What is trained."""
    fanout = [int(word) for word in listed(args.fanout)]
    given = {"model": args.model, "hidden": args.hidden, "layers": len(fanout), "dropout": 0.0, "lr": 1e-3, **more}
    return weft.Task(graph=str(graph), mode="sampled", fanout=fanout, batch=args.batch, epochs=args.epochs, **given)


def measure(folder: Path, ranks: int, args: Namespace, alone: dict[str, Any] | None) -> dict[str, Any]:
    """Train over ``ranks``; ``alone``: the cell of one rank."""
    if ranks > 1 and alone is None:
        raise NotHere("one rank was not trained")
    device = "cuda:0" if args.device.startswith("cuda") else args.device
    tasks = [task_on(folder, args, seed=seed, eval_every=args.epochs) for seed in range(args.members)]
    result = weft.run(tasks, ranks=ranks, device=device, progress=False)
    losses = {name: [member.history[name] for member in result] for name in LOSSES}
    seconds = result[0].plan.measured["epoch_seconds"]
    found = {"epoch_seconds": seconds, "losses": losses, "epochs": args.epochs}
    if alone is None:
        return found
    pairs = [
        pair
        for name in LOSSES
        for mine, theirs in zip(losses[name], alone["losses"][name], strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    finite = [(mine, true) for mine, true in pairs if mine == mine or true == true]  # losses of no evaluation are NaN
    return {**found, "largest_difference": max(abs(mine - true) / abs(true) for mine, true in finite)}


def predict(shape: str, args: Namespace) -> dict[int, str]:
    """What a plan says of 2, 4 and 8 GPUs with NVLink, on the full shape."""
    report = plan(task_on(f"shape:{shape}", args), machine="h200")
    estimates = {count: shard_groups(report, count)[0] for count in (2, 4, 8)}
    for estimate in estimates.values():
        print(estimate)
    return {
        count: f"{one.epoch_seconds:.3f} s, {one.overlapped_seconds:.3f} s overlapped, {one.single_seconds:.3f} s alone"
        for count, one in estimates.items()
    }


def main() -> None:
    """Run the cells and print the table."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", default="products")
    parser.add_argument("--scale", type=float, default=0.2, help="of the nodes and edges of the shape")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fanout", default="15,10,5")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="a tiny graph, narrow layers and two ranks")
    args = parser.parse_args()
    if args.quick:
        args.scale, args.ranks, args.epochs, args.fanout, args.batch, args.hidden = 0.001, "1,2", 2, "3,2", 64, 8
    recorder = Recorder("sampled_ranks", args)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "graph"

        def save() -> Path:
            make_graph(args.shape, recorder.device, args.scale).to(torch.device("cpu")).save(saved)
            return saved

        if recorder.prepare(f"graph {args.shape} x {args.scale:g}", save) is not None:
            for ranks in map(int, listed(args.ranks)):
                alone = find(recorder.cells, ranks=1)
                recorder.cell({"ranks": ranks}, lambda n=ranks, one=alone: measure(saved, n, args, one))
    predicted = recorder.prepare("predictions", lambda: predict("ogbn-products", args)) or {}
    recorder.save(predicted=predicted)
    rows = [
        (
            str(cell["ranks"]),
            f"{cell['epoch_seconds']:.3f}" if cell["status"] == "ok" else str(cell.get("error") or cell.get("reason")),
            f"{cell['largest_difference']:.2e}" if "largest_difference" in cell else "",
            predicted.get(cell["ranks"], ""),
        )
        for cell in recorder.cells
    ]
    rows += [
        (str(count), "", "", words) for count, words in predicted.items() if find(recorder.cells, ranks=count) is None
    ]
    print_rows(("ranks", "epoch, s (one shared GPU)", "largest difference", "predicted, H200s with NVLink"), rows)


if __name__ == "__main__":
    main()
