"""What the cells of the sharded suite say of its goals, line by line: pass, miss, or not measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.recorder import find

Cell = dict[str, Any]
COPIED, GATHERED = "copy all, then spmm", "gather, then spmm"
FETCHED = (COPIED, GATHERED)
STREAMED, STREAMED_APART = "streamed", "streamed apart"
PIPELINED, WHOLE_ROWS = "pipelined", "rows whole"
OVER_FETCHING, OVER_APART, BALANCE = 1.5, 1.2, 0.01
PARTITION_SECONDS = {"products": 1.0, "orkut": 2.0, "enwiki": 2.0}
TUNER_STEPS = 15  # "about ten"
HEADER = ("goal", "wanted", "found", "verdict")


def milliseconds(cells: Iterable[Cell], sides: Sequence[str], **about: Any) -> float | None:
    """Of the fastest of ``sides`` that was measured."""
    found = [find(cells, **about, side=side) for side in sides]
    return min((cell["ms"] for cell in found if cell is not None), default=None)


def gain(cells: Iterable[Cell], sides: Sequence[str], **about: Any) -> float | None:
    """How many times as long as the streamed kernel the fastest of ``sides`` takes."""
    here, other = milliseconds(cells, [STREAMED], **about), milliseconds(cells, sides, **about)
    return None if here is None or other is None else other / here


def most_gain(cells: Iterable[Cell], **about: Any) -> float | None:
    """What hiding all of the link behind sums, or all sums behind the link, would gain over fetching first."""
    cell = find(cells, **about, side=COPIED)
    if cell is None:
        return None
    link = cell["link_mb"] / cell["copy_gb_s"]
    return float(cell["ms"] / max(link, cell["ms"] - link))


def verdicts(cells: list[Cell], shapes: Sequence[str], widths: Sequence[int], models: Sequence[str]) -> list[Any]:
    """The rows of the table under :data:`HEADER`."""
    grid = [{"shape": shape, "features": width} for shape, width in itertools.product(shapes, widths)]
    bounds = {_name(about): most_gain(cells, **about) for about in grid}
    rows = [
        _row(f"against fetching first, {name}", OVER_FETCHING, gain(cells, FETCHED, **about), bounds[name])
        for about in grid
        for name in [_name(about)]
    ]
    apart = {_name(about): gain(cells, [STREAMED_APART], **about) for about in grid}
    rows.append(_all_of("against no interleaving, all of them", OVER_APART, apart))
    for model in models:
        found = [gain(cells, FETCHED, shape=shape, model=model) for shape in shapes]
        rows += _range(f"forward pass against fetching first, {model}", [one for one in found if one is not None])
    return [*rows, *_link(cells, grid), *_pieces(cells, grid), *_tuner(cells), *_partitions(cells, shapes)]


def _name(about: dict[str, Any]) -> str:
    return " ".join(str(value) for value in about.values())


def _row(goal: str, wanted: float, found: float | None, most: float | None = None) -> tuple[str, ...]:
    if found is None:
        return goal, f">= {wanted}x", "-", "not measured"
    within = "" if most is None else f" of at most {most:.2f}x"
    return goal, f">= {wanted}x", f"{found:.2f}x{within}", "pass" if found >= wanted else "miss"


def _all_of(goal: str, wanted: float, found: dict[str, float | None]) -> tuple[str, ...]:
    """One line of many cells: how many reach ``wanted``, and the one that is furthest from it."""
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return goal, f">= {wanted}x", "-", "not measured"
    least, good = min(known, key=lambda name: known[name]), sum(value >= wanted for value in known.values())
    words = f"{good} of {len(found)}; least {known[least]:.2f}x ({least})"
    return goal, f">= {wanted}x", words, "pass" if good == len(found) else "miss"


def _range(goal: str, values: Sequence[float], unit: str = "x") -> list[tuple[str, ...]]:
    words = f"{min(values):.2f} to {max(values):.2f}{unit}" if values else "-"
    return [(goal, "a figure", words, "measured" if values else "not measured")]


def _link(cells: list[Cell], grid: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    found = [find(cells, **about, side=STREAMED) for about in grid]
    return _range("share of the link's bandwidth", [cell["link_share"] for cell in found if cell is not None], "")


def _pieces(cells: list[Cell], grid: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    pairs = [[milliseconds(cells, [side], **about) for side in (WHOLE_ROWS, PIPELINED)] for about in grid]
    return _range("neighbour partitions on against off", [off / on for off, on in pairs if off and on])


def _tuner(cells: list[Cell]) -> list[tuple[str, ...]]:
    goal, wanted, cell = "the tuner's path", f"at most {TUNER_STEPS} steps", find(cells, side="tuner")
    if cell is None:
        return [(goal, wanted, "-", "not measured")]
    words = f"{cell['iterations']} steps, {cell['first_ms']:.3g} to {cell['best_ms']:.3g} ms, {cell['gain']:.2f}x"
    return [(goal, wanted, words, "pass" if cell["finished"] and cell["iterations"] <= TUNER_STEPS else "miss")]


def _partitions(cells: list[Cell], shapes: Sequence[str]) -> list[tuple[str, ...]]:
    rows = []
    for shape in shapes:
        most, cell = PARTITION_SECONDS.get(shape), find(cells, shape=shape, side="partition on host")
        if most is not None:
            took = None if cell is None else cell["seconds"]
            verdict = "not measured" if took is None else "pass" if took < most else "miss"
            rows.append(
                (f"partition of {shape} on the host", f"< {most:g} s", "-" if took is None else f"{took} s", verdict)
            )
    found = [find(cells, shape=shape, side="partition on host") for shape in shapes]
    worst = [cell[key] for cell in found if cell is not None for key in cell if key.startswith("imbalance")]
    words = f"{max(worst):.3%}" if worst else "-"
    verdict = "not measured" if None in found or not worst else "pass" if max(worst) < BALANCE else "miss"
    return [*rows, ("edges per rank, all shapes, 2 to 8 ranks", f"within {BALANCE:.0%}", words, verdict)]
