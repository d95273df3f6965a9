"""Tuners at equal epochs: what random search, ASHA, halving, Hyperband and PBT find on one graph, and what it takes.

    python -m benchmarks.suites.tuning --data DIR --out tuning.json

Every search trains the same number of epochs of trials, then ends. A repeat has a seed of its own for draws and
weights. The last columns: epochs of trials per second, and how often the step was prepared (captured, on a GPU): once
per search, however many trials it had.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness.graphs import read_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun

SPACE: dict[str, Any] = {
    "lr": weft.loguniform(1e-4, 1e-1),
    "weight_decay": weft.loguniform(1e-6, 1e-2),
    "dropout": weft.uniform(0.0, 0.8),
    "hidden": weft.choice([8, 16, 32]),
}


class Bounded:
    """A tuner that ends its search once ``most`` epochs of trials were reported."""

    def __init__(self, tuner: weft.Tuner, most: int) -> None:
        self._tuner, self._most, self._running = tuner, most, set[str]()
        self.epochs = 0
        self.copies = tuner.copies

    def begin(self, search: Any) -> None:
        """Learn what to choose in."""
        self._tuner.begin(search)
        self.every = self._tuner.every

    def ask(self, n: int) -> list[dict[str, Any]]:
        """As the tuner, while epochs are left."""
        return [] if self.epochs >= self._most else self._tuner.ask(n)

    def report(self, name: str, epoch: int, row: dict[str, float]) -> None:
        """Count the epoch, and pass it on."""
        self.epochs += 1
        self._running.add(name)
        self._tuner.report(name, epoch, row)

    def stop(self) -> list[str]:
        """All that run, once the epochs are spent."""
        stopped = list(self._tuner.stop())
        return sorted(self._running) if self.epochs >= self._most else stopped

    def tell(self, name: str, summary: dict[str, Any]) -> None:
        """A trial has ended."""
        self._running.discard(name)
        self._tuner.tell(name, summary)


@contextmanager
def counted_prepares() -> Iterator[Callable[[], int]]:
    """Inside, what is yielded says how often the step of a group was prepared."""
    prepare, count = GroupRun.prepare, 0

    def counting(group: GroupRun) -> None:
        nonlocal count
        count += 1
        prepare(group)

    GroupRun.prepare = counting  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        GroupRun.prepare = prepare  # type: ignore[method-assign]


def search(graph: Graph, name: str, repeat: int, args: Namespace) -> dict[str, Any]:
    """One search by the tuner ``name``."""
    most = args.trials * args.epochs
    tuner = Bounded(weft.Tuner.of(name, seed=repeat), most)
    sweep = weft.Sweep(graph, model="gcn", epochs=args.epochs, seed=repeat, **SPACE)
    options = weft.RunOptions(tuner=tuner, trials=20 * args.trials, width=args.width)
    begin = time.perf_counter()
    with counted_prepares() as prepares:
        result = weft.run(sweep, options=options, device=str(graph.device), progress=False)
    seconds, best = time.perf_counter() - begin, result.best().metrics
    return {
        "val": best["val_accuracy"],
        "test": best["test_accuracy"],
        "trials": len(result),
        "finished": result.statuses.get("finished", 0),
        "epochs": tuner.epochs,
        "seconds": round(seconds, 2),
        "prepares": prepares(),
    }


def table(cells: list[dict[str, Any]]) -> str:
    """Means and standard deviations over repeats, a row per tuner."""
    rows = ["| tuner | best validation | its test | trials | finished | epochs | epochs per second | prepared |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(cell["tuner"] for cell in cells if cell["status"] == "ok"):
        found = [cell for cell in cells if cell["tuner"] == name and cell["status"] == "ok"]

        def spread(key: str, found: list[dict[str, Any]] = found) -> str:
            values = [cell[key] for cell in found]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            return f"{statistics.fmean(values):.4f} ± {deviation:.4f}"

        means = [f"{statistics.fmean(cell[key] for cell in found):,.0f}" for key in ("trials", "finished", "epochs")]
        rate = statistics.median(cell["epochs"] / cell["seconds"] for cell in found)
        prepared = ", ".join(sorted({str(cell["prepares"]) for cell in found}))
        rows.append("| " + " | ".join([name, spread("val"), spread("test"), *means, f"{rate:,.0f}", prepared]) + " |")
    return "\n".join(rows)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the npz files")
    parser.add_argument("--graph", default="facebook")
    parser.add_argument("--tuners", default="random,asha,halving,hyperband,pbt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=64, help="full trainings that the epochs would do for")
    parser.add_argument("--epochs", type=int, default=81)
    parser.add_argument("--width", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    """Every tuner with every seed, then the table."""
    args = arguments()
    recorder = Recorder("tuning", args)
    graph = recorder.prepare(f"graph {args.graph}", lambda: read_graph(args.data, args.graph).to(recorder.device))
    for repeat in range(args.repeats if graph is not None else 0):
        for name in listed(args.tuners):
            key = {"graph": args.graph, "tuner": name, "repeat": repeat}
            recorder.cell(key, lambda n=name, r=repeat: search(graph, n, r, args), free=False)
    recorder.save(space={name: str(source) for name, source in SPACE.items()})
    print(table(recorder.cells))


if __name__ == "__main__":
    main()
