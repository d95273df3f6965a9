"""What the groups of a plan take over several ranks: for ``weft plan --gpus N``."""

from __future__ import annotations

from weft.core.task import Task
from weft.engine.planning.estimator import Estimator
from weft.planner.cost.sharding import ShardingEstimate, estimate_sharding, link_of
from weft.planner.report.plan_report import PlanReport


def shard_groups(report: PlanReport, ranks: int) -> list[ShardingEstimate]:
    """An estimate of every group of ``report``, an executable plan, over ``ranks``."""
    estimator, link = Estimator(report.machine), link_of(report.machine)
    parameters = {task.name: task.parameters or 0 for task in report.tasks}
    found = []
    for group in report.groups:
        tasks: tuple[Task, ...] = group.plan.tasks
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
            )
        )
    return found
