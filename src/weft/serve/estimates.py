"""What the scheduler has to know of a task, as plain data: bytes, seconds, and with which tasks it may be joined."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from weft.core.changed_modules import files_of
from weft.core.compatibility import group_key, stack_key
from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.event import finite
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.settings import is_reference
from weft.core.task import OWN_FUNCTIONS, Task
from weft.core.units import show_bytes
from weft.engine.choosing import with_modes, with_reason
from weft.engine.estimator import NONE, Estimator
from weft.engine.graphs import Graphs, GraphStore
from weft.engine.inference import layered_bytes, one_epoch
from weft.engine.machine import find_machine, load_calibration, machine_with
from weft.engine.memory import KERNELS, PROCESS
from weft.engine.plan import report_on, shard_groups
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.groups import group, may_share
from weft.planner.grouping.limits import GroupLimits
from weft.planner.report.plan_report import PlanReport
from weft.runtime.modules.settings import check_tasks
from weft.sched.admission import needed_bytes
from weft.serve.state import stamps_of

# ---- Very small tasks need no dry run, so that they start 0.07 s earlier (0.1 s the first of a server).
#
# Their bytes are a bound (several times the rule of thumb), their seconds a rule of thumb. Both are small compared with
# the device, so that being too high costs little.

SMALL_SHARE = 256  # of a device's memory: no more than one part of so many
SMALL_SECONDS = 1.0


def quick_estimate(task: Task, estimator: Estimator, room: float = math.inf) -> tuple[dict[str, Any], Plan] | None:
    """The estimate and the plan of ``task``; None if it is not small, or not of Weft's own models on a whole graph.

    A bound that is above ``room`` bytes says nothing.
    """
    if task.traits is None or task.sampled:
        return None
    machine, stats = estimator.machine, estimator.stats(task)
    rates, epoch = rates_of(machine.device, machine, task.precision), work(task, stats)
    epoch_seconds = epoch.seconds(rates) + epoch.launches * rates.launch
    seconds = task.epochs * epoch_seconds
    limits = GroupLimits(stats, machine.device, machine)
    most, two = limits.most_bytes([task]), limits.most_bytes([task, task])
    if most > room or two - most > machine.memory_bytes / SMALL_SHARE or seconds > SMALL_SECONDS:
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


SHARED = ("graph", "input", "setup", "cache", "prepared")  # kinds of bytes that the members of a group have once
STACKED = 1.3  # what a further member of a stack takes, at most, of what a task has of its own alone
MANY_EPOCHS = 4096  # up to here what a group keeps of every epoch is small, whatever the epochs of its members
# Of a rank on a GPU, beyond its predicted tensors: segments of torch's allocator, and what peers can read. On an H200 a
# rank of 27 MB reserved 157 MB, and 226 MB when it was resumed.
RANK_BYTES = 256 << 20
UNKNOWN_BYTES, UNKNOWN_SECONDS = 1 << 30, 600.0  # of a model whose step has no dry run


def estimate_of(
    task: Task,
    device: str,
    options: RunOptions = NONE,
    room: int | None = None,
    devices: int = 1,
    store: GraphStore | None = None,
    loading: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """The estimate of ``task`` on ``device``, planned as a run with ``options`` in ``room`` bytes would be.

    ``room``: None for all that the machine has. A task that leaves its mode open is sampled if it does not fit as a
    whole; ``mode`` says so. One that fits no device is sharded over the fewest of ``devices`` that hold it; ``ranks``
    says so, and bytes are those of one rank. Of a model without a dry run it is a guess, with the reason. A bound will
    do for a very small task without options that change a plan. ``store``: where the planner keeps graphs, whose
    summaries every estimate needs. ``loading``: called when the graph begins to be loaded, and when it is there.
    """
    kind, machine, graphs = device.partition(":")[0], machine_of(device), Graphs(store=store)
    room = min(size for size in (room, options.budget, machine.memory_bytes) if size is not None)
    estimator, tasks = Estimator(machine, load_calibration(machine), graphs), [task]
    options.check_device(kind)
    try:
        check_tasks([task])
        loading(begins=True)
        graphs.summary(task)
        loading(begins=False)
        if options.ranks == 1:  # ranks share the whole graph
            tasks, estimator = with_modes([task], estimator, room, options)
        quick = None if options.for_plan or options.ranks > 1 else quick_estimate(tasks[0], estimator, room)
        if quick is not None:
            known = _common(task, options, room, estimator)
            return {**quick[0], **known, "runnable": _runnable(quick[1], estimator, task)}
        report = report_on(tasks, task.label, estimator, room, options)
    except Exception as error:
        if task.traits is not None or options.placement.given:
            raise
        why = f"its step has no dry run ({type(error).__name__}: {error}), so memory and time are guesses"
        guess = {"bytes": UNKNOWN_BYTES, "seconds": UNKNOWN_SECONDS, "shared_bytes": 0, "utilisation": 1.0, "why": why}
        return {**guess, "alone": True, "guess": True, **_common(task, options, room)}
    plan, cost = with_reason(report.plans[0], {task.label: task}, room), report.groups[0].cost
    busy = cost.seconds_of("gpu") if kind == "cuda" else cost.epoch_seconds
    too_large = cost.total_bytes > room and task.traits is not None  # other modules may not go over ranks
    sharded = over_ranks(report, tasks[0], options, devices if too_large else 1, busy)
    runnable = None if task.traits is None or sharded else _runnable(plan, estimator, task)
    reasons = plan.why if plan.mode == "sampled" or options.for_plan else ()
    predicted = {
        "bytes": cost.total_bytes,
        "seconds": report.run_seconds,
        "shared_bytes": shared_bytes(cost, report.machine),
        "utilisation": min(max(busy / cost.epoch_seconds, 0.0), 1.0) if cost.epoch_seconds else 1.0,
        "turn_seconds": cost.turn_seconds if kind == "cuda" else 0.0,
        "why": "; ".join((f"{show_bytes(cost.total_bytes)} and {report.run_seconds:.3g} s predicted", *reasons)),
    }
    decided = {
        name: getattr(tasks[0], name) for name in ("mode", "batch") if getattr(tasks[0], name) != getattr(task, name)
    }
    return {**predicted, **_common(tasks[0], options, room, estimator), **decided, "runnable": runnable, **sharded}


def over_ranks(report: PlanReport, task: Task, options: RunOptions, devices: int, busy: float) -> dict[str, Any]:
    """What an estimate says otherwise of a task over the ranks of ``options``, or else the fewest that hold it.

    At most ``devices``; empty if one rank it is. ``busy``: seconds of an epoch in which one device alone computes. A
    rank on a CPU is a process of its own that reads the whole graph.
    """
    group, cost = report.groups[0], report.groups[0].cost
    whole = replace(report, groups=(replace(group, plan=replace(group.plan, tasks=(task,))),))
    given, on_cpu = options.ranks > 1, report.machine.device == "cpu"
    for ranks in (options.ranks,) if given else range(2, devices + 1):
        size, seconds, known = cost.total_bytes, cost.epoch_seconds, given
        with suppress(SpecError):  # what cannot be predicted, or trained, over ranks
            replace(options, ranks=ranks).check_tasks([task])
            one = shard_groups(whole, ranks)[0]
            size, seconds, known = one.bytes_per_rank, one.epoch_seconds, True
        read = PROCESS + KERNELS + cost.bytes.get("graph", 0) + cost.bytes.get("input", 0)
        size += read if on_cpu else RANK_BYTES
        if not known or (not given and size > report.budget):
            continue
        why = f"{show_bytes(size)} on the device of each of {ranks} ranks"
        why += "" if given else f": alone it needs {show_bytes(cost.total_bytes)}, and fits no device"
        return {
            "ranks": ranks,
            "bytes": size,
            "seconds": group.epochs * seconds,
            "shared_bytes": 0,
            "utilisation": min(busy / ranks / seconds, 1.0) if seconds else 1.0,
            "why": why,
        }
    return {}


def machine_of(device: str) -> Machine:
    """The machine that estimates for ``device`` are made for."""
    return machine_with(torch.device("cpu")) if device.partition(":")[0] == "cpu" else find_machine()


def inference_estimate(task: Task, device: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    """The estimate of an inference task: one epoch of its training, which takes more than one forward pass.

    ``arguments`` and ``more``: as of :func:`estimate_of`.
    """
    estimate = {**estimate_of(one_epoch(task), device, *arguments, **more), "kind": "inference", "alone": True}
    machine, graphs = machine_of(device), Graphs(store=more.get("store"))
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


def _common(task: Task, options: RunOptions, room: int, estimator: Estimator | None = None) -> dict[str, Any]:
    """What every estimate has; ``files``: of the graph and of a user's code, on which it depends as well."""
    named = [task.model, *(getattr(task, name) for name in OWN_FUNCTIONS)]
    modules = [value.rpartition(":")[0] for value in named if is_reference(value)]
    code = [path for module in modules for path in ([module] if module.endswith(".py") else files_of(module))]
    files = stamps_of([*([task.graph] if isinstance(task.graph, str) else []), *code])
    keys = {"join_key": join_key(task, options), "structure": ""}
    if estimator is not None:
        machine = estimator.machine
        if may_share(task, GroupLimits(estimator.stats(task), machine.device, machine, weave=options.weave)):
            keys = {"join_key": join_key(task, options, stacked=False), "structure": keys["join_key"]}
        keys["common_bytes"] = machine.context_bytes
    ranks = {"ranks": options.ranks} if options.ranks > 1 else {}
    return {"graph": task.graph_name, **keys, "epochs": task.epochs, "files": files, "room": room, **ranks}


def join_key(task: Task, options: RunOptions = NONE, stacked: bool = True) -> str:
    """Equal for tasks that can be one group: same graph and objective, trained with the same ``options``.

    ``stacked``: that can be one stack, since their steps have the same operators.
    """
    long = task.epochs if task.epochs > MANY_EPOCHS else 0  # every member has as many rows of history as the longest
    alike = sorted(stack_key(task).items(), key=lambda item: item[0]) if stacked else None
    parts = (group_key(task, multilabel=False), alike, long, sorted(options.given.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
