"""``weft.plan``: predict what a task or a sweep will take, before anything is allocated. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.compatibility import graph_key
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan, PlanOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import parse_bytes, show_bytes
from weft.engine.base.all_splits import with_all_splits
from weft.engine.base.kernel_store import seconds_to_compile
from weft.engine.base.machines import Given, find_machine, load_calibration, load_throughput
from weft.engine.base.options import check_choices, not_work
from weft.engine.planning.choosing import with_divisions
from weft.engine.planning.estimator import NONE, Estimate, Estimator, check_budget
from weft.engine.planning.placing import place_options
from weft.engine.planning.sampled_estimates import alone_estimates
from weft.engine.planning.search.fitting_groups import groups_within_budget
from weft.engine.planning.training_modes import with_modes, with_reason
from weft.planner.cost.calibration import Calibration
from weft.planner.machine_profiles import PROFILES
from weft.planner.report.plan_report import GroupEstimate, PlanReport, Suggestion, TaskEstimate
from weft.planner.report.plan_text import would_do
from weft.planner.report.suggestions import nearest, roomy_machines
from weft.runtime.user_modules.settings import check_tasks

AT_PEAK = 4  # of the largest things alive


def plan(
    work: Task | Sweep | Iterable[Task],
    machine: Given = None,
    budget: str | float | None = None,
    weave: bool | None = None,
    compile: bool | None = None,
    features: str | None = None,
    topology: str | None = None,
    cache: str | float | None = None,
    cache_policy: Any = None,
) -> PlanReport:
    """Memory and time of ``work`` on ``machine``: tasks, groups, and the reason for every decision.

    ``machine``: a name (``"h200"``, ``"a100-40g"``, ``"cpu"``, ...), a file that ``weft probe`` wrote, a
    :class:`Machine`; None is the one at hand. ``budget``: bytes that it may take there (``"24GiB"``); None is all
    the machine has. The other options are those of :func:`weft.run`. ``str()`` of the answer is what ``weft plan``
    prints. The answer can be run: ``weft.run(report)`` trains the groups that it names.

    Nothing of the size of the graph is allocated, a graph of a named shape is not even generated, and no GPU is
    touched. Raises :class:`InputError` for what cannot be planned.
    """
    check_choices(weave=weave, compile=compile)
    options = PlanOptions(weave, compile, **place_options(features, topology, cache, cache_policy))
    planned, name = _checked(work)
    planned = with_all_splits(planned)
    check_tasks([planned] if isinstance(planned, Task) else planned.tasks())
    there = find_machine(machine)
    limit = None if budget is None else parse_bytes(budget)
    estimator = Estimator(there, load_calibration(there))
    tasks = [planned] if isinstance(planned, Task) else planned.tasks()
    room = there.memory_bytes if limit is None else limit
    tasks = with_modes(tasks, estimator, room, options)
    report = report_on(tasks, name, estimator, room, options)
    if machine is None and there.device == "cuda":
        report = replace(report, compile_seconds=seconds_to_compile(estimator.known_kernels))
    return _executable(report, planned, estimator, limit)


def _executable(report: PlanReport, work: Task | Sweep, estimator: Estimator, limit: int | None) -> PlanReport:
    """The report with all that its groups need to be trained elsewhere."""
    tasks = {task.label: task for task in ([work] if isinstance(work, Task) else work)}
    groups = []
    for group in report.groups:
        own = tuple(tasks[name] for name in group.plan.members)
        graph = estimator.stats(own[0]).fingerprint()
        plan = with_reason(group.plan, tasks, report.budget)
        groups.append(replace(group, plan=replace(plan, tasks=own, graph=graph, budget=limit)))
    return replace(report, groups=tuple(groups), work=work)


def report_on(
    tasks: Sequence[Task], name: str, estimator: Estimator, room: int, plan_options: PlanOptions = NONE
) -> PlanReport:
    """The plan for ``tasks``, called ``name``, within ``room`` bytes of the estimator's machine."""
    there, calibration = estimator.machine, estimator.calibration
    alone = alone_estimates(tasks, estimator)
    for task, estimate in zip(tasks, alone, strict=True):
        if estimate is not None:
            check_budget(estimate, task, room)
    found = groups_within_budget(tasks, estimator, room, load_throughput(there.name), plan_options)
    found = with_divisions(found, {task.label: task for task in tasks}, estimator, room, plan_options)
    by_name, one_a_graph = {task.label: task for task in tasks}, {graph_key(task): task for task in tasks}
    place = {name: index for index, (plan, _) in enumerate(found) for name in plan.members}
    groups = [_group(plan, estimate, by_name, room) for plan, estimate in found]
    suggestions = _nearest(by_name, groups, estimator, room)
    # A group of one is that task alone, with its cache and division, which are chosen per group.
    solo = {plan.members[0]: estimate for plan, estimate in found if len(plan.members) == 1}
    each = [solo.get(task.label, estimate) for task, estimate in zip(tasks, alone, strict=True)]
    return PlanReport(
        name=name,
        machine=there,
        budget=room,
        tasks=tuple(_task(task, estimate, place[task.label]) for task, estimate in zip(tasks, each, strict=True)),
        groups=tuple(groups),
        nearest=tuple(suggestions),
        notes=tuple(_notes(there, calibration, groups, suggestions)),
        graphs=tuple(_graph_words(estimator.stats(task), task) for task in one_a_graph.values()),
        options=plan_options,
    )


def _checked(work: Task | Sweep | Iterable[Task]) -> tuple[Task | Sweep, str]:
    """What is to be planned, and what it is called; a list is the sweep that ``weft.run`` would make of it."""
    if isinstance(work, (Task, Sweep)):
        return work, work.label
    several = isinstance(work, Iterable) and not isinstance(work, str)
    tasks = list(work) if several else []
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise not_work(tasks if several else work, "weft.plan")
    return Sweep.from_tasks(tasks), f"{len(tasks)} tasks"


def _group(plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], room: int) -> GroupEstimate:
    return GroupEstimate(
        plan=replace(plan, cost=estimate.cost.to_dict()),
        cost=estimate.cost,
        epochs=max(tasks[name].epochs for name in plan.members),
        fits=estimate.cost.total_bytes <= room,
        at_peak=tuple(str(one) for one in estimate.memory.alive[:AT_PEAK]),
        unknown=estimate.program.unknown,
        note=estimate.program.note,
        extrapolated=estimate.extrapolated,
        advice=estimate.memory.advice,
        timeline=estimate.memory.timeline,
        phases=estimate.memory.phases,
    )


def _task(task: Task, estimate: Estimate | None, group: int) -> TaskEstimate:
    return TaskEstimate(
        name=task.label,
        model=task.model_name,
        graph=task.graph_name,
        epochs=task.epochs,
        parameters=None if estimate is None else estimate.parameters[0],
        cost=None if estimate is None else estimate.cost,
        group=group,
    )


def _nearest(
    tasks: Mapping[str, Task], groups: Sequence[GroupEstimate], estimator: Estimator, room: int
) -> list[Suggestion]:
    """A suggestion for every structure that does not fit even alone."""
    found: dict[str, Suggestion] = {}
    for one in groups:
        if one.fits:
            continue
        task = tasks[one.plan.members[0]]
        suggestion = nearest(task, lambda changed: estimator.alone(changed).cost, room, estimator.machine.has_bf16)
        if suggestion is not None:
            found.setdefault(str(sorted(suggestion.changes.items())), suggestion)
    return list(found.values())


def _notes(
    machine: Machine,
    calibration: Calibration | None,
    groups: Sequence[GroupEstimate],
    suggestions: Sequence[Suggestion],
) -> list[str]:
    notes = []
    rough = sum(group.extrapolated for group in groups)
    if rough:
        notes.append(f"{rough} of {len(groups)} groups are extrapolated from others: their bytes and seconds are rough")
    if not machine.measured:
        notes.append(
            f"rates of {machine.name!r} come from a named profile, not from that machine: `weft probe` measures one"
        )
    if calibration is None or not calibration.known:
        notes.append("times are not corrected by runs on this machine yet: `weft probe --learn RUNS` does that")
    else:
        notes.append(f"times are corrected by {len(calibration.observations)} earlier runs on this machine")
    too_large = next((one for one in groups if not one.fits), None)
    return notes if too_large is None else notes + _ways_out(too_large, machine, suggestions)


def _ways_out(group: GroupEstimate, machine: Machine, suggestions: Sequence[Suggestion]) -> list[str]:
    """What is left to say of a group that does not fit."""
    need = group.cost.total_bytes
    notes = [would_do(need)] if need <= machine.memory_bytes else []
    if not suggestions:
        fixed = sum(group.cost.bytes.get(kind, 0) for kind in ("graph", "input"))
        notes.append(f"nothing smaller that was tried fits; the graph and its features alone take {show_bytes(fixed)}")
    names = roomy_machines(need, PROFILES.values(), machine)
    return notes + ([f"as it is, it would fit on {', '.join(names)}"] if names else [])


def _graph_words(stats: GraphStats, task: Task) -> str:
    kind = "sparse features" if stats.sparse_features else "features"
    name = graph_key(task) if isinstance(task.graph, str) else stats.name
    return f"{name} ({stats.num_nodes:,} nodes, {stats.num_edges:,} edges, {stats.num_features:,} {kind})"
