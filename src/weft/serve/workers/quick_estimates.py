"""What the scheduler has to know of a very small task, without a dry run: it starts while a dry run would still go on.

Its bytes are a bound (several times the rule of thumb), its seconds a rule of thumb. Both are small beside the device,
so that being too high costs little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.planning.estimator import Estimator
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.cost.rule_of_thumb import rates_of, work
from weft.planner.grouping.groups import group
from weft.planner.grouping.limits import Limits

SMALL_SHARE = 256  # of a device's memory: no more than one part of so many
SMALL_SECONDS = 1.0


def quick_estimate(task: Task, estimator: Estimator) -> tuple[dict[str, Any], Plan] | None:
    """The estimate and the plan of ``task``; None if it is not small, or not of Weft's own models on a whole graph."""
    if task.traits is None or task.sampled:
        return None
    machine, stats = estimator.machine, estimator.stats(task)
    limits = Limits(stats, machine.device, machine)
    most, two = limits.most_bytes([task]), limits.most_bytes([task, task])
    seconds = rule_seconds(task, estimator)
    if two - most > machine.memory_bytes / SMALL_SHARE or seconds > SMALL_SECONDS:
        return None
    told = f"at most {show_bytes(most)} and about {seconds:.3g} s by rule of thumb: it is small"
    found = {
        "bytes": most,
        "seconds": seconds,
        "shared_bytes": max(2 * most - two, 0),
        "utilisation": 1.0,
        "turn_seconds": turn_seconds(task, estimator),
        "why": told,
    }
    return found, _plan(task, estimator, most)


def rule_seconds(task: Task, estimator: Estimator) -> float:
    """Seconds of training by rule of thumb, launches included."""
    return task.epochs * _epoch(task, estimator)[0]


def turn_seconds(task: Task, estimator: Estimator) -> float:
    """Mean seconds of a kernel by rule of thumb; 0 on a processor, whose cores do not take turns by kernels."""
    seconds, launches = _epoch(task, estimator)
    return seconds / launches if estimator.machine.device == "cuda" else 0.0


def _epoch(task: Task, estimator: Estimator) -> tuple[float, int]:
    """Seconds of an epoch, launches included, and how many of them there are."""
    rates = rates_of(estimator.machine.device, estimator.machine, task.precision)
    done = work(task, estimator.stats(task))
    return done.seconds(rates) + done.launches * rates.launch, done.launches


def _plan(task: Task, estimator: Estimator, most: int) -> Plan:
    machine = estimator.machine
    made = group([task], estimator.stats, machine.device, machine=machine, budget=machine.memory_bytes)[0]
    compiled, _ = whether_to_compile(None, None, 0, made.device, made.join)
    return replace(estimator.placed(made, task), compiled=compiled, cost={"total_bytes": most})
