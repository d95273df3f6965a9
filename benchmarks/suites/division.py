"""Batch preparation divided between CPU and GPU: simulator against reality, against either side alone, within budgets.

    python -m benchmarks.suites.division --out division.json --budget-seconds 390
    python -m benchmarks.suites.division --out division.json --budget-seconds 390 --resume     # what was left out

Sides: ``host`` (CPU threads prepare all batches), ``device`` (the GPU samples and gathers over PCIe beside training)
and ``weft`` (the division that a profile leads to); ``share S``: an exhaustive search over the ratio. Per cell: the
epoch's measured and simulated seconds and the busy share of CPU, PCIe and GPU. An epoch has ``--batches`` batches of
``--seeds`` seeds with fan-out [15, 10, 5]; evaluation is left out. Of repeated epochs the median counts, the lower of
two.

In this order, the most telling first, so that a run that ends early has them (``benchmarks/harness/division_case.py``
makes the graphs and groups):

1. the first shape and model over all worker counts, then every ratio;
2. what ``weft.plan`` chooses within the first of ``--budgets`` GiB of the GPU on ``--budget-shape``, for every model
   and all worker counts, beside both sides alone with the same cache; of the first model every ratio, and epochs beside
   busy processes, with and without adapting (``--stress``, unless ``--no-stress``). There the GPU reads more memory
   than it finds quickly, so that both sides take about as long;
3. the same within the other budgets. What the host prepares does not depend on the cache, so it is measured once per
   model; neither does the GPU alone depend on the workers;
4. the other models on the first shape, with few worker counts; ratios of those in ``--searched``;
5. all models on the other shapes, with few worker counts.

The last lines are a table of what was to be shown: pass, miss or not measured
(``benchmarks/harness/division_report.py``).
The results file is written after every cell, and a figure beside it at the end (speed over workers, as MorphGL's
Figure 9). ``--resume`` runs the cells that are not in it. ``--quick`` runs the same
on this CPU, where a thread with given phase times stands in for the GPU.
"""

from __future__ import annotations

import gc
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness.division_case import (
    DEVICE_BUFFER,
    Case,
    make_case,
    measure,
    phases_of,
    plain_ms,
    shape_graph,
    task_of,
)
from benchmarks.harness.division_report import SIDES, print_report, speed_panels
from benchmarks.harness.noisy_neighbour import stressed
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed
from benchmarks.harness.speed_plot import speed_svg
from weft.core.placement import Placement
from weft.core.units import parse_bytes
from weft.engine.planning.plan_report_builder import plan as make_plan
from weft.graph.data.graph import Graph

REPEATED_FROM = 8  # workers of the host from which on epochs are repeated: fewer take long and vary little
# An epoch begins with as many batches at once as there are workers, and ends with them: of 32 batches that is a part of
# the epoch that the 193 of products and the 1,179 of papers100M do not have.
BATCHES, QUICK_BATCHES = 84, 24
Key = dict[str, Any]


class Suite:
    """The cells of a run, in their order; graphs and groups are made when the first cell that needs them runs."""

    def __init__(self, recorder: Recorder, args: Namespace) -> None:
        self.recorder, self.args = recorder, args
        self._graph: tuple[str, Graph] | None = None

    def run(self) -> None:
        """Everything."""
        shapes, models, budgets = (listed(text) for text in (self.args.shapes, self.args.models, self.args.budgets))
        whole = _counts(self.args, whole=True)
        self.compare(shapes[0], models[0], whole)
        for budget in budgets:
            for model in models:
                leads = (budget, model) == (budgets[0], models[0])
                self.within_budget(self.args.budget_shape, model, float(budget), leads)
        if self.args.stress and not find(self.recorder.cells, side="stress"):
            self.compare(shapes[0], models[0], whole, stress=True)
        for shape in shapes:
            for model in models:
                if (shape, model) != (shapes[0], models[0]):
                    self.compare(shape, model, _counts(self.args, whole=False))

    # ---- one shape and model -------------------------------------------------------------------------

    def compare(self, shape: str, model: str, workers: list[int], stress: bool = False) -> None:
        """Sides over worker counts, ratios, and a noisy neighbour where ``stress`` says so."""
        base = {"shape": shape, "model": model, "budget_gib": None}
        keys = self._sides(base, workers)
        if shape == listed(self.args.shapes)[0] and model in listed(self.args.searched):
            keys += self._ratios(base)
        keys += self._stress(base) if stress else []
        self._cells(keys, f"{shape} {model}", lambda: make_case(self.graph(shape), shape, model, self.args))

    @staticmethod
    def _sides(base: Key, workers: list[int]) -> list[Key]:
        return [{**base, "side": "profile"}] + [{**base, "workers": w, "side": side} for w in workers for side in SIDES]

    def _ratios(self, base: Key) -> list[Key]:
        most, steps = {**base, "workers": self.args.most_workers}, self.args.ratios
        return [{**most, "side": f"share {step / steps:.2f}"} for step in range(1, steps)]

    @staticmethod
    def _stress(base: Key) -> list[Key]:
        return [{**base, "side": "stress", "adapting": adapting} for adapting in (True, False)]

    def _cells(self, keys: list[Key], label: str, make: Callable[[], Case]) -> None:
        """The cells of one case, which is made unless all of them are known."""
        if all(find(self.recorder.cells, **key) for key in keys):
            self.recorder.say(f"{label}: done before")
            return
        gc.collect()  # the case before: two at once may not fit
        case = self.recorder.prepare(label, make)
        for key in keys if case is not None else ():
            self.recorder.cell(key, partial(self._cell, case, key), free=False)

    def _cell(self, case: Case, key: Key) -> dict[str, Any]:
        side = key["side"]
        if side == "profile":
            return phases_of(case)
        if side == "stress":
            return stressed(case, key["adapting"], self.args)
        return self._known(key) or self._measured(case, key)

    def _measured(self, case: Case, key: Key) -> dict[str, Any]:
        division = case.side(key["side"], key["workers"])
        if key["side"] == "weft" and division.kind == "sequential":
            same = self._known({**key, "side": "device"})
            if same is not None:
                return {**same, "same_as": "device"}
        slow = key["side"] == "host" and key["workers"] < REPEATED_FROM
        return measure(case, division, 1 if slow else self.args.repeats, warm=key["side"] == "device")

    def _known(self, key: Key) -> dict[str, Any] | None:
        """What was measured already and does not depend on the workers (device) or on the budget's cache (host)."""
        free = {"device": "workers", "host": "budget_gib"}.get(key["side"])
        found = find(self.recorder.cells, **{name: value for name, value in key.items() if name != free})
        dropped = (*key, "status", "cell_seconds")
        if found is None:
            return None
        return {**{name: value for name, value in found.items() if name not in dropped}, "same_as": key["side"]}

    def graph(self, shape: str) -> Graph:
        """The graph of a shape; only the last one is kept."""
        if self._graph is None or self._graph[0] != shape:
            self._graph = None
            made = self.recorder.prepare(f"graph {shape}", lambda: shape_graph(shape, self.recorder.device, self.args))
            if made is None:
                raise RuntimeError(f"the graph of shape {shape} could not be made")
            self._graph = (shape, made)
        return self._graph[1]

    # ---- budgets -------------------------------------------------------------------------------------

    def within_budget(self, shape: str, model: str, budget: float, leads: bool) -> None:
        """The plan within ``budget`` GiB, and its sides over all worker counts; of the leading one ratios, too."""
        base = {"shape": shape, "model": model, "budget_gib": budget}
        workers = _counts(self.args, whole=True)
        made = self.recorder.cell({**base, "side": "plan"}, lambda: self._planned(shape, model, budget))
        if made["status"] != "ok":
            return
        place = Placement.from_dict(made["placement"])
        if place.on_device:
            for key in self._sides(base, workers)[1:]:
                self.recorder.cell(key, partial(self._on_device, key, place), free=False)
            return
        keys = self._sides(base, workers)
        if leads:
            keys += self._ratios(base) + (self._stress(base) if self.args.stress else [])
        about = (place, made["device_buffer"])
        make = lambda: make_case(self.graph(shape), shape, model, self.args, *about)  # noqa: E731
        self._cells(keys, f"{shape} {model} within {budget:g} GiB", make)

    def _on_device(self, key: Key, place: Placement) -> dict[str, Any]:
        """Of a plan that has everything on the GPU, so that Weft's way is the GPU's; the host as measured elsewhere."""
        known = self._known(key if key["side"] == "host" else {**key, "side": "device"})
        if known is None and key["side"] == "host":
            raise NotHere("the host's side was not measured within another budget")
        return known or {"ms_per_batch": self._plain(key["shape"], key["model"], place)}

    def _planned(self, shape: str, model: str, budget: float) -> dict[str, Any]:
        graph = self.graph(shape)
        task = task_of(graph, model, self.args)
        group = make_plan(task, machine=self.args.machine, budget=parse_bytes(f"{budget}GiB")).groups[0]
        seconds = group.cost.epoch_seconds / max(self.args.batches, 1)
        about = {"placement": group.plan.places.to_dict(), "predicted_gb": round(group.cost.total_bytes / 1e9, 3)}
        about |= {"nodes": graph.num_nodes, "edges": graph.num_edges}
        division = group.plan.division
        about["device_buffer"] = DEVICE_BUFFER if division is None else division.device_buffer
        return {**about, "predicted_ms_per_batch": round(1e3 * seconds, 4), "why": list(group.plan.why)}

    def _plain(self, shape: str, model: str, place: Placement) -> float:
        graph = self.graph(shape)
        return plain_ms(graph, task_of(graph, model, self.args), place, self.args)


def _counts(args: Namespace, whole: bool) -> list[int]:
    """Worker counts from the most down: what takes longest comes last."""
    counts = sorted({int(text) for text in listed(args.workers)}, reverse=True)
    few = {int(text) for text in listed(args.few_workers)} & set(counts)
    return counts if whole else sorted(few, reverse=True) or counts[:2]


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="on this CPU, with a thread in place of the GPU")
    parser.add_argument("--shapes", default="products,uk")
    parser.add_argument("--models", default="sage,gcn,gat")
    parser.add_argument("--workers", default="1,2,4,8,14", help="threads of the host, for the first model and shape")
    parser.add_argument("--few-workers", default="4,14", help="of them for the others")
    parser.add_argument("--budgets", default="12,24,80", help="GiB of the GPU that plans are made for; empty: none")
    parser.add_argument("--budget-shape", default="papers100m", help="that they are for")
    parser.add_argument("--machine", default="h200", help="that they are made for")
    parser.add_argument("--searched", default="sage,gcn", help="models of which all ratios are measured")
    parser.add_argument("--papers-scale", type=float, default=0.5, help="of papers100M, if the host's memory holds it")
    parser.add_argument("--batches", type=int, help=f"per epoch; {BATCHES}, with --quick {QUICK_BATCHES}")
    parser.add_argument("--seeds", type=int, default=1024, help="per batch")
    parser.add_argument("--ratios", type=int, default=6, help="steps of the search over the ratio")
    parser.add_argument("--repeats", type=int, default=2, help="timed epochs per cell")
    parser.add_argument("--profile-seconds", type=float, default=2.5)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    parser.add_argument("--stress", action=BooleanOptionalAction, default=True, help="epochs beside busy processes")
    args = parser.parse_args()
    args.batches = args.batches or (QUICK_BATCHES if args.quick else BATCHES)
    if args.quick:
        torch.set_num_threads(1)  # threads of the host and of the accelerator share few cores
        args.device, args.seeds, args.profile_seconds = "cpu", 8, 4.0
        args.workers = ",".join(text for text in listed(args.workers) if int(text) <= 4) or "2"
    args.most_workers = max(int(text) for text in listed(args.workers))
    return args


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("division", args)
    Suite(recorder, args).run()
    print_report(recorder)
    if args.out is not None:
        args.out.with_suffix(".svg").write_text(speed_svg(speed_panels(recorder.cells)), encoding="utf-8")


if __name__ == "__main__":
    main()
