"""Stacks for tests: tasks that may share one, and groups that train them without a planner."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.core.models import MODELS as NAMES
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.grouping.groups import group
from weft.runtime.group import GroupRun

MODELS = list(NAMES)


def solo_plan(task: Task, stats, device: str) -> Plan:
    """The plan of a group of one."""
    return group([task], stats, device)[0]


def tasks_of(graph, members, **shared) -> list[Task]:
    """A task for every dict of ``members`` over ``shared`` settings."""
    return [Task(**{"graph": graph, "hidden": 8, "heads": 2, **shared, **member}) for member in members]


def start(tasks, graph, device="cpu", **changes) -> GroupRun:
    """All ``tasks`` as one group on ``device``, with the plan of the first and ``changes`` of it."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    plan = replace(solo_plan(tasks[0], graph.stats(), device), members=tuple(map(str, range(len(tasks)))), **changes)
    return GroupRun(tasks, graph, plan, place)


def best_tensors(run: GroupRun, index: int) -> dict[str, torch.Tensor]:
    """The best weights and buffers of a member by the names that its model's ``state_dict`` uses."""
    member = run.members[index]
    return member.stack.members.named(member.slot, *member.best())
