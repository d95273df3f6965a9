"""capture: the training step of a task, as the run itself would make it, followed on tensors without data.

The run is built by the very code that trains, on a graph that has sizes and no data; so what is captured cannot
drift from what is run. Nothing of the size of the graph is allocated, and no GPU is needed or touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from weft.capture.extract import program_of
from weft.capture.observer import Observer
from weft.capture.standin import META, stand_in
from weft.core.plan import Plan
from weft.core.program import Program
from weft.core.stats import GraphStats
from weft.core.task import Task
from weft.graph.features import SparseFeatures
from weft.graph.graph import Graph
from weft.ops.adjacency import Adjacency
from weft.ops.backend import meta_means_gpu
from weft.run.solo import SoloRun


@dataclass(frozen=True)
class Captured:
    """A step that was followed."""

    program: Program


def capture(task: Task, graph: Graph | GraphStats, plan: Plan) -> Captured:
    """Follow one epoch of ``task`` on ``graph`` as ``plan`` would run it."""
    observer = Observer("meta", look_inside=plan.device == "cuda")
    with meta_means_gpu(plan.device == "cuda"), observer:
        whole = stand_in(graph)
        run = SoloRun(task, whole, plan, META)
        saved = [tensor.clone() for tensor in run.state.tensors().values()] if plan.replay else []
        run._step()  # builds what is built once
        resident, first = observer.alive(), len(observer.calls)
        kinds = kinds_of(observer, run.graph, run.state)
        run._step()
        observer.settle()
    del saved
    return Captured(program_of(observer, first, resident, kinds))


def kinds_of(observer: Observer, graph: Graph, state: Any) -> dict[int, str]:
    """What the storages that a run keeps are."""
    named: list[tuple[str, Tensor]] = [("graph", t) for t in held_by(graph.adj)]
    named += [("input", t) for t in (*held_by(graph.x), graph.y, graph.train, graph.val, graph.test)]
    named += [("state", t) for t in state.tensors().values()]
    named += [("weight", t) for t in (state.flat, state.best_flat)]
    numbers = ((observer.number(tensor), kind) for kind, tensor in named)
    return {number: kind for number, kind in numbers if number is not None}


def held_by(thing: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor of an adjacency and of all that has been derived from it."""
    met = set() if met is None else met
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, SparseFeatures):
        yield from held_by(thing.matrix, met)
    elif isinstance(thing, Adjacency) and id(thing) not in met:
        met.add(id(thing))
        parts = (thing.indptr, thing.indices, thing.weight, thing.row_scale, thing.col_scale)
        yield from held_by((*parts, thing._perm, thing._structure, tuple(thing._derived.values())), met)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from held_by(part, met)
    elif is_dataclass(thing):
        yield from held_by(tuple(getattr(thing, f.name) for f in fields(thing)), met)
