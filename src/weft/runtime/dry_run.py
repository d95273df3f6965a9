"""capture: dry-run the training step of a group of tasks on meta tensors.

The run is built by the same code that trains, on a graph with sizes but no data, so the dry run cannot drift from the
real one: 157 of 158 trainings of Weft's own models and layers had the predicted peak memory within 1 % (H200,
benchmarks/MEASURED.md). No arrays of the size of the graph are allocated, and no GPU is needed or touched.

A model that reads its data (how many edges pass a mask?) has no dry run on meta tensors. It takes one real step on the
user's own graph: a module may know its number of nodes, and write out of bounds on any other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.dry_sources import DrySampled, dry_source_for
from weft.capture.costs import program_of
from weft.capture.meta_graph import META, meta_graph
from weft.capture.meta_shapes import GpuRules
from weft.capture.observer import Observer
from weft.core.errors import SpecError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.placement import on_device, within_device
from weft.core.plan import Plan
from weft.core.program import Program
from weft.core.startup import no_collections
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.ops.launch.backend import meta_means_gpu
from weft.runtime.device.cuda_graph import SIDE_STREAMS, Steps
from weft.runtime.device.process import matmul_precision, same_draws
from weft.runtime.group import GroupRun
from weft.runtime.modules.build import build_model
from weft.runtime.modules.state import GlobalsSnapshot

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Captured:
    """A dry-run step: its Program, the Program of everything done once before it, and the run itself.

    ``preparation`` builds the graph's derived forms, the first aggregation and the state, and takes a first step (its
    phase ``"warm-up"``), which builds what is built on first use.
    """

    program: Program
    preparation: Program
    run: GroupRun = field(repr=False)


def capture(group: Sequence[Task], graph: Graph | GraphStats, plan: Plan, merger: Any = None) -> Captured:
    """Dry-run one epoch of ``group`` on ``graph``, or on a graph of which only the summary is known.

    ``plan`` says for which kind of machine, which tasks stack, and whether it is a CUDA graph; ``merger`` merges the
    steps of several stacks if the plan says so.
    """
    # A user's module may draw, and keep tensors without data. Collections took a fifth of the time, and would free what
    # refers to itself, such as a block and its transpose, at some operator or other: a step would differ between plans.
    with same_draws(CPU), outside_unchanged(group, graph), no_collections():
        return copy_context().run(_captured, group, graph, plan, merger)


def _captured(group: Sequence[Task], graph: Graph | GraphStats, plan: Plan, merger: Any) -> Captured:
    placement = within_device(plan.places, plan.device)
    try:
        return _follow(group, lambda: meta_graph(graph, placement), plan, META, merger)
    except Exception as error:
        if (isinstance(error, WeftError) and error.__cause__ is None) or not any(map(_runs_users_code, group)):
            raise
        if isinstance(graph, GraphStats):
            what = "" if isinstance(error, WeftError) else f"task {group[0].label!r}: {type(error).__name__}: "
            raise SpecError(
                f"{what}{error}; model {group[0].model_name} fails in training, and of graph {graph.name!r} only the "
                "sizes are known: give the graph itself if the model reads values of its data"
            ) from error
    on_cpu = replace(plan, placement=on_device("cpu"))
    try:
        return _follow(group, lambda: graph.to(CPU), on_cpu, CPU)
    except WeftError:
        raise
    except Exception as error:
        models = ", ".join(dict.fromkeys(task.model_name for task in group))
        raise SpecError(
            f"task {group[0].label!r}: model {models} fails in training: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def outside_unchanged(tasks: Sequence[Task], graph: Graph | GraphStats) -> Iterator[None]:
    """Afterwards, what is outside of the users' modules of ``tasks`` is as before; inside, no result is cached.

    The run must not find tensors without data there, which building the group may already leave behind.
    """
    own = {str(task.model) if isinstance(task.model, str) else id(task.model): task for task in tasks}
    with ExitStack() as stack:
        for task in (task for task in own.values() if task.traits is None):
            model = task.model
            with suppress(WeftError):  # one that cannot be built: the dry run says so in better words
                if not isinstance(model, nn.Module):  # its classes matter, and its weights may be large
                    model = build_model(task, graph.num_features, graph.num_classes, graph.num_relations).to("meta")
                variables = GlobalsSnapshot(model)
                stack.callback(variables.restore)
                stack.enter_context(variables.fresh_caches())
        yield


def _runs_users_code(task: Task) -> bool:
    return task.traits is None or any(map(task.has_own, ("objective", "metric", "optimizer")))


def _follow(
    group: Sequence[Task], make_graph: Callable[[], Graph], plan: Plan, where: torch.device, merger: Any = None
) -> Captured:
    gpu = plan.device == "cuda"
    if any(map(_runs_users_code, group)):
        # Torch's rules for operators without data import it on the way; its frames would then hold tensors of the step.
        importlib.import_module("torch._dynamo")
    observer = Observer(where.type, look_inside=gpu and where is META)
    precision = matmul_precision(group[0].precision)
    with precision, meta_means_gpu(gpu), GpuRules() if gpu else nullcontext(), observer:
        run = GroupRun(group, make_graph(), plan, where, merger, dry_source_for(group[0], plan))
        run.merge()
        if run.plan.join == "concurrent" and gpu:
            run.run_steps = dry_run_concurrent(observer)
        if run.merged is not None:
            merger.observe(run.merged, observer, streams=gpu)
        saved = [t.clone() for built in run.stacks for t in built.state.tensors().values()] if plan.replay else []
        setup = len(observer.calls)
        run.step()  # builds what is built on first use
        resident, first = observer.alive(), len(observer.calls)
        named: list[tuple[str, Tensor]] = [("graph", t) for t in held_by(run.graph.adj)]
        nodes = (run.graph.y, run.graph.train, run.graph.val, run.graph.test)
        named += [("input", t) for t in (*held_by((run.graph.x, *run.inputs.held())), *nodes)]
        for built in run.stacks:
            named += built.source.held() if isinstance(built.source, DrySampled) else []
            named += [("state", t) for t in built.state.tensors().values()]
            named += [("weight", t) for t in (built.state.flat, built.state.best_flat)]
        numbers = ((observer.number(tensor), kind) for kind, tensor in named)
        kinds = dict.fromkeys(resident, "constant") | {n: kind for n, kind in numbers if n is not None}
        del named
        run.step()
        after = observer.alive()
        gone = {number for call in observer.calls[first:] for number in call.frees}
    del saved
    carried, left = [n for n in resident if n in gone], [n for n in after if n not in set(resident)]
    resident = [number for number in resident if number not in gone]
    note = "" if where is META else "one real step on a CPU: the model reads values of its data, so it has no dry run"
    about: dict[str, Any] = {"tasks": len(group), "note": note, "recordable": where is META}
    program = program_of(observer, resident, kinds, part=slice(first, None), carried=carried, left=left)
    preparation = program_of(observer, [], kinds, part=slice(first), setup=setup, left=carried)
    return Captured(replace(program, **about), replace(preparation, **about), run)


def dry_run_concurrent(observer: Observer) -> Callable[[Steps], None]:
    """Steps one after another, on the streams that :class:`weft.runtime.device.cuda_graph.ConcurrentSteps` uses."""

    def beside(steps: Steps) -> None:
        for number, step in enumerate(steps):
            observer.stream = 1 + number % SIDE_STREAMS
            step()
        observer.stream = 0

    return beside


def held_by(thing: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor of an adjacency and of all forms derived from it."""
    met = set() if met is None else met
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, SparseFeatures):
        yield from held_by(thing.matrix, met)
    elif isinstance(thing, Adjacency) and id(thing) not in met:
        met.add(id(thing))
        parts = (thing.indptr, thing.indices, thing.weight, thing.row_scale, thing.col_scale)
        yield from held_by(
            (*parts, thing.relation, thing.edge_attr, thing._perm, thing._structure, tuple(thing._derived.values())),
            met,
        )
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from held_by(part, met)
    elif is_dataclass(thing):
        yield from held_by(tuple(getattr(thing, f.name) for f in fields(thing)), met)
