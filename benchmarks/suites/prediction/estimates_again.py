"""Estimates anew for trainings that were measured before: what a changed model would have said, next to the truth.

The measurements stay as the results file has them; graphs of the same shapes are made on the host, where no GPU is
needed, and summarised by the same code. So a model can be checked where it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.suites.prediction.queues import SETS, Entry, entries
from weft.core.machine import Machine
from weft.graph.graph import Graph

MEASURED = ("allocated", "reserved", "seconds", "before", "before_reserved", "fits", "notes")
HOST = torch.device("cpu")
Estimates = Callable[[Entry, int, Graph, Machine], dict[str, Any]]


def machine_of(path: Path) -> Machine:
    """The machine that a results file was estimated for; of several runs that of the newest."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Machine.from_dict(data["runs"][-1]["machine"] if "runs" in data else data["machine"])


def measured_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a results file that were run, without those whose time alone counts."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["status"] == "ok" and cell.get("fits") and cell.get("measured") != "time"]


def entry_of(cell: dict[str, Any]) -> Entry:
    """The training of a cell."""
    alike = (cell["set"], cell["queue"], cell["shape"], cell["name"])
    return next(one for one in entries(list(SETS)) if (one.kind, one.queue, one.shape, one.name) == alike)


def again(path: Path, shapes: list[str], estimate: Estimates) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """``(key, work)`` of every cell in the file, shape by shape; ``work()`` gives the cell with new estimates.

    ``shapes``: only these; all where it is empty.
    """
    machine, cells = machine_of(path), measured_cells(path)
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        if shapes and shape not in shapes:
            continue
        graph = make_graph(shape, HOST)
        for cell in (one for one in cells if one["shape"] == shape):
            key = {"name": cell["name"], "shape": shape, "tasks": cell["tasks"]}
            yield key, lambda c=cell, g=graph: _estimated(c, g, machine, estimate)


def _estimated(cell: dict[str, Any], graph: Graph, machine: Machine, estimate: Estimates) -> dict[str, Any]:
    entry = entry_of(cell)
    about = {"set": entry.kind, "queue": entry.queue, "layers": entry.layers}
    kept = {name: cell[name] for name in MEASURED if name in cell}
    return {**about, **estimate(entry, cell["tasks"], graph, machine), **kept}
