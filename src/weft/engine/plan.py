"""``weft.plan``: predict what a task or a sweep will take, before anything is allocated. Needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.core.compatibility import graph_key
from weft.core.division import built_in
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.core.run_options import Placement, RunOptions
from weft.core.sweep import Sweep, as_work
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.dist.node_order import order_nodes, reordered
from weft.dist.partition import count_remote, halo_of, own_rows
from weft.engine.choosing import decided_groups, in_mode, ways_to_train, with_modes, with_placements, with_reason
from weft.engine.estimator import MAX_TASKS_TO_DRY_RUN, NONE, Estimate, Estimator
from weft.engine.graphs import HOST, Graphs, with_all_splits
from weft.engine.home import seconds_to_compile
from weft.engine.machine import Given, find_machine, load_calibration
from weft.engine.tuned_plan import TrialPlanner, check_tuner, most_epochs
from weft.ops.csr.adjacency import Adjacency
from weft.planner.cost.sharding import (
    OverRanks,
    ShardingEstimate,
    estimate_sampled_sharding,
    estimate_sharding,
    link_of,
    task_part,
)
from weft.planner.division.predicted_times import predicted_times
from weft.planner.division.simulator import Simulation, simulate
from weft.planner.division.ways import Way, batch_bytes
from weft.planner.grouping.trials import one_of_each
from weft.planner.machine_profiles import PROFILES
from weft.planner.partition import split_by_edges
from weft.planner.placement import steps_per_epoch
from weft.planner.report.plan_report import GroupEstimate, PlanReport, Suggestion, TaskEstimate, nearest, roomy_machines
from weft.planner.report.plan_text import would_do
from weft.planner.transfers import row_bytes
from weft.runtime.modules.settings import check_tasks

MAX_SOLO_DRY_RUNS = 12  # tasks of different structures that get a dry run alone, of very many


def plan(
    work: Task | Sweep | Iterable[Task],
    machine: Given = None,
    *,
    budget: str | float | None = None,
    placement: Placement = Placement(),  # noqa: B008
    options: RunOptions = NONE,
) -> PlanReport:
    """Memory and time of ``work`` on ``machine``: tasks, groups, and the reason for every decision.

    ``machine``: a name (``"h200"``, ``"a100-40g"``, ``"cpu"``, ...), a file that ``weft probe`` wrote, a
    :class:`Machine`; None is the one at hand. ``budget``: bytes that it may take there (``"24GiB"``); None is all
    the machine has. ``placement`` and ``options`` are those of :func:`weft.run`; of the options a plan reads
    ``weave`` and ``compile``. ``str()`` of the answer is what ``weft plan`` prints. The answer can be run:
    ``weft.run(report)`` trains the groups that it names.

    Nothing of the size of the graph is allocated, a graph of a named shape is not even generated, and no GPU is
    touched. Raises :class:`InputError` for what cannot be planned.
    """
    if not isinstance(options, RunOptions):
        raise SpecError(f"options={options!r} must be a weft.RunOptions(...)")
    options = options.with_keywords(budget=budget, placement=placement)
    options.refuse_unread("plan", "would have no effect on a plan; give it to weft.run")
    label, limit = work.label if isinstance(work, (Task, Sweep)) else "", options.budget
    kinds = [] if options.tuner is None else check_tuner(options, work)
    work = work if kinds else with_all_splits(as_work(work, "weft.plan"))
    tasks = one_of_each(kinds) if kinds else [work] if isinstance(work, Task) else work.tasks()
    check_tasks(tasks)
    if not kinds:
        options.check_tasks(tasks)
        options.check_joins(tasks)
    there = find_machine(machine)
    options.check_device(there.device)
    room = there.memory_bytes if limit is None else limit
    estimator = Estimator(there, load_calibration(there))
    if kinds:  # the rows of a tuned sweep, and the most that all trials take
        tasks, rows, estimate = TrialPlanner(kinds, estimator, room, options).group()
        report = report_on(tasks, label, estimator, room, options, [(rows, estimate)])
        (group,) = report.groups
        return replace(report, groups=(replace(group, epochs=most_epochs(tasks, options)),))
    moded, estimator = with_modes(tasks, estimator, room, options)
    report = report_on(moded, label or f"{len(tasks)} tasks", estimator, room, options)
    if machine is None and there.device == "cuda":
        report = replace(report, compile_seconds=seconds_to_compile(estimator.known_kernels))
    by_name, groups = {task.label: task for task in tasks}, []
    for group in report.groups:  # with all that they need to be trained elsewhere
        members = tuple(by_name[member] for member in group.plan.members)
        graph = estimator.stats(members[0]).fingerprint()
        planned = with_reason(group.plan, by_name, report.budget)
        groups.append(replace(group, plan=replace(planned, tasks=members, graph=graph, budget=limit)))
    return replace(report, groups=tuple(groups), work=work)


def report_on(
    tasks: Sequence[Task],
    name: str,
    estimator: Estimator,
    room: int,
    options: RunOptions = NONE,
    planned: Sequence[tuple[Plan, Estimate]] = (),
) -> PlanReport:
    """The plan for ``tasks``, called ``name``, within ``room`` bytes of the estimator's machine.

    ``planned``: groups that were decided already.
    """
    alone: dict[str, Estimate] = {}  # of every task, or of some structures if there are very many
    remaining = MAX_SOLO_DRY_RUNS if len(tasks) > MAX_TASKS_TO_DRY_RUN else len(tasks)
    for task in tasks:
        if remaining < len(tasks) and not estimator.knows([task], estimator.plan(task)):
            remaining -= 1
            if remaining < 0:
                continue
        alone[task.label] = estimate = estimator.alone(task)
        kinds = estimate.program.bytes_by_kind(estimate.program.resident)
        weights = kinds.get("weight", 0) + kinds.get("state", 0)
        if weights > room:
            raise SpecError(
                f"{show_bytes(room)} is below the weights and optimizer state of task {task.label!r} alone, "
                f"{show_bytes(weights)}; it needs {show_bytes(estimate.cost.total_bytes)} in all"
            )
    by_name = {task.label: task for task in tasks}
    planned = planned or decided_groups(tasks, estimator, room, options)
    groups = [
        GroupEstimate(
            plan=plan,
            cost=estimate.cost,
            epochs=max(by_name[member].epochs for member in plan.members),
            fits=estimate.cost.total_bytes <= room,
            at_peak=estimate.memory.alive,
            unknown=estimate.program.unknown,
            note=estimate.program.note,
            extrapolated=estimate.extrapolated,
            advice=estimate.memory.advice,
            timeline=estimate.memory.timeline,
            phases=estimate.memory.phases,
        )
        for plan, estimate in planned
    ]
    # A group of one is that task alone, with its cache and division, which are chosen per group.
    solo = {plan.members[0]: estimate for plan, estimate in planned if len(plan.members) == 1}
    group_of = {member: index for index, (plan, _) in enumerate(planned) for member in plan.members}
    estimates = []
    for task in tasks:
        known = solo.get(task.label) or alone.get(task.label)
        parameters = known.parameters[0] if known is not None and known.parameters else None
        cost, index = None if known is None else known.cost, group_of[task.label]
        estimates.append(
            TaskEstimate(task.label, task.model_name, task.graph_name, task.epochs, parameters, cost, index)
        )
    suggestions: dict[str, Suggestion] = {}  # for every structure that does not fit even alone
    for group in groups:
        if not group.fits:
            task = by_name[group.plan.members[0]]
            bf16 = estimator.machine.has_bf16
            suggestion = nearest(task, lambda changed: estimator.alone(changed).cost, room, bf16)
            if suggestion is not None:
                suggestions.setdefault(str(sorted(suggestion.changes.items())), suggestion)
    graphs = []
    for task in {graph_key(task): task for task in tasks}.values():
        stats = estimator.stats(task)
        kind = "sparse features" if stats.sparse_features else "features"
        graph = graph_key(task) if isinstance(task.graph, str) else stats.name
        graphs.append(f"{graph} ({stats.num_nodes:,} nodes, {stats.num_edges:,} edges, {stats.num_features:,} {kind})")
    return PlanReport(
        name=name,
        machine=estimator.machine,
        budget=room,
        tasks=tuple(estimates),
        groups=tuple(groups),
        nearest=tuple(suggestions.values()),
        notes=tuple(_notes(estimator, groups, bool(suggestions))),
        graphs=tuple(graphs),
        options=options,
    )


def _notes(estimator: Estimator, groups: Sequence[GroupEstimate], suggested: bool) -> list[str]:
    """How far the figures can be trusted, and what to do about a group that does not fit."""
    machine, calibration, notes = estimator.machine, estimator.calibration, list[str]()
    rough = sum(group.extrapolated for group in groups)
    if rough:
        notes.append(f"{rough} of {len(groups)} groups are extrapolated from others: their bytes and seconds are rough")
    if not machine.measured:
        notes.append(
            f"rates of {machine.name!r} come from a named profile, not from that machine: `weft probe` measures one"
        )
    if calibration is None or not calibration.observations:
        notes.append("times are not corrected by runs on this machine yet: `weft probe --learn RUNS` does that")
    else:
        notes.append(f"times are corrected by {len(calibration.observations)} earlier runs on this machine")
    too_large = next((group for group in groups if not group.fits), None)
    if too_large is None:
        return notes
    need = too_large.cost.total_bytes
    if need <= machine.memory_bytes:
        notes.append(would_do(need))
    if not suggested:
        fixed = sum(too_large.cost.bytes.get(kind, 0) for kind in ("graph", "input"))
        notes.append(f"nothing smaller that was tried fits; the graph and its features alone take {show_bytes(fixed)}")
    names = roomy_machines(need, PROFILES.values(), machine)
    return notes + ([f"as it is, it would fit on {', '.join(names)}"] if names else [])


# ---- What an order of the nodes changes: how many edges and nodes cross between ranks.


@dataclass(frozen=True)
class OrderEffect:
    """What crosses between ranks in an order: share of the edges, and nodes that the rank with most of them reads.

    ``seconds``: what finding the order took. ``imbalance``: edges of the fullest rank over the mean, less 1.
    """

    order: str
    remote_edges: float
    halo_nodes: int
    imbalance: float
    seconds: float = 0.0


def order_effect(adj: Adjacency, kind: str, ranks: int) -> OrderEffect:
    """Count what crosses between ``ranks`` if the nodes of ``adj`` are in the order ``kind``."""
    begin = time.perf_counter()
    order = order_nodes(adj, kind, ranks)
    seconds = time.perf_counter() - begin
    other = adj if kind == "given" else reordered(adj, order)
    parts = split_by_edges(other.indptr.cpu().numpy(), ranks)  # type: ignore[arg-type]
    remote = sum(count_remote(other, parts.bounds))
    halos = [halo_of(own_rows(other, low, high)[1], low, high).numel() for low, high in pairwise(parts.bounds)]
    return OrderEffect(kind, remote / max(other.num_edges, 1), max(halos), parts.imbalance, seconds)


# ---- What the groups of a plan take over several ranks: for ``weft plan --gpus N``.


def over_the_whole_graph(work: Task | Sweep) -> Task | Sweep:
    """``work`` with tasks that leave the mode open on the whole graph, as a run over ranks has them."""
    tasks = [work] if isinstance(work, Task) else work.tasks()
    if not any(task.mode == "auto" and not task.sampled for task in tasks):
        return work
    whole = [task.with_values(mode="full") if task.mode == "auto" and not task.sampled else task for task in tasks]
    return whole[0] if isinstance(work, Task) else Sweep.from_tasks(whole, work.name)


def order_effects(report: PlanReport, ranks: int, order: str) -> list[tuple[OrderEffect, OrderEffect]]:
    """What crosses between ranks in the given order and in ``order``, per group; the graphs are loaded for that."""
    graphs, effects = Graphs(HOST), []
    for group in report.groups:
        adj = graphs.on_device(group.plan.tasks[0]).adj
        effects.append((order_effect(adj, "given", ranks), order_effect(adj, order, ranks)))
    return effects


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
    estimates = []
    for index, group in enumerate(report.groups):
        tasks: tuple[Task, ...] = group.plan.tasks
        fixed_bytes = report.machine.context_bytes + report.machine.workspace_bytes  # CUDA and libraries
        over = OverRanks(ranks, link, sum(parameters[task.label] for task in tasks), fixed_bytes)
        if group.plan.mode == "sampled":
            tasks = tuple(in_mode(task, "sampled", group.plan.batch) for task in tasks)
            parts = [task_part(task, ranks) for task in tasks]
            of_rank = replace(group.plan, compiled=False, placement=None, division=None, tasks=())
            part, stats = estimator.together(parts, of_rank).cost, estimator.stats(tasks[0])
            row = row_bytes(tasks[0], stats)
            estimates.append(estimate_sampled_sharding(tasks, group.cost, part, stats, over, row))
            continue
        effect = None if effects is None else effects[index]
        estimate = estimate_sharding(
            tasks,
            group.cost,
            estimator.stats(tasks[0]),
            over,
            first_once=group.plan.first_layer == "once",
            halo=None if effect is None else effect.halo_nodes,
            remote_edges=None if effect is None else effect.remote_edges,
        )
        estimates.append(estimate)
    return estimates


# ---- Explain a planned report: the ways of training each group that were not taken, and simulated schedules.

MOST_GROUPS = 6  # that are explained
RUNNERS_UP = 6


@dataclass(frozen=True)
class Explained:
    """A group: the way that its plan takes, others by their seconds, and how long the search took."""

    taken: Way
    others: tuple[Way, ...]
    seconds: float

    def lines(self, name: str, budget: int) -> list[str]:
        """The ways of the group called ``name`` in lines, the one that was planned marked."""
        lines = ["", f"{name}, one task of it: ways to train, the fastest first (searched in {self.seconds:.2f} s)"]
        for way in sorted((self.taken, *self.others), key=lambda way: way.seconds_per_task):
            obstacle = ""
            if way.device_bytes > budget:
                obstacle = f" - does not fit into {show_bytes(budget)}"
            elif way is not self.taken and not way.condition and way.seconds_per_task < self.taken.seconds_per_task:
                if self.taken.task.sampled and self.taken.placement.on_device:
                    obstacle = " - nothing is moved off the GPU where all of it fits"
                elif way.rough:
                    obstacle = " - rough, no dry run was made of it"
            lines.append(f"  {'>' if way is self.taken else ' '} {way.words()}{obstacle}")
        return lines


def explained(report: PlanReport, divided: bool = False) -> dict[str, Explained]:
    """Each of the first groups by its name, searched again under the options that it was planned with.

    ``divided``: only those whose batches are divided, without ways that need other settings.
    """
    numbered = list(enumerate(report.groups[:MOST_GROUPS], 1))
    groups = {f"group {i}": group for i, group in numbered if not divided or group.plan.division is not None}
    if not groups:
        return {}
    plans = {name: plan for plan in report.plans for name in plan.members}
    tasks = {t.label: in_mode(t, plans[t.label].mode, plans[t.label].batch) for t in report.work_tasks}
    estimator = Estimator(report.machine, load_calibration(report.machine))
    estimator = with_placements(list(tasks.values()), estimator, report.budget, report.options)
    explanations = {}
    for name, group in groups.items():
        members, undivided = [tasks[member] for member in group.plan.members], replace(group.plan, division=None)
        begin = time.perf_counter()
        ways = ways_to_train(members, undivided, estimator, report.budget, report.options, settings=not divided)
        seconds = time.perf_counter() - begin
        # Batches of a task that trains on the whole graph need a setting.
        others = [
            way if way.condition or way.task.sampled == members[0].sampled else replace(way, condition="mode='sampled'")
            for way in sorted(ways, key=lambda way: way.seconds_per_task)
            if not _same(way, group.plan)
        ]
        # At least half of them could be taken: ways that do not fit or need a setting may be many.
        shown = [way for way in others if way.device_bytes <= report.budget and not way.condition][: RUNNERS_UP // 2]
        shown += [way for way in others if way not in shown][: RUNNERS_UP - len(shown)]
        shown.sort(key=lambda way: way.seconds_per_task)
        explanations[name] = Explained(_taken(group, members, ways, estimator), tuple(shown), seconds)
    return explanations


def _taken(group: GroupEstimate, tasks: Sequence[Task], ways: Sequence[Way], estimator: Estimator) -> Way:
    """The plan of ``group`` as a way, with the seconds and bytes that were printed."""
    plan, printed = group.plan, {"seconds": group.cost.epoch_seconds, "device_bytes": group.cost.total_bytes}
    way = next((way for way in ways if _same(way, plan)), None)
    if way is not None:
        return replace(way, rough=False, **printed)
    way = Way(tasks[0], plan.places, group.cost, members=len(plan.members), **printed)
    if plan.division is None:
        return way
    stats = estimator.stats(way.task)
    steps = steps_per_epoch(way.task, stats)
    times = predicted_times(way.task, stats, estimator.machine, way.placement, way.training, steps)
    return replace(
        way,
        division=plan.division,
        host_bytes=plan.division.pinned_batches * batch_bytes(way.task, stats),
        simulation=simulate(plan.division, times, steps, built_in()),
        times=times,
    )


def explanation(report: PlanReport) -> str:
    """The ways of every group as text, the one that was planned marked."""
    return "\n".join(line for name, group in explained(report).items() for line in group.lines(name, report.budget))


def schedules(report: PlanReport) -> dict[str, Simulation]:
    """The simulated epoch of every group whose batches are divided; a SpecError if there is none."""
    simulated = {name: group.taken.simulation for name, group in explained(report, divided=True).items()}
    simulations = {f"{name}: {each.division.words()}": each for name, each in simulated.items() if each is not None}
    if not simulations:
        raise SpecError(
            "--simulate: no group has batches that a host and a GPU prepare together; that needs mode='sampled', a "
            "machine with a GPU, features or edges in host memory, and room for batches on the GPU"
        )
    return simulations


def _same(way: Way, plan: Plan) -> bool:
    """Whether a way is what ``plan`` says."""
    if way.condition or way.members != len(plan.members) or way.task.sampled != (plan.mode == "sampled"):
        return False
    return not way.task.sampled or (way.placement, way.division) == (plan.places, plan.division)
