"""What the scheduler has to know of a task, as plain data: bytes, seconds, and with which tasks it may be joined."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft.core.changed_modules import files_of
from weft.core.compatibility import group_key, stack_key
from weft.core.cost import Cost
from weft.core.event import finite
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.settings import is_reference
from weft.core.task import OWN_FUNCTIONS, Task
from weft.core.units import show_bytes
from weft.engine.choosing import with_modes
from weft.engine.estimator import Estimator
from weft.engine.graphs import Graphs, GraphStore
from weft.engine.inference import layered_bytes, one_epoch
from weft.engine.machine import find_machine, load_calibration, machine_with
from weft.engine.plan import report_on
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.groups import group
from weft.planner.grouping.limits import GroupLimits
from weft.runtime.modules.settings import check_tasks
from weft.sched.admission import needed_bytes
from weft.serve.state import stamps_of

# ---- Very small tasks need no dry run, so that they start earlier.
#
# Their bytes are a bound (several times the rule of thumb), their seconds a rule of thumb. Both are small compared with
# the device, so that being too high costs little.

SMALL_SHARE = 256  # of a device's memory: no more than one part of so many
SMALL_SECONDS = 1.0


def quick_estimate(task: Task, estimator: Estimator) -> tuple[dict[str, Any], Plan] | None:
    """The estimate and the plan of ``task``; None if it is not small, or not of Weft's own models on a whole graph."""
    if task.traits is None or task.sampled:
        return None
    machine, stats = estimator.machine, estimator.stats(task)
    rates, epoch = rates_of(machine.device, machine, task.precision), work(task, stats)
    epoch_seconds = epoch.seconds(rates) + epoch.launches * rates.launch
    seconds = task.epochs * epoch_seconds
    limits = GroupLimits(stats, machine.device, machine)
    most, two = limits.most_bytes([task]), limits.most_bytes([task, task])
    if two - most > machine.memory_bytes / SMALL_SHARE or seconds > SMALL_SECONDS:
        return None
    estimate = {
        "bytes": most,
        "seconds": seconds,
        "shared_bytes": max(2 * most - two, 0),
        "utilisation": 1.0,
        # Mean seconds of a kernel; 0 on a processor, whose cores do not take turns by kernels.
        "turn_seconds": epoch_seconds / epoch.launches if machine.device == "cuda" else 0.0,
        "why": f"at most {show_bytes(most)} and about {seconds:.3g} s by rule of thumb: it is small",
    }
    made = group([task], estimator.stats, machine.device, machine=machine, budget=machine.memory_bytes)[0]
    compiled, _ = whether_to_compile(None, None, 0, made.device, made.join)
    return estimate, replace(made, compiled=compiled, cost={"total_bytes": most})


SHARED = ("graph", "input", "setup")  # kinds of bytes that the members of a group have once
STACKED = 1.3  # what a further member of a stack takes, at most, of what a task has of its own alone
MANY_EPOCHS = 4096  # up to here what a group keeps of every epoch is small, whatever the epochs of its members
UNKNOWN_BYTES, UNKNOWN_SECONDS = 1 << 30, 600.0  # of a model whose step has no dry run


def estimate_of(
    task: Task,
    device: str,
    store: GraphStore | None = None,
    bounds: bool = True,
    loading: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """The estimate of ``task`` on ``device``; of a model without a dry run, a guess and the reason.

    ``store``: where the planner keeps graphs, whose summaries every estimate needs. ``bounds``: whether a bound will do
    for a very small task; one with a byte budget of its own needs the prediction. ``loading``: called when the
    graph begins to be loaded, and when it is there.
    """
    kind, machine, graphs = device.partition(":")[0], machine_of(device), Graphs(store=store)
    estimator = Estimator(machine, load_calibration(machine), graphs)
    try:
        check_tasks([task])
        loading(begins=True)
        graphs.summary(task)
        loading(begins=False)
        tasks, estimator = with_modes([task], estimator, machine.memory_bytes)
        quick = quick_estimate(tasks[0], estimator) if bounds else None
        if quick is not None:
            return {**quick[0], **_common(task), "runnable": _runnable(quick[1], estimator, task)}
        report = report_on(tasks, task.label, estimator, machine.memory_bytes)
    except Exception as error:
        if task.traits is not None:
            raise
        why = f"its step has no dry run ({type(error).__name__}: {error}), so memory and time are guesses"
        guess = {"bytes": UNKNOWN_BYTES, "seconds": UNKNOWN_SECONDS, "shared_bytes": 0, "utilisation": 1.0, "why": why}
        return {**guess, "alone": True, "guess": True, **_common(task)}
    runnable = None if task.traits is None else _runnable(report.plans[0], estimator, task)
    cost = report.groups[0].cost
    busy = cost.seconds_of("gpu") if kind == "cuda" else cost.epoch_seconds
    predicted = {
        "bytes": cost.total_bytes,
        "seconds": report.run_seconds,
        "shared_bytes": shared_bytes(cost, report.machine),
        "utilisation": min(max(busy / cost.epoch_seconds, 0.0), 1.0) if cost.epoch_seconds else 1.0,
        "turn_seconds": cost.turn_seconds if kind == "cuda" else 0.0,
        "why": f"{show_bytes(cost.total_bytes)} and {report.run_seconds:.3g} s predicted",
    }
    return {**predicted, **_common(task), "runnable": runnable}


def machine_of(device: str) -> Machine:
    """The machine that estimates for ``device`` are made for."""
    return machine_with(torch.device("cpu")) if device.partition(":")[0] == "cpu" else find_machine()


def inference_estimate(task: Task, device: str, **options: Any) -> dict[str, Any]:
    """The estimate of an inference task: one epoch of its training, which takes more than one forward pass.

    ``options``: as of :func:`estimate_of`.
    """
    estimate = {**estimate_of(one_epoch(task), device, **options), "kind": "inference", "alone": True}
    machine, graphs = machine_of(device), Graphs(store=options.get("store"))
    room = estimate.get("room", machine.memory_bytes)
    if task.traits is not None and needed_bytes(estimate["bytes"]) > room:
        layered = layered_bytes(task, graphs.stats(task), machine)
        why = f"{show_bytes(layered)} layer by layer, since the whole graph would take {show_bytes(estimate['bytes'])}"
        estimate |= {"bytes": layered, "layerwise": True, "why": why}
    return {key: value for key, value in estimate.items() if key not in ("runnable", "join_key", "epochs")}


def shared_bytes(cost: Cost, machine: Machine) -> int:
    """What a task shares with the others of a stack, so that a stack of such tasks takes no more than is set aside.

    The graph, the features, the set-up, and what a process has of a GPU whatever it trains; the rest is a member's own.
    """
    once = sum(cost.bytes.get(name, 0) for name in SHARED) + machine.context_bytes
    per_member = math.ceil(STACKED * max(cost.total_bytes - once, 0))
    return max(cost.total_bytes - per_member, 0)


def _runnable(plan: Plan, estimator: Estimator, task: Task) -> dict[str, Any]:
    """The plan without its task and reasons, and what is needed to plan a group of such tasks.

    A model of a user's own has none and is planned by the worker: its settings alone do not say what its step is.
    """
    plan, machine = replace(plan, why=()), estimator.machine
    data = {"plan": plan.to_dict(), "stats": estimator.stats(task).to_dict(), "machine": machine.to_dict()}
    return finite(data)


def _common(task: Task) -> dict[str, Any]:
    """What every estimate has; ``files``: of the graph and of a user's code, on which it depends as well."""
    named = [task.model, *(getattr(task, name) for name in OWN_FUNCTIONS)]
    modules = [value.rpartition(":")[0] for value in named if is_reference(value)]
    code = [path for module in modules for path in ([module] if module.endswith(".py") else files_of(module))]
    files = stamps_of([*([task.graph] if isinstance(task.graph, str) else []), *code])
    return {"graph": task.graph_name, "join_key": join_key(task), "epochs": task.epochs, "files": files}


def join_key(task: Task) -> str:
    """Equal for tasks that can be one stack: same graph and objective, steps with the same operators."""
    long = task.epochs if task.epochs > MANY_EPOCHS else 0  # every member has as many rows of history as the longest
    parts = (group_key(task, multilabel=False), sorted(stack_key(task).items(), key=lambda item: item[0]), long)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
