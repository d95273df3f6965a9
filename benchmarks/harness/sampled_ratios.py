"""What is asked of sampled epochs: which cells of ``benchmarks.suites.sampled_epoch`` are compared with which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Cell = dict[str, Any]
PLAIN = {"tasks": 1, "precision": "fp32"}
PIPELINED = {"case": "host, pipelined"}
ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("without CUDA graphs over pipelined", {"case": "host, stages without CUDA graphs"}, PIPELINED),
    ("serial over pipelined", {"case": "host, serial"}, PIPELINED),
    ("serial over cached, pipelined", {"case": "host, serial"}, {"case": "cached by degree, pipelined"}),
    ("PyG over Weft, all on the GPU", {"case": "eager"}, {"case": "gpu"}),
    *(
        (
            f"8 tasks over one, {kind}",
            {"case": "gpu", "tasks": 8, "precision": kind},
            {"case": "gpu", "precision": kind},
        )
        for kind in ("fp32", "tf32", "bf16")
    ),
    ("8 tasks over one, host, pipelined", {**PIPELINED, "tasks": 8}, PIPELINED),
]


def ratios(cells: Sequence[Cell]) -> Iterator[tuple[str, float]]:
    """What is compared, and how many times as long an epoch takes; of one run each, where cells are of several."""
    for words, *sides in ASKED:
        upper, lower = (_found(cells, {**PLAIN, **wanted}) for wanted in sides)
        if upper is not None and lower is not None and upper.get("run") == lower.get("run"):
            yield words, upper["epoch_seconds"] / lower["epoch_seconds"]


def _found(cells: Sequence[Cell], wanted: dict[str, Any]) -> Cell | None:
    good = (cell for cell in cells if cell.get("status", "ok") == "ok")
    return next((cell for cell in good if all(cell.get(key) == value for key, value in wanted.items())), None)
