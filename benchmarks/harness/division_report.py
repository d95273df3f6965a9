"""What the division benchmark found: sides beside each other, then a table of what was to be shown, pass or miss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.recorder import Recorder, find, print_table

SIDES = ("device", "weft", "host")
NEAR, ENOUGH = 0.10, 12  # error of the simulator, and configurations that are to be within it
KINDS = 3  # of models, and of shapes, among them
OF_BEST, NEVER_BELOW, CLOSE_GAIN = 1.05, 0.97, 1.3
CLOSE = (1.25, 1.5)  # times the seconds of the better side, up to which the other one may be called close to it
PRODUCTS_BATCHES = 193  # of an epoch of ogbn-products with 1,024 seeds each
PROFILE_EPOCHS, ADAPTED_WITHIN = 2.0, 2
NO_SLOWER = 1.05  # times the seconds of later epochs without adapting
Cell = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Milliseconds per batch of the sides of one shape, model, budget and worker count, and of all ratios tried."""

    shape: str
    model: str
    budget: float | None
    workers: int
    device: Cell
    weft: Cell
    host: Cell | None
    ratios: tuple[float, ...]
    as_planned: bool = True  # of a plan within a budget: it divides if that does, and keeps to the budget

    @property
    def gain(self) -> float:
        """Of Weft over the better side."""
        sides = [one["ms_per_batch"] for one in (self.device, self.host) if one]
        return min(sides) / self.weft["ms_per_batch"]

    def close(self, within: float) -> bool:
        """Whether both sides take about as long."""
        if self.host is None:
            return False
        sides = self.device["ms_per_batch"], self.host["ms_per_batch"]
        return max(sides) <= within * min(sides)

    @property
    def of_best(self) -> float:
        """Weft's milliseconds over those of the fastest of all ratios."""
        return self.weft["ms_per_batch"] / min(self.ratios)

    def words(self) -> str:
        """Which one."""
        return f"{self.shape} {self.model}{_within(self.budget)} w={self.workers}"


def _within(budget: float | None) -> str:
    return "" if budget is None else f" {budget:g} GiB"


def rows_of(cells: list[Cell]) -> list[Row]:
    """A row per shape, model, budget and worker count that has at least the device's and Weft's side."""
    keys = {(c["shape"], c["model"], c.get("budget_gib"), c["workers"]) for c in cells if "workers" in c}
    found = []
    for shape, model, budget, workers in sorted(keys, key=lambda key: (*key[:2], key[2] or 0.0, key[3])):
        here = [c for c in cells if (c["shape"], c["model"], c.get("budget_gib")) == (shape, model, budget)]
        device, weft, host = (find(here, workers=workers, side=side) for side in SIDES)
        ratios = tuple(c["ms_per_batch"] for c in here if c.get("workers") == workers and "ms_per_batch" in c)
        if device and weft:
            kept = budget is None or _as_planned(weft, find(here, side="plan"), budget)
            found.append(Row(shape, model, budget, workers, device, weft, host, ratios, kept))
    return found


def _as_planned(weft: Cell, plan: Cell | None, budget: float) -> bool:
    """Whether what was measured is what the plan says; older files tell by its reasons whether a plan divides."""
    if plan is None:
        return True
    told = any(str(reason).startswith("batches: ") for reason in plan.get("why", ()))
    divides = plan.get("divides", told or "why" not in plan)
    both = bool((weft.get("division") or {}).get("host_batches")) and "same_as" not in weft
    return (divides or not both) and weft.get("needed_gb", 0.0) * 1e9 <= budget * (1 << 30)


def print_report(recorder: Recorder) -> None:
    """Sides beside each other, profiles, plans, stress, and at the end what was to be shown."""
    cells = [cell for cell in recorder.cells if cell["status"] == "ok"]
    rows = rows_of(cells)
    print_table(
        ["shape", "model", "GiB", "workers", "host ms", "device ms", "weft ms", "device share", "better side / weft",
         "weft / best ratio", "sim error", "epochs", "busy"],
        [
            [row.shape, row.model, row.budget, row.workers, row.host["ms_per_batch"] if row.host else None,
             row.device["ms_per_batch"], row.weft["ms_per_batch"], row.weft.get("device_share"), row.gain, row.of_best,
             row.weft.get("error"), row.weft.get("epochs_until_steady"), _busy(row.weft)]
            for row in rows
        ],
    )  # fmt: skip
    for cell in cells:
        for line in _told(cell, cells):
            print(line)
    print_table(["to be shown", "", "found"], verdicts(cells))
    recorder.save()


def _busy(cell: Cell) -> str:
    busy = cell.get("busy") or cell.get("simulated_busy") or {}
    return " ".join(f"{name} {share:.0%}" for name, share in busy.items())


def _told(cell: Cell, cells: list[Cell]) -> Iterator[str]:
    where = f"{cell['shape']} {cell['model']}{_within(cell.get('budget_gib'))}"
    if cell["side"] == "profile":
        yield f"{where}: profile {cell['profile_seconds']} s, ms {cell['ms']}, captured {cell.get('captured_ms')}"
    if cell.get("notes") and cell["side"] == "weft":
        yield f"{where} w={cell['workers']}: first epochs {cell['first_epochs_ms']} ms per batch; {cell['notes']}"
    if cell["side"] == "stress":
        yield (f"stress, adapting {cell['adapting']} ({where}): before {cell['before_seconds']} s, first two epochs "
               f"{cell['first_two_seconds']}, later {cell['later_seconds']}, divided anew after "
               f"{cell['adapted_after_epochs']} epochs; {cell['notes']}")  # fmt: skip
    if cell["side"] == "plan":
        place, same = cell["placement"], {"shape": cell["shape"], "model": cell["model"]}
        measured = find(cells, **same, budget_gib=cell["budget_gib"], side="weft") or {}
        taken = f", needed {measured['needed_gb']} GB" if "needed_gb" in measured else ""
        yield (f"{where}: features {place['features']}, edges {place['topology']}, cache "
               f"{place['cache_bytes'] / 1e9:.2f} GB, predicted {cell['predicted_gb']} GB{taken}")  # fmt: skip


# ---- what was to be shown ----------------------------------------------------------------------------


def verdicts(cells: list[Cell]) -> list[list[str]]:
    """A line per thing to be shown: what, pass or miss or not measured, and the figures."""
    every = rows_of(cells)
    rows = [row for row in every if row.as_planned]
    close = [_where_close(rows, within) for within in CLOSE]
    return [_simulator(cells), _best_ratio(rows), _never_worse(rows), *close, _grid(rows, len(every) - len(rows)),
            _preprocessing(cells), _adapted(cells)]  # fmt: skip


def _line(what: str, passed: bool | None, found: str) -> list[str]:
    return [what, "not measured" if passed is None else "pass" if passed else "MISS", found]


def _simulator(cells: list[Cell]) -> list[str]:
    measured = [cell for cell in cells if "error" in cell and "same_as" not in cell]
    within = [cell for cell in measured if abs(cell["error"]) <= NEAR]
    worst = max(measured, key=lambda cell: abs(cell["error"]), default=None)
    told = f"{len(within)} of {len(measured)}, of models {_named(within, 'model')} on {_named(within, 'shape')}"
    if worst is not None:
        told += f"; worst {worst['error']:+.0%} ({worst['shape']} {worst['model']} {worst['side']})"
    what = f"simulator within {NEAR:.0%}, {ENOUGH} configurations, {KINDS} models and shapes"
    covered = all(len({cell[name] for cell in within}) >= KINDS for name in ("model", "shape"))
    return _line(what, covered and len(within) >= ENOUGH if measured else None, told)


def _named(cells: Iterable[Cell], name: str) -> str:
    return "/".join(sorted({cell[name] for cell in cells})) or "none"


def _best_ratio(rows: list[Row]) -> list[str]:
    searched = [row for row in rows if len(row.ratios) > len(SIDES)]
    worst = max(searched, key=lambda row: row.of_best, default=None)
    found = "-" if worst is None else f"worst of {len(searched)}: {worst.of_best:.3f} ({worst.words()})"
    return _line("chosen plan within 5 % of the best ratio", None if worst is None else worst.of_best <= OF_BEST, found)


def _never_worse(rows: list[Row]) -> list[str]:
    worst = min((row for row in rows if row.host), key=lambda row: row.gain, default=None)
    found = "-" if worst is None else f"least {worst.gain:.3f} ({worst.words()})"
    return _line(
        f"never below {NEVER_BELOW} of the better side", None if worst is None else worst.gain >= NEVER_BELOW, found
    )


def _where_close(rows: list[Row], within: float) -> list[str]:
    close = sorted((row for row in rows if row.close(within)), key=lambda row: row.gain)
    found = "no case in which they are"
    if close:
        reached = sum(row.gain >= CLOSE_GAIN for row in close)
        found = f"{reached} of {len(close)}; least {close[0].gain:.2f} ({close[0].words()}), most {close[-1].gain:.2f}"
    passed = all(row.gain >= CLOSE_GAIN for row in close) if close else None
    return _line(f"{CLOSE_GAIN}x where sides are close (within {within}x)", passed, found)


def _grid(rows: list[Row], others: int) -> list[str]:
    """Whether all three sides were measured for every model, budget and worker count; ``others`` not as planned."""
    there = [row for row in rows if row.budget is not None and row.host]
    counts = [len({getattr(row, name) for row in there}) for name in ("model", "budget", "workers")]
    whole = counts[0] * counts[1] * counts[2]
    found = f"{len(there)} cells: {counts[0]} models, {counts[1]} budgets, {counts[2]} worker counts"
    found += f"; {others} more were not measured as planned" if others else ""
    return _line("3 models x 3 budgets x 5 worker counts", len(there) == whole == 45 if there else None, found)


def _preprocessing(cells: list[Cell]) -> list[str]:
    """Of the model with the shortest epochs beside its profile."""
    here, found = {"shape": "products", "budget_gib": None}, []
    for model in sorted({cell["model"] for cell in cells if cell["side"] == "profile"}):
        profile, weft = (find(cells, **here, side=side, model=model) for side in ("profile", "weft"))
        if profile and weft:
            epoch, seconds = 1e-3 * weft["ms_per_batch"] * PRODUCTS_BATCHES, profile["profile_seconds"]
            found.append((seconds / epoch, f"{seconds:.2f} s of epochs of {epoch:.2f} s ({model})"))
    if not found:
        return _line("profile within 2 epochs of products", None, "-")
    epochs, told = max(found)
    return _line("profile within 2 epochs of products", epochs <= PROFILE_EPOCHS, f"{epochs:.2f} epochs: {told}")


def _adapted(cells: list[Cell]) -> list[str]:
    what = f"busy neighbour adapted to within {ADAPTED_WITHIN} epochs"
    mine, other = (find(cells, side="stress", adapting=adapting) for adapting in (True, False))
    if mine is None:
        return _line(what, None, "-")
    after = mine["adapted_after_epochs"]
    found = f"after {after}; epochs then {mine['later_seconds']} s" + (
        f", {other['later_seconds']} s without adapting" if other else ""
    )
    gains = other is None or mine["later_seconds"] <= NO_SLOWER * other["later_seconds"]
    return _line(what, gains and after is not None and after <= ADAPTED_WITHIN, found)


def speed_panels(cells: list[Cell]) -> dict[str, dict[str, dict[int, float]]]:
    """Batches per second by side and workers, of every shape, model and budget: MorphGL's Figure 9."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: (cell["shape"], cell.get("budget_gib") or 0.0, cell["model"])):
        if cell["status"] == "ok" and cell["side"] in SIDES and cell.get("ms_per_batch"):
            within = "" if cell.get("budget_gib") is None else f", {cell['budget_gib']:g} GiB"
            sides = panels.setdefault(f"{cell['shape']}, {cell['model']}{within}", {})
            sides.setdefault(cell["side"], {})[cell["workers"]] = 1e3 / cell["ms_per_batch"]
    return panels
