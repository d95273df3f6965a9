"""Similarity of two training steps: the share of their operators that can be matched, in [0, 1], and in words.

Weaving pays by running matched operators as one; so the measure counts operators by kind and how many of them could
be matched, and how near their widths and depths are. It reads the settings of a named model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.graph_stats import GraphStats
from weft.core.task import Task

MATCHED, WIDTH, DEPTH = 0.7, 0.15, 0.15  # weights of the three parts

AROUND = {"loss": 2, "update": 1}


@dataclass(frozen=True)
class Features:
    """A step in three numbers that can be explained: operators by kind, the widest hidden row, graph layers."""

    operators: Mapping[str, int]
    width: int
    depth: int


def features_of_task(task: Task, stats: GraphStats) -> Features | None:
    """Counted from the settings of a named model; None for a user's model, which must be captured first."""
    if task.traits is None:
        return None
    layer = Counter(task.traits.operators)
    if "aggregator" in task.traits.shaping and task.aggregator == "max":
        layer = Counter({"spmm_max" if kind == "spmm" else kind: count for kind, count in layer.items()})
    if task.norm is not None:
        layer["norm"] += 2
    if task.residual:
        layer["matmul"] += 3
    total = Counter({kind: count * task.layers for kind, count in layer.items()}) + Counter(AROUND)
    return Features(dict(total), task.hidden if task.layers > 1 else max(stats.num_classes, 1), task.layers)


def similarity(one: Features, other: Features) -> tuple[float, str]:
    """A number in [0, 1], symmetric, 1 for equals; and where it comes from, in words."""
    kinds = set(one.operators) | set(other.operators)
    pairs = [(one.operators.get(kind, 0), other.operators.get(kind, 0)) for kind in kinds]
    shared, most = sum(min(pair) for pair in pairs), sum(max(pair) for pair in pairs)
    parts = shared / most if most else 1.0, _ratio(one.width, other.width), _ratio(one.depth, other.depth)
    score = MATCHED * parts[0] + WIDTH * parts[1] + DEPTH * parts[2]
    words = (
        f"{shared} of {most} operators can be matched, widths {one.width} and {other.width}, "
        f"{one.depth} and {other.depth} layers"
    )
    return score, words


def _ratio(one: int, other: int) -> float:
    return min(one, other) / max(one, other) if max(one, other) else 1.0
