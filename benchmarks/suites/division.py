"""Batch preparation divided between CPU and GPU: simulator against reality, against either side alone, within budgets.

    python -m benchmarks.suites.division --out division.json --budget-seconds 390
    python -m benchmarks.suites.division --out division.json --budget-seconds 390 --resume     # what was left out

Sides: ``host`` (CPU threads prepare all batches), ``device`` (the GPU samples and gathers over PCIe beside training)
and ``weft`` (the division that a profile leads to); ``share S``: an exhaustive search over the ratio. Per cell: the
epoch's measured and simulated seconds and the busy share of CPU, PCIe and GPU. An epoch has ``--batches`` batches of
``--seeds`` seeds with fan-out [15, 10, 5]; evaluation is left out.

In this order, the most telling first, so that a run that ends early has them (``benchmarks/harness/division_case.py``
makes the graphs and groups):

1. the first shape and model over all worker counts, then every ratio;
2. the same beside busy processes, with and without adapting (``--stress``, unless ``--no-stress``);
3. the other models on the first shape, with few worker counts; ratios of those in ``--searched``;
4. all models on the other shapes, with few worker counts;
5. what ``weft.plan`` chooses within each of ``--budgets`` GiB of the GPU on ``--budget-shape``, for every model and all
   worker counts, beside both sides alone with the same cache. What the host prepares does not depend on the cache, so
   it is measured once per model; neither does the GPU alone depend on the workers.

The results file is written after every cell, and a figure beside it at the end (speed over workers, as MorphGL's
Figure 9). ``--resume`` runs the cells that are not in it. ``--quick`` runs the same
on this CPU, where a thread with given phase times stands in for the GPU.
"""

from __future__ import annotations

import gc
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.harness.division_case import Case, make_case, measure, phases_of, plain_ms, shape_graph, task_of
from benchmarks.harness.noisy_neighbour import stressed
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.speed_plot import speed_svg
from weft.core.placement import Placement
from weft.core.units import parse_bytes
from weft.engine.planning.plan_report_builder import plan as make_plan
from weft.graph.data.graph import Graph

SIDES = ("device", "weft", "host")
REPEATED_FROM = 8  # workers of the host from which on timed epochs are repeated: fewer take long, and vary little
Key = dict[str, Any]


class Suite:
    """The cells of a run, in their order; graphs and groups are made when the first cell that needs them runs."""

    def __init__(self, recorder: Recorder, args: Namespace) -> None:
        self.recorder, self.args = recorder, args
        self._graph: tuple[str, Graph] | None = None

    def run(self) -> None:
        """Everything."""
        shapes, models = listed(self.args.shapes), listed(self.args.models)
        for shape in shapes:
            for model in models:
                leads = shape == shapes[0] and model == models[0]
                self.compare(shape, model, _counts(self.args, leads), leads)
        for model in models if listed(self.args.budgets) else ():
            for budget in listed(self.args.budgets):
                self.within_budget(self.args.budget_shape, model, float(budget))

    # ---- one shape and model -------------------------------------------------------------------------

    def compare(self, shape: str, model: str, workers: list[int], leads: bool) -> None:
        """Sides over worker counts, ratios, and of the leading case a noisy neighbour."""
        base = {"shape": shape, "model": model, "budget_gib": None}
        keys = [{**base, "side": "profile"}]
        keys += [{**base, "workers": count, "side": side} for count in workers for side in SIDES]
        if shape == listed(self.args.shapes)[0] and model in listed(self.args.searched):
            most = {**base, "workers": self.args.most_workers}
            keys += [{**most, "side": f"share {step / self.args.ratios:.2f}"} for step in range(1, self.args.ratios)]
        if leads and self.args.stress:
            keys += [{**base, "side": "stress", "adapting": adapting} for adapting in (True, False)]
        self._cells(keys, f"{shape} {model}", lambda: make_case(self.graph(shape), shape, model, self.args))

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
        slow = key["side"] == "host" and key["workers"] < REPEATED_FROM and self.recorder.device.type == "cuda"
        return measure(case, division, 1 if slow else self.args.repeats)

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

    def within_budget(self, shape: str, model: str, budget: float) -> None:
        """The plan within ``budget`` GiB, and its sides over all worker counts."""
        base = {"shape": shape, "model": model, "budget_gib": budget}
        workers = _counts(self.args, whole=True)
        keys = [{**base, "workers": count, "side": side} for count in workers for side in SIDES]
        if all(find(self.recorder.cells, **key) for key in [{**base, "side": "plan"}, *keys]):
            self.recorder.say(f"{shape} {model} within {budget:g} GiB: done before")
            return
        made = self.recorder.cell({**base, "side": "plan"}, lambda: self._planned(shape, model, budget))
        if made["status"] != "ok":
            return
        place = Placement.from_dict(made["placement"])
        if not place.on_device:
            make = lambda: make_case(self.graph(shape), shape, model, self.args, place)  # noqa: E731
            self._cells(keys, f"{shape} {model} within {budget:g} GiB", make)
            return
        for key in keys:
            self.recorder.cell(key, partial(self._on_device, key, place), free=False)

    def _on_device(self, key: Key, place: Placement) -> dict[str, Any]:
        """Of a plan that has everything on the GPU, so that Weft's way is the GPU's; the host as measured elsewhere."""
        known = self._known(key if key["side"] == "host" else {**key, "side": "device"})
        if known is None and key["side"] == "host":
            raise NotHere("the host's side was not measured within another budget")
        return known or {"ms_per_batch": self._plain(key["shape"], key["model"], place)}

    def _planned(self, shape: str, model: str, budget: float) -> dict[str, Any]:
        task = task_of(self.graph(shape), model, self.args)
        group = make_plan(task, machine=self.args.machine, budget=parse_bytes(f"{budget}GiB")).groups[0]
        seconds = group.cost.epoch_seconds / max(self.args.batches, 1)
        about = {"placement": group.plan.places.to_dict(), "predicted_gb": round(group.cost.total_bytes / 1e9, 3)}
        return {**about, "predicted_ms_per_batch": round(1e3 * seconds, 4), "why": list(group.plan.why)}

    def _plain(self, shape: str, model: str, place: Placement) -> float:
        graph = self.graph(shape)
        return plain_ms(graph, task_of(graph, model, self.args), place, self.args)


def _counts(args: Namespace, whole: bool) -> list[int]:
    """Worker counts from the most down: what takes longest comes last."""
    counts = sorted({int(text) for text in listed(args.workers)}, reverse=True)
    few = {int(text) for text in listed(args.few_workers)} & set(counts)
    return counts if whole else sorted(few, reverse=True) or counts[:2]


# ---- report ------------------------------------------------------------------------------------------


def print_report(recorder: Recorder) -> None:
    """Sides beside each other, the chosen ratio against the best measured, errors of the simulator, budgets, stress."""
    cells = [cell for cell in recorder.cells if cell["status"] == "ok"]
    print_table(
        ["shape", "model", "GiB", "workers", "host ms", "device ms", "weft ms", "device share", "better side / weft",
         "weft / best ratio", "sim error", "busy"],
        _compared(cells),
    )  # fmt: skip
    for cell in cells:
        if cell["side"] == "profile":
            print(f"{cell['shape']} {cell['model']}: profile {cell['profile_seconds']} s, ms {cell['ms']}")
        if cell["side"] == "stress":
            print(f"stress, adapting {cell['adapting']}: before {cell['before_seconds']} s, first two epochs "
                  f"{cell['first_two_seconds']}, later {cell['later_seconds']}, divided anew after "
                  f"{cell['adapted_after_epochs']} epochs; {cell['notes']}")  # fmt: skip
        if cell["side"] == "plan":
            place = cell["placement"]
            print(f"{cell['shape']} {cell['model']} within {cell['budget_gib']:g} GiB: features {place['features']}, "
                  f"edges {place['topology']}, cache {place['cache_bytes'] / 1e9:.2f} GB")  # fmt: skip
    errors = [cell["error"] for cell in cells if "error" in cell and "same_as" not in cell]
    if errors:
        within = sum(abs(error) <= 0.1 for error in errors)
        print(f"simulator within 10 % of measured epochs: {within} of {len(errors)} configurations")
    recorder.save()


def speed_panels(cells: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Batches per second by side and workers, of every shape, model and budget: MorphGL's Figure 9."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for cell in cells:
        if cell["status"] == "ok" and cell["side"] in SIDES and cell.get("ms_per_batch"):
            within = "" if cell.get("budget_gib") is None else f", {cell['budget_gib']:g} GiB"
            sides = panels.setdefault(f"{cell['shape']}, {cell['model']}{within}", {})
            sides.setdefault(cell["side"], {})[cell["workers"]] = 1e3 / cell["ms_per_batch"]
    return panels


def _compared(cells: list[dict[str, Any]]) -> Iterable[list[Any]]:
    """A row per shape, model, budget and worker count that has all sides."""
    keys = {(c["shape"], c["model"], c.get("budget_gib"), c["workers"]) for c in cells if "workers" in c}
    for shape, model, budget, workers in sorted(keys, key=lambda key: (*key[:2], key[2] or 0.0, key[3])):
        here = [c for c in cells if (c["shape"], c["model"], c.get("budget_gib")) == (shape, model, budget)]
        found = {side: find(here, workers=workers, side=side) for side in SIDES}
        if not found["device"] or not found["weft"]:
            continue
        host = found["host"]["ms_per_batch"] if found["host"] else None
        device, weft = (found[side]["ms_per_batch"] for side in ("device", "weft"))
        ratios = [c["ms_per_batch"] for c in here if c.get("workers") == workers and "ms_per_batch" in c]
        busy = found["weft"].get("busy") or found["weft"].get("simulated_busy") or {}
        yield [shape, model, budget, workers, host, device, weft, found["weft"].get("device_share"),
               min(host or device, device) / weft, weft / min(ratios), found["weft"].get("error"),
               " ".join(f"{name} {share:.0%}" for name, share in busy.items())]  # fmt: skip


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="on this CPU, with a thread in place of the GPU")
    parser.add_argument("--shapes", default="products,uk")
    parser.add_argument("--models", default="sage,gcn,gat")
    parser.add_argument("--workers", default="1,2,4,8,14", help="threads of the host, for the first model and shape")
    parser.add_argument("--few-workers", default="4,14", help="of them for the others")
    parser.add_argument("--budgets", default="24,12,80", help="GiB of the GPU that plans are made for; empty: none")
    parser.add_argument("--budget-shape", default="papers100m", help="that they are for")
    parser.add_argument("--machine", default="h200", help="that they are made for")
    parser.add_argument("--searched", default="sage,gcn", help="models of which all ratios are measured")
    parser.add_argument("--papers-scale", type=float, default=0.5, help="of papers100M, if the host's memory holds it")
    parser.add_argument("--batches", type=int, default=32, help="per epoch")
    parser.add_argument("--seeds", type=int, default=1024, help="per batch")
    parser.add_argument("--ratios", type=int, default=6, help="steps of the search over the ratio")
    parser.add_argument("--repeats", type=int, default=2, help="timed epochs per cell")
    parser.add_argument("--profile-seconds", type=float, default=2.5)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    parser.add_argument("--stress", action=BooleanOptionalAction, default=True, help="epochs beside busy processes")
    args = parser.parse_args()
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
