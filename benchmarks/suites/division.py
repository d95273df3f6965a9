"""Batch preparation divided between CPU and GPU: simulator against reality, against either side alone, within budgets.

    python -m benchmarks.suites.division --out division.json --budget-seconds 470
    python -m benchmarks.suites.division --out division.json --budget-seconds 470 --resume     # what was left out

Sides: ``host`` (CPU threads prepare all batches), ``device`` (the GPU samples and gathers over PCIe) and ``weft`` (the
division that a profile leads to; without a budget the one that is kept after some epochs, as in a run:
``epochs_until_steady`` of them, and ``first_epochs_ms`` is what they took); ``share S``: an exhaustive search over the
ratio. Per cell: measured and simulated seconds of an epoch and the busy share of CPU, PCIe and GPU. An epoch has
``--batches`` batches of ``--seeds`` seeds, fan-out [15, 10, 5], or as many as take ``--cell-seconds`` where a side is
slow: from the first to the last, so that beginning and end count as they do in the simulator. Evaluation is left out.

In this order, the most telling first, so that a run that ends early has them (``benchmarks/harness/division_case.py``
makes the graphs and groups; every graph is made once):

1. the first shape and model over all worker counts, every ratio, and epochs beside busy processes, with and without
   adapting (unless ``--no-stress``);
2. the first model on the other shapes, with few worker counts;
3. what ``weft.plan`` chooses within the first of ``--budgets`` GiB of the GPU on ``--budget-shape``, for every model
   and all worker counts, beside both sides alone with the same cache; of the first model every ratio. Torch is given no
   more than the budget there, as in a run, and a plan that does not divide trains by the GPU alone;
4. the other models on the first shape, with few worker counts; ratios of those in ``--searched``;
5. as 3 within the other budgets;
6. the other models on the other shapes.

The first lines say about how long each of these takes, the last ones are a table of what was to be shown: pass, miss or
not measured (``benchmarks/harness/division_report.py``), and what was left out.
The results file is written after every cell, and a figure beside it at the end (speed over workers, as MorphGL's
Figure 9). ``--resume`` runs the cells that are not in it. ``--quick`` runs the same
on this CPU, where a thread with given phase times stands in for the GPU.
"""

from __future__ import annotations

import gc
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from benchmarks.harness.steady_division import measure_steady
from weft.core.placement import Placement
from weft.core.units import parse_bytes
from weft.engine.machine import find_machine
from weft.engine.memory_budget import memory_cap
from weft.engine.plan import plan as make_plan
from weft.graph.graph import Graph

BATCHES, QUICK_BATCHES = 193, 24  # of an epoch; products has 193
OTHERWISE = ("0.33", "0.67")  # shares that are also measured the other way, inside of steps or beside them
# Seconds on an H200 with 16 cores, for the forecast: of making a graph; of a group's first kernels and captures, its
# pinned memory and profile; of a cell beyond its epochs; of epochs beside busy processes; of a plan.
GRAPH_SECONDS = {"products": 4.0, "uk": 8.0, "papers100m": 30.0}
CASE_SECONDS, KNOWN_CASE_SECONDS, CELL_SECONDS, STRESS_SECONDS, PLAN_SECONDS = 15.0, 9.0, 0.6, 12.0, 2.0
STEADY_EPOCHS, DIVIDES_FROM = 2, 4  # epochs before a division is known to be kept; workers from which on there is one
ON_DEVICE_GIB, ON_DEVICE_SECONDS = 75, 10.0  # of papers100M: a plan within more has all of it on the GPU
Key = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Cells that share a group, in their order; ``budget``: GiB that it is planned within, None: all in host memory."""

    shape: str
    model: str
    budget: float | None
    whole: bool  # all worker counts
    ratios: bool = False
    stress: bool = False  # and some ratios in the other way

    @property
    def label(self) -> str:
        """Which one."""
        within = "" if self.budget is None else f" within {self.budget:g} GiB"
        return f"{self.shape} {self.model}{within}"

    @property
    def base(self) -> Key:
        """What its cells have in common."""
        return {"shape": self.shape, "model": self.model, "budget_gib": self.budget}


def parts_of(args: Namespace) -> list[Part]:
    """All of them, the most telling first."""
    shapes, models, budgets = (listed(text) for text in (args.shapes, args.models, args.budgets))
    first, lead, place = shapes[0], models[0], args.budget_shape
    found = [Part(first, lead, None, whole=True, ratios=lead in listed(args.searched), stress=args.stress)]
    found += [Part(shape, lead, None, whole=False) for shape in shapes[1:]]
    within = [[Part(place, model, float(budget), whole=True) for model in models] for budget in budgets]
    if within:
        within[0][0] = replace(within[0][0], ratios=True)
    found += [one for some in within[:1] for one in some]
    found += [Part(first, model, None, whole=False, ratios=model in listed(args.searched)) for model in models[1:]]
    found += [one for some in within[1:] for one in some]
    return found + [Part(shape, model, None, whole=False) for shape in shapes[1:] for model in models[1:]]


class Suite:
    """The cells of a run, in their order; graphs and groups are made when the first cell that needs them runs."""

    def __init__(self, recorder: Recorder, args: Namespace) -> None:
        self.recorder, self.args = recorder, args
        self._graphs: dict[str, Graph] = {}

    def run(self) -> None:
        """Everything."""
        for part in parts_of(self.args):
            if part.budget is None:
                make = lambda p=part: make_case(self.graph(p.shape), p.shape, p.model, self.args)  # noqa: E731
                self._cells(part, self.keys(part), make)
            else:
                self.within_budget(part)

    def forecast(self) -> list[tuple[str, float]]:
        """Seconds of every part that are to be expected, of what an earlier run has not found."""
        known, graphs, found = set[tuple[str, str]](), set[str](), []
        for part in parts_of(self.args):
            left = [key for key in self.keys(part) if not find(self.recorder.cells, **key)]
            seconds = 0.0
            if left and part.budget is not None and part.budget > ON_DEVICE_GIB * self.args.papers_scale:
                seconds = ON_DEVICE_SECONDS
            elif left:
                seconds += 0.0 if part.shape in graphs else GRAPH_SECONDS[part.shape]
                seconds += KNOWN_CASE_SECONDS if (part.shape, part.model) in known else CASE_SECONDS
                seconds += sum(map(self._expected, left)) + (0.0 if part.budget is None else PLAN_SECONDS)
                known.add((part.shape, part.model))
                graphs.add(part.shape)
            found.append((part.label, seconds))
        return found

    def _expected(self, key: Key) -> float:
        """Seconds of a cell; of the GPU alone only the first, and none of a profile, which making the group has."""
        if key["side"] == "stress":
            return STRESS_SECONDS
        if key["side"] == "profile" or (key["side"] == "device" and key["workers"] != self.args.most_workers):
            return 0.0
        before = STEADY_EPOCHS if _settles(key) and key["workers"] >= DIVIDES_FROM else 0
        return CELL_SECONDS + 1.25 * self.args.cell_seconds * (self._repeats(key) + before)

    def _repeats(self, key: Key) -> int:
        """Of what is compared most closely all; what is slow varies little."""
        closely = key.get("workers") == self.args.most_workers and key["side"] in SIDES[:2] and not _settles(key)
        return self.args.repeats if closely else 1

    # ---- one shape and model -------------------------------------------------------------------------

    def keys(self, part: Part) -> list[Key]:
        """Sides over worker counts, ratios, and a noisy neighbour."""
        counts, base = _counts(self.args, part.whole), part.base
        keys = [{**base, "side": "profile"}] + [{**base, "workers": w, "side": side} for w in counts for side in SIDES]
        most, steps = {**base, "workers": self.args.most_workers}, self.args.ratios
        if part.ratios:
            keys += [{**most, "side": f"share {step / steps:.2f}"} for step in range(1, steps)]
        if part.stress:
            keys += [{**most, "side": f"share {share} otherwise"} for share in OTHERWISE if not self.args.quick]
            keys += [{**base, "side": "stress", "adapting": adapting} for adapting in (True, False)]
        return keys

    def _cells(self, part: Part, keys: list[Key], make: Callable[[], Case]) -> None:
        """The cells of one case, which is made unless all of them are known, or the time does not suffice for it."""
        if all(find(self.recorder.cells, **key) for key in keys):
            self.recorder.say(f"{part.label}: done before")
            return
        gc.collect()  # the case before: two at once may not fit
        enough = self.recorder.left > KNOWN_CASE_SECONDS or self.args.quick
        case = self.recorder.prepare(part.label, make) if enough else None
        for key in keys:
            self.recorder.cell(key, partial(self._cell, case, key), free=False)

    def _cell(self, case: Case | None, key: Key) -> dict[str, Any]:
        if case is None:
            raise NotHere("its group was not made: no time was left, or it failed")
        side = key["side"]
        if side == "profile":
            return phases_of(case)
        if side == "stress":
            return stressed(case, key["adapting"], self.args)
        return self._known(key) or self._measured(case, key)

    def _measured(self, case: Case, key: Key) -> dict[str, Any]:
        division, repeats, seconds = case.side(key["side"], key["workers"]), self._repeats(key), self.args.cell_seconds
        if _settles(key) and (division.divided or key["workers"] >= DIVIDES_FROM):
            return measure_steady(case, division, repeats, seconds, key["workers"])
        if key["side"] == "weft" and (division.kind == "sequential" or not self._divides(key)):
            same = self._known({**key, "side": "device"})
            if same is not None:
                return {**same, "same_as": "device"}
        return measure(case, division, repeats, seconds)

    def _divides(self, key: Key) -> bool:
        """Whether the plan that a cell is of lets the host prepare batches; without a budget a profile decides."""
        about = {name: key[name] for name in ("shape", "model", "budget_gib")}
        made = find(self.recorder.cells, **about, side="plan") if key["budget_gib"] is not None else None
        return made is None or bool(made.get("divides", True))

    def _known(self, key: Key, free: str = "workers") -> dict[str, Any] | None:
        """What was measured already of the device, which does not depend on the workers; ``free``: or on what else."""
        if key["side"] != "device" and free == "workers":
            return None
        found = find(self.recorder.cells, **{name: value for name, value in key.items() if name != free})
        dropped = (*key, "status", "cell_seconds")
        if found is None:
            return None
        return {**{name: value for name, value in found.items() if name not in dropped}, "same_as": key["side"]}

    def graph(self, shape: str) -> Graph:
        """The graph of a shape; all are kept, in host memory."""
        if shape not in self._graphs:
            made = self.recorder.prepare(f"graph {shape}", lambda: shape_graph(shape, self.recorder.device, self.args))
            if made is None:
                raise RuntimeError(f"the graph of shape {shape} could not be made")
            self._graphs[shape] = made
        return self._graphs[shape]

    # ---- budgets -------------------------------------------------------------------------------------

    def within_budget(self, part: Part) -> None:
        """The plan within a budget, and its sides over all worker counts."""
        make_plan_ = partial(self._planned, part.shape, part.model, part.budget)
        made = self.recorder.cell({**part.base, "side": "plan"}, make_plan_)
        keys = self.keys(part)
        if made["status"] != "ok":
            self._cells(part, keys, _not_made)
            return
        place = Placement.from_dict(made["placement"])
        if place.on_device:
            for key in keys[1:]:
                if key["side"] in SIDES:
                    self.recorder.cell(key, partial(self._on_device, key, place), free=False)
            return
        about = (place, made["device_buffer"])
        machine, most = find_machine(self.args.machine), parse_bytes(f"{part.budget}GiB")

        def make() -> Case:
            graph = self.graph(part.shape)  # on the GPU first, which takes more than a small budget
            capped.enter_context(memory_cap(self.recorder.device, machine, most))
            return make_case(graph, part.shape, part.model, self.args, *about)

        with ExitStack() as capped:
            self._cells(part, keys, make)

    def _on_device(self, key: Key, place: Placement) -> dict[str, Any]:
        """Of a plan that has everything on the GPU, so that Weft's way is the GPU's; the host as measured elsewhere."""
        host = key["side"] == "host"
        known = self._known(key, "budget_gib") if host else self._known({**key, "side": "device"})
        if known is None and host:
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
        about["divides"] = division is not None
        about["device_buffer"] = DEVICE_BUFFER if division is None else division.device_buffer
        return {**about, "predicted_ms_per_batch": round(1e3 * seconds, 4), "why": list(group.plan.why)}

    def _plain(self, shape: str, model: str, place: Placement) -> float:
        graph = self.graph(shape)
        return plain_ms(graph, task_of(graph, model, self.args), place, self.args)


def _settles(key: Key) -> bool:
    """Whether a cell is measured when its division is the one that is kept."""
    return key["side"] == "weft" and key["budget_gib"] is None


def _not_made() -> Case:
    raise NotHere("there is no plan")


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
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="of an epoch of a cell, or fewer batches")
    parser.add_argument("--seeds", type=int, default=1024, help="per batch")
    parser.add_argument("--ratios", type=int, default=6, help="steps of the search over the ratio")
    parser.add_argument("--repeats", type=int, default=2, help="timed epochs per cell with most workers")
    parser.add_argument("--profile-seconds", type=float, help="limit of a profile; 1.7 epochs, about, unless given")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    parser.add_argument("--stress", action=BooleanOptionalAction, default=True, help="epochs beside busy processes")
    args = parser.parse_args()
    args.batches = args.batches or (QUICK_BATCHES if args.quick else BATCHES)
    if args.quick:
        torch.set_num_threads(1)  # threads of the host and of the accelerator share few cores
        args.device, args.seeds, args.profile_seconds, args.cell_seconds = "cpu", 8, 4.0, float("inf")
        args.workers = ",".join(text for text in listed(args.workers) if int(text) <= 4) or "2"
    args.most_workers = max(int(text) for text in listed(args.workers))
    return args


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("division", args)
    suite = Suite(recorder, args)
    total = 0.0
    for label, seconds in suite.forecast() if not args.quick else ():
        total += seconds
        recorder.say(f"forecast: {label} {seconds:.0f} s, {total:.0f} s so far")
    suite.run()
    print_left_out(recorder.cells)
    print_report(recorder)
    if args.out is not None:
        args.out.with_suffix(".svg").write_text(speed_svg(speed_panels(recorder.cells)), encoding="utf-8")


def print_left_out(cells: list[Key]) -> None:
    """Cells that were not measured, by case and reason."""
    reasons: dict[tuple[str, str], int] = {}
    for cell in cells:
        if cell["status"] != "ok":
            where = f"{cell.get('shape')} {cell.get('model')}, GiB {cell.get('budget_gib')}"
            why = f"{cell['status']}: {cell.get('reason') or cell.get('error')}"
            reasons[where, why] = reasons.get((where, why), 0) + 1
    for (where, why), count in reasons.items():
        print(f"left out: {count} cells of {where} ({why})")


if __name__ == "__main__":
    main()
