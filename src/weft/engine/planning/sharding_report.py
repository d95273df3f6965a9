"""What the groups of a plan take over several ranks: for ``weft plan --gpus N``."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import SpecError
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.base.graph_cache import HOST, Graphs
from weft.engine.planning.estimator import Estimator
from weft.engine.planning.order_effect import OrderEffect, order_effect
from weft.planner.cost.sharding import ShardingEstimate, estimate_sharding, link_of
from weft.planner.report.plan_report import PlanReport


def over_the_whole_graph(work: Task | Sweep) -> Task | Sweep:
    """``work`` with tasks that leave the mode open on the whole graph, as a run over ranks has them."""
    tasks = [work] if isinstance(work, Task) else work.tasks()
    if not any(task.mode == "auto" and not task.sampled for task in tasks):
        return work
    whole = [task.with_values(mode="full") if task.mode == "auto" and not task.sampled else task for task in tasks]
    return whole[0] if isinstance(work, Task) else Sweep.from_tasks(whole, work.name)


def order_effects(report: PlanReport, ranks: int, order: str) -> list[tuple[OrderEffect, OrderEffect]]:
    """What crosses between ranks in the given order and in ``order``, per group; the graphs are loaded for that."""
    graphs, found = Graphs(HOST), []
    for group in report.groups:
        adj = graphs.on_device(group.plan.tasks[0]).adj
        found.append((order_effect(adj, "given", ranks), order_effect(adj, order, ranks)))
    return found


def effect_words(before: OrderEffect, after: OrderEffect) -> str:
    """What an order changes, in a sentence."""
    return (
        f"order {after.order}: {after.remote_edges:.1%} of the edges are remote ({before.remote_edges:.1%} in the "
        f"given order), {after.halo_nodes:,} remote nodes on the rank with most of them ({before.halo_nodes:,}); "
        f"found in {after.seconds:.2g} s"
    )


def shard_groups(
    report: PlanReport, ranks: int, effects: Sequence[OrderEffect] | None = None
) -> list[ShardingEstimate]:
    """An estimate of every group of ``report``, an executable plan, over ``ranks``; ``effects``: counted per group."""
    estimator, link = Estimator(report.machine), link_of(report.machine, ranks)
    parameters = {task.name: task.parameters or 0 for task in report.tasks}
    found = []
    for place, group in enumerate(report.groups):
        tasks: tuple[Task, ...] = group.plan.tasks
        if group.plan.mode == "sampled":
            raise SpecError(f"task {tasks[0].label!r}: sampled training over {ranks} ranks is not predicted yet")
        effect = None if effects is None else effects[place]
        found.append(
            estimate_sharding(
                tasks,
                group.cost,
                estimator.stats(tasks[0]),
                ranks,
                link,
                parameters=sum(parameters[task.label] for task in tasks),
                fixed_bytes=report.machine.context_bytes + report.machine.workspace_bytes,
                first_once=group.plan.first_layer == "once",
                halo=None if effect is None else effect.halo_nodes,
                remote_edges=None if effect is None else effect.remote_edges,
            )
        )
    return found
