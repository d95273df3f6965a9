"""Weft's side of a comparison: the step that ``weft.run`` trains with, ready to be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.baselines.epochs import Setting
from benchmarks.harness.timing import Memory
from weft.core.models import traits_of
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimator import merger_for
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.runtime.device.process import cpu_threads
from weft.runtime.group import GroupRun

MOST_EPOCHS = 2000  # rows of the table of rates; the benchmark trains fewer


@dataclass(frozen=True)
class WeftEpoch:
    """``train()`` is one epoch as recorded, ``eager()`` the same without the recording, ``notes`` what failed."""

    train: Callable[[], None]
    eager: Callable[[], None]
    recorded: bool
    notes: list[str]
    first_layer: str


def eager_memory(memory: Memory, weft: WeftEpoch) -> tuple[float | None, float | None]:
    """Peak GB of one epoch without the recording, which allocates nothing when replayed, and what of it was added.

    None where the memory does not hold the recording and such an epoch at once, or on a CPU.
    """
    memory.restart()
    try:
        weft.eager()
    except torch.OutOfMemoryError:
        return None, None
    return memory.peak_gb(), memory.added_gb()


def weft_task(name: str, graph: Graph, setting: Setting) -> Task:
    """The task that equals PyG's BasicGNN of the same setting; evaluated at the very end only."""
    traits = traits_of(name)
    heads = {"heads": setting.heads, "out_heads": setting.heads} if traits is not None and traits.has_heads else {}
    return Task(
        graph=graph,
        model=name,
        layers=setting.layers,
        hidden=setting.hidden,
        **heads,
        dropout=setting.dropout,
        lr=setting.lr,
        epochs=MOST_EPOCHS,
        eval_every=MOST_EPOCHS,
    )


def group_epoch(tasks: Sequence[Task], graph: Graph, *, plan: Plan | None = None) -> WeftEpoch:
    """One epoch of all ``tasks`` as one group on the device of ``graph``, by ``plan`` or as one group anyhow."""
    plan = plan or plan_as_one_group(tasks, graph.stats(), graph.device.type)
    with cpu_threads(plan.threads):
        run = GroupRun(tasks, graph, plan, graph.device, merger_for(plan))
        run.merge()
        run._compile()
        run._record(False)  # the epoch without its evaluation, and nothing else
        run._run_epoch[False]()
    train, eager = (limited(call, plan.threads) for call in (run._run_epoch[False], partial(run.step, False)))
    return WeftEpoch(train, eager, run.recorded, run.notes, plan.first_layer)


def limited(call: Callable[[], None], threads: int | None) -> Callable[[], None]:
    """``call`` with the threads that the plan gives a CPU run."""
    if threads is None:
        return call

    def with_threads() -> None:
        with cpu_threads(threads):
            call()

    return with_threads


def weft_epoch(name: str, graph: Graph, setting: Setting, *, first_layer_once: bool = True) -> WeftEpoch:
    """One epoch of the same model by Weft alone on the device of ``graph``.

    ``first_layer_once=False`` denies it the constant first aggregation, which PyG does not exploit either.
    """
    task = weft_task(name, graph, setting)
    plan = plan_as_one_group([task], graph.stats(), graph.device.type)
    if not first_layer_once:
        plan = replace(plan, first_layer="per_step")
    return group_epoch([task], graph, plan=plan)
