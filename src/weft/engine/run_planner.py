"""RunPlanner: plan a run before anything is on the device, and learn from it when it is over.

The same estimator as ``weft.plan``'s, for the device at hand and the bytes that are free on it, so that a run groups
its tasks as a plan says it will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from weft.batches.placing import ACTIVATIONS, fits_host, too_little
from weft.core.compatibility import graph_key, width
from weft.core.errors import DoesNotFitError, SpecError, WeftError
from weft.core.placement import on_device
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.choosing import with_divisions, with_modes, with_reason
from weft.engine.estimator import NONE, Estimator, groups_within_budget
from weft.engine.graphs import Graphs
from weft.engine.home import KERNELS, home, missing_kernels, note_kernels
from weft.engine.learning import label_of, observe
from weft.engine.machine import choose_device, cpu_count, load_calibration, machine_with
from weft.engine.memory_budget import room
from weft.engine.plan import report_on
from weft.ops.launch.backend import have_triton, limits_of
from weft.ops.launch.parallel_compile import can_compile_in_parallel, compile_versions, keep_triton_key
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.groups import group
from weft.planner.grouping.limits import Limits
from weft.planner.placement import host_activations
from weft.planner.report.plan_report import PlanReport
from weft.planner.report.plan_text import refusal
from weft.runtime.device.process import seeded

# ---- Decide whether a run is so small that a dry run would cost more than it can save.

SMALL_SECONDS = 30.0  # of training: a dry run of a group takes 0.1 to 0.3


def is_small(tasks: Sequence[Task], estimator: Estimator, room: int) -> bool:
    """Whether ``tasks`` surely fit into ``room`` bytes, all of them at once, and train for seconds by rule of thumb."""
    if any(task.traits is None or task.sampled for task in tasks):
        return False
    by_graph: dict[object, list[Task]] = {}
    for task in tasks:
        by_graph.setdefault(graph_key(task), []).append(task)
    return _seconds(tasks, estimator) < SMALL_SECONDS and all(
        _surely_fit(alike, estimator, room) for alike in by_graph.values()
    )


def _surely_fit(tasks: Sequence[Task], estimator: Estimator, room: int) -> bool:
    machine = estimator.machine
    return Limits(estimator.stats(tasks[0]), machine.device, machine, budget=room).surely_fits(tasks)


def _seconds(tasks: Sequence[Task], estimator: Estimator) -> float:
    """What the tasks would take one after another, without what launches cost: a stack shares those."""
    machine = estimator.machine
    return sum(
        task.epochs * work(task, estimator.stats(task)).seconds(rates_of(machine.device, machine, task.precision))
        for task in tasks
    )


ENOUGH_EPOCHS = 10  # for a run to teach something


class RunPlanner:
    """Plans for tasks on ``device`` within ``budget`` bytes (None: what is free there)."""

    def __init__(
        self, device: torch.device, graphs: Graphs, budget: int | None = None, plan_options: PlanOptions = NONE
    ) -> None:
        self._device, self._budget, self._plan_options = device, budget, plan_options
        self.machine = machine_with(device)
        limits = limits_of(device) if device.type == "cuda" else None
        self._estimator = Estimator(self.machine, load_calibration(self.machine), graphs, limits)
        self._given: dict[str, Task] = {}  # before modes were chosen

    @property
    def room(self) -> int:
        """Bytes that a group may take."""
        return room(self._device, self.machine, self._budget)

    def check(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that do not keep within the budget even alone, where one was given."""
        if self._budget is None:
            return
        known, _ = self._followed(tasks)
        for task in known:
            if self._estimator.alone(task).cost.total_bytes > self.room:
                raise DoesNotFitError(refusal(report_on([task], task.label, self._estimator, self.room)))

    def with_modes(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks, those sampled that leave it open and do not fit on the whole graph; see :func:`with_modes`."""
        self._given = {task.label: task for task in tasks}
        return with_modes(tasks, self._estimator, self.room, self._plan_options)

    def weights(self, task: Task) -> tuple[str, ...]:
        """A digest of the names and shapes of the weights of ``task``; empty where they are not known."""
        with seeded(task.seed, self._device):
            return self._estimator.alone(task).weights

    def groups(self, tasks: Sequence[Task]) -> list[Plan]:
        """Groups within the budget, with predicted costs; by rule of thumb if there is no dry run."""
        room = self.room
        if self._budget is None and self._plan_options == NONE and is_small(tasks, self._estimator, room):
            told = f"no dry run: it surely fits into {show_bytes(room)} and trains for seconds"
            return [self._with_known_cost(plan, tasks) for plan in self._by_rule(tasks, told)]
        with seeded(tasks[0].seed, self._device):  # a user's model may draw during its dry run
            known, unknown = self._followed(tasks)
            plans = self._estimated(known) if known else []
        for reason in dict.fromkeys(unknown.values()):
            told = f"memory by rule of thumb, time not known: {reason}"
            plans += self._by_rule([task for task in tasks if unknown.get(task.label) == reason], told)
        self._check_evaluations(plans, tasks)
        plans = [with_reason(plan, {task.label: task for task in tasks} | self._given, room) for plan in plans]
        place = {task.label: position for position, task in enumerate(tasks)}
        return sorted(plans, key=lambda plan: place[plan.members[0]])

    def _check_evaluations(self, plans: Sequence[Plan], tasks: Sequence[Task]) -> None:
        """Refuse an evaluation by layers whose activations neither the host's memory nor its disk has room for."""
        by_name = {task.label: task for task in tasks}
        for plan in plans:
            members = [by_name[name] for name in plan.members]
            task = max(members, key=width)  # a stack is as wide as its widest member
            if task.sampled and plan.places.evaluation == "layers":
                sizes = [len(members) * size for size in host_activations(task, self._estimator.stats(task))]
                if not fits_host(sizes):
                    raise DoesNotFitError(f"task {task.label!r}: {too_little(sum(sizes), ACTIVATIONS)}")

    def warm(self, tasks: Sequence[Task], plan: Plan, told: Callable[[int, int], None]) -> int:
        """Compile the kernels that a group lacks, on all cores; ``told(done, total)`` on the way. How many there were.

        A failure to do so is ignored: launches compile what they lack.
        """
        if self._device.type != "cuda":
            return 0

        major, minor = torch.cuda.get_device_capability(self._device)
        try:
            with seeded(tasks[0].seed, self._device):
                return warm_kernels(tasks, plan, self._estimator, 10 * major + minor, told)
        except Exception:  # a model that cannot be dry-run, a full disk
            return 0

    def _with_known_cost(self, plan: Plan, tasks: Sequence[Task]) -> Plan:
        """The plan with the cost that an earlier dry run of such a group found, if there was one."""
        known = {task.label: task for task in tasks}
        found = self._estimator.recalled([known[name] for name in plan.members], plan)
        return plan if found is None else replace(plan, cost=found.cost.to_dict(), weights=found.weights)

    def _followed(self, tasks: Sequence[Task]) -> tuple[list[Task], dict[str, str]]:
        """The tasks whose steps can be dry-run; of the others, what went wrong, in the same words for equal tasks."""
        wrong: dict[str, str] = {}
        for task in tasks:
            if task.traits is None:
                try:
                    self._estimator.alone(task)
                except Exception as error:  # a model that cannot be estimated may still train
                    wrong[task.label] = _in_words(error).removeprefix(f"task {task.label!r}: ")
        return [task for task in tasks if task.label not in wrong], wrong

    def _estimated(self, tasks: Sequence[Task]) -> list[Plan]:
        try:
            found = groups_within_budget(tasks, self._estimator, self.room, self._plan_options)
            by_name = {task.label: task for task in tasks}
            divided = with_divisions(found, by_name, self._estimator, self.room, self._plan_options)
            return [plan for plan, _ in divided]
        except Exception as error:  # a fault in an estimate must not keep anybody from training
            told = f"memory by rule of thumb, time not known: {_in_words(error)}"
            return self._by_rule(tasks, told)

    def _by_rule(self, tasks: Sequence[Task], told: str) -> list[Plan]:
        stats, machine = self._estimator.stats, self.machine
        limits = {"budget": self.room, "weave": self._plan_options.weave}
        plans = group(tasks, stats, machine.device, machine=machine, **limits)
        found = []
        for plan in plans:
            compiled, why = whether_to_compile(self._plan_options.compile, None, 0, plan.device, plan.join)
            found.append(replace(plan, compiled=compiled, why=(*plan.why, told, *why)))
        return found

    def learn(self, plan: Plan, folder: Path | None) -> None:
        """Keep measured beside predicted costs of a group for later plans; a failure to do so is ignored.

        Stacks that overlap take less than their predicted sum, one that was taken apart was predicted as a whole, what
        was compiled takes less than its operators, and what is read from elsewhere takes the link's time: nothing is
        learnt from those.
        """
        taught = plan.measured.get("epochs", 0) >= ENOUGH_EPOCHS and plan.places == on_device(plan.device)
        if taught and plan.join not in ("concurrent", "in turn") and not plan.compiled:
            label = "" if folder is None else label_of(folder, plan.members)
            with suppress(WeftError, OSError):
                observe(self.machine, plan.cost, plan.measured["epoch_seconds"], label)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"


# ---- Compile the kernels of a group before it is built: all that are missing, at once, on all cores.

FEWEST = 2  # a single kernel is compiled as fast by its launch

Told = Callable[[int, int], None]


def warm_kernels(
    tasks: Sequence[Task], plan: Plan, estimator: Estimator, arch: int, told: Told, processes: int | None = None
) -> int:
    """Compile what ``tasks`` need as the group of ``plan`` on a GPU of capability ``arch``; how many were compiled.

    Nothing is done where that is not possible: launches compile what they lack.
    """
    if not have_triton() or not can_compile_in_parallel():
        return 0
    keep_triton_key(home() / KERNELS)
    missing = missing_kernels(arch, estimator.kernels(tasks, plan))
    if len(missing) < FEWEST:
        return 0
    live = estimator.versions(tasks, plan)
    wanted = [live[digest] for digest in missing if digest in live]
    found = compile_versions(wanted, arch, processes or cpu_count(), told)
    with suppress(OSError):
        note_kernels(arch, {wanted[one.place].digest: one.folder for one in found})
    return len(found)


# ---- Check whether a saved plan can be run here as it is, and say why not.


def check_runnable(report: PlanReport) -> None:
    """Refuse a report that cannot be run anywhere."""
    if report.work is None:
        raise SpecError(f"plan {report.name!r} has no tasks in it; weft.plan(...) makes one that can be run")
    if not report.fits:
        raise DoesNotFitError(refusal(report))
    for plan in report.plans:
        if plan.shards != 1:
            raise SpecError(
                f"plan {report.name!r}: {plan.shards} shards are more than this run has devices for; plan again"
            )


def device_of(report: PlanReport, wanted: str | torch.device) -> torch.device:
    """The device to run on: the kind that was planned for, or a refusal where that is not there or not wanted."""
    kind = report.plans[0].device
    found = choose_device(wanted)
    if str(wanted) == "auto" and kind == "cpu":
        return torch.device("cpu")
    if found.type != kind:
        where = "there is none here" if str(wanted) == "auto" else f"device={str(wanted)!r} is another kind"
        raise SpecError(
            f"plan {report.name!r} is for a {kind} device ({report.machine.name}), but {where}; "
            "plan again with the machine to run on"
        )
    return found


def check_here(plans: Sequence[Plan], graphs: Graphs, planner: RunPlanner) -> None:
    """Refuse plans of another graph, of other weights, or of groups that do not fit into what is free here."""
    for plan in plans:
        task = plan.tasks[0]
        obstacle = None if plan.graph is None else plan.graph.obstacle(graphs.stats(task).fingerprint())
        if obstacle is not None:
            raise SpecError(f"task {task.label!r}: {obstacle}")
    room = planner.room
    for place, plan in enumerate(plans, 1):
        need = plan.cost.get("total_bytes", 0)
        if need > room:
            raise DoesNotFitError(
                f"group {place} of the plan ({_named(plan)}) needs {show_bytes(need)} ({need:,} bytes), but only "
                f"{show_bytes(room)} may be taken on this device; free some memory or raise the budget, or plan again "
                f"for {show_bytes(room)}"
            )
    for plan in plans:
        _check_own_models(plan, planner)


def _check_own_models(plan: Plan, planner: RunPlanner) -> None:
    """A user's module may have changed since; built-in models have the shapes that their settings say."""
    for stack, planned in zip(plan.stack_members, plan.weights, strict=False):
        task = plan.tasks[stack[0]]
        if task.traits is None:
            now = planner.weights(task)
            if now and now[0] != planned:
                raise SpecError(other_weights(task.label, task.model_name))


def other_weights(task: str, model: str) -> str:
    """What to say where the parameters are not those that were planned."""
    return f"task {task!r}: model {model} has other weights, by name or shape, than when this was planned; plan again"


def check_same_groups(saved: Sequence[Plan], plans: Sequence[Plan], where: str) -> None:
    """Refuse to resume a run whose groups are not the plan's; a group that had to be halved is still the plan's."""
    for one in saved:
        if not any(set(one.members) <= set(plan.members) for plan in plans):
            raise SpecError(
                f"{where}: was trained in other groups than this plan has ({_named(one)}); "
                "resume with the spec instead of the plan, or choose another --out"
            )


def _named(plan: Plan) -> str:
    others = len(plan.members) - 1
    return repr(plan.members[0]) + (f" and {others} more" if others else "")
