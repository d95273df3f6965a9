"""RunPlanner: plan a run before anything is on the device, and calibrate later plans by it when it is over.

The same estimator as ``weft.plan``'s, for the device at hand and the bytes that are free on it, so that a run groups
its tasks as a plan says it will.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from weft.batches.placement import ACTIVATIONS, fits_host, too_little
from weft.core.compatibility import graph_key, width
from weft.core.errors import DoesNotFitError, SpecError, WeftError
from weft.core.host_memory import cpu_count
from weft.core.placement import on_device
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.choosing import decided_groups, with_modes, with_reason
from weft.engine.estimator import NONE, Estimator
from weft.engine.graphs import Graphs
from weft.engine.home import KERNELS, home, missing_kernels, note_kernels
from weft.engine.learning import keep, label_of
from weft.engine.machine import choose_device, load_calibration, machine_with
from weft.engine.memory import room
from weft.engine.plan import report_on
from weft.engine.tuned_plan import TrialPlanner
from weft.ops.launch.backend import have_triton, limits_of
from weft.ops.launch.parallel_compile import can_compile_in_parallel, compile_versions, keep_triton_key
from weft.planner.cost.calibration import Observation
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.groups import group
from weft.planner.grouping.limits import GroupLimits
from weft.planner.placement import host_activations
from weft.planner.report.plan_report import PlanReport
from weft.planner.report.plan_text import refusal
from weft.runtime.device.process import seeded

SMALL_SECONDS = 30.0  # of training: a dry run of a group takes 0.1 to 0.3
ENOUGH_EPOCHS = 10  # of a run that calibrates later plans
FEWEST_KERNELS = 2  # a single kernel is compiled as fast by its launch
STRICT_VARIABLE = "WEFT_STRICT"  # set: a fault of the planner is raised, as in all tests

Progress = Callable[[int, int], None]


class RunPlanner:
    """Plans for tasks on ``device`` within the bytes of ``options.budget`` (None: what is free there)."""

    def __init__(self, device: torch.device, graphs: Graphs, options: RunOptions = NONE) -> None:
        self._device, self._options = device, options
        self.machine = machine_with(device)
        limits = limits_of(device) if device.type == "cuda" else None
        self._estimator = Estimator(self.machine, load_calibration(self.machine), graphs, limits)
        self._before_modes: dict[str, Task] = {}

    @property
    def room(self) -> int:
        """Bytes that a group may take."""
        return room(self._device, self.machine, self._options.budget)

    def check(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that do not keep within the budget even alone, if there is one."""
        if self._options.budget is None:
            return
        faults = self._faults(tasks)
        for task in tasks:
            if task.label not in faults and self._estimator.alone(task).cost.total_bytes > self.room:
                raise DoesNotFitError(refusal(report_on([task], task.label, self._estimator, self.room)))

    def with_modes(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks with their modes chosen: sampled if that is open and the whole graph does not fit."""
        self._before_modes = {task.label: task for task in tasks}
        with seeded(tasks[0].seed, self._device):  # a user's model may draw during its dry run
            moded, self._estimator = with_modes(tasks, self._estimator, self.room, self._options)
        return moded

    def weights(self, task: Task) -> tuple[str, ...]:
        """A digest of the names and shapes of the weights of ``task``; empty where they are not known."""
        with seeded(task.seed, self._device):
            return self._estimator.alone(task).weights

    def groups(self, tasks: Sequence[Task]) -> list[Plan]:
        """Groups within the budget, with predicted costs; by rule of thumb if there is no dry run."""
        room, by_name = self.room, {task.label: task for task in tasks}
        if not self._options.for_plan and is_small(tasks, self._estimator, room):
            reason = f"no dry run: it surely fits into {show_bytes(room)} and trains for seconds"
            plans = []
            for plan in self._by_rule(tasks, reason):  # with the cost that an earlier dry run found, if there was one
                former = self._estimator.recalled([by_name[name] for name in plan.members], plan)
                costs = {} if former is None else {"cost": former.cost.to_dict(), "weights": former.weights}
                plans.append(replace(plan, **costs))
            return plans
        with seeded(tasks[0].seed, self._device):  # a user's model may draw during its dry run
            faults = self._faults(tasks)
            followed = [task for task in tasks if task.label not in faults]
            try:
                decided = decided_groups(followed, self._estimator, room, self._options) if followed else []
                plans = [plan for plan, _ in decided]
            except Exception as error:  # a fault of the planner must not keep a user from training
                plans = self._by_rule(followed, not_predicted(error))
        for fault in dict.fromkeys(faults.values()):
            plans += self._by_rule([task for task in tasks if faults.get(task.label) == fault], fault)
        for plan in plans:  # an evaluation by layers keeps its activations in the host's memory or on its disk
            members = [by_name[name] for name in plan.members]
            task = max(members, key=width)  # a stack is as wide as its widest member
            if task.sampled and plan.places.evaluation == "layers":
                sizes = [len(members) * size for size in host_activations(task, self._estimator.stats(task))]
                if not fits_host(sizes):
                    raise DoesNotFitError(f"task {task.label!r}: {too_little(sum(sizes), ACTIVATIONS)}")
        plans = [with_reason(plan, by_name | self._before_modes, room) for plan in plans]
        position = {task.label: index for index, task in enumerate(tasks)}
        return sorted(plans, key=lambda plan: position[plan.members[0]])

    def for_trials(self, kinds: Sequence[Task]) -> TrialPlanner:
        """The planner of a tuned run with these kinds of trials."""
        return TrialPlanner(kinds, self._estimator, self.room, self._options)

    def _faults(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Why tasks with a user's module cannot be predicted, by their labels; they may train all the same."""
        faults: dict[str, str] = {}
        for task in tasks:
            if task.traits is None:
                try:
                    self._estimator.alone(task)
                except Exception as error:  # a module that cannot be followed may raise anything
                    faults[task.label] = not_predicted(error, task.label)
        return faults

    def _by_rule(self, tasks: Sequence[Task], reason: str) -> list[Plan]:
        machine, options = self.machine, self._options
        limits = {"machine": machine, "budget": self.room, "weave": options.weave}
        plans = []
        for plan in group(tasks, self._estimator.stats, machine.device, **limits):
            compiled, why = whether_to_compile(options.compile, None, 0, plan.device, plan.join)
            plans.append(replace(plan, compiled=compiled, why=(*plan.why, reason, *why)))
        return plans

    def warm(self, tasks: Sequence[Task], plan: Plan, progress: Progress) -> int:
        """Compile the kernels that a group lacks, on all cores, with ``progress(done, total)``; returns how many.

        A failure to do so is ignored: launches compile what they lack.
        """
        if self._device.type != "cuda":
            return 0
        major, minor = torch.cuda.get_device_capability(self._device)
        try:
            with seeded(tasks[0].seed, self._device):
                return warm_kernels(tasks, plan, self._estimator, 10 * major + minor, progress)
        except Exception:  # a model that cannot be dry-run, a full disk
            return 0

    def learn(self, plan: Plan, folder: Path | None, aside: list[Observation] | None = None) -> None:
        """Keep measured and predicted costs of a group for later plans; a failure to do so is ignored.

        ``aside``: the list to add them to instead, for a worker that may not have had the device alone.
        Nothing is learnt from stacks that overlap (they take less than their predicted sum), from one that was taken
        apart (it was predicted as a whole), from compiled steps (they take less than their operators) and from batches
        that come from elsewhere (they take the link's time).
        """
        enough = plan.measured.get("epochs", 0) >= ENOUGH_EPOCHS and plan.places == on_device(plan.device)
        if enough and plan.join not in ("concurrent", "in turn") and not plan.compiled:
            label = "" if folder is None else label_of(folder, plan.members)
            families = dict(plan.cost.get("uncorrected", {}))
            observation = Observation(families, plan.measured["epoch_seconds"], label)
            if aside is not None:
                aside.append(observation)
            elif observation.usable:
                with suppress(WeftError, OSError):
                    keep(self.machine, [observation])


def not_predicted(error: Exception, label: str = "") -> str:
    """The reason in a plan whose cost could not be predicted. A fault of Weft is raised if $WEFT_STRICT is set."""
    if isinstance(error, WeftError):
        words = str(error).removeprefix(f"task {label!r}: ")
    elif os.environ.get(STRICT_VARIABLE):
        raise error
    else:
        words = f"{type(error).__name__}: {error}"
    return f"not predicted: {words}; memory by rule of thumb"


def is_small(tasks: Sequence[Task], estimator: Estimator, room: int) -> bool:
    """True if a dry run would cost more than it can save.

    That is if ``tasks`` surely fit into ``room`` bytes, all at once, and train for seconds by rule of thumb, one after
    another and without launches, which a stack shares.
    """
    if any(task.traits is None or task.sampled for task in tasks):
        return False
    machine, seconds = estimator.machine, 0.0
    by_graph: dict[object, list[Task]] = {}
    for task in tasks:
        by_graph.setdefault(graph_key(task), []).append(task)
        rates = rates_of(machine.device, machine, task.precision)
        seconds += task.epochs * work(task, estimator.stats(task)).seconds(rates)
    return seconds < SMALL_SECONDS and all(
        GroupLimits(estimator.stats(alike[0]), machine.device, machine, budget=room).surely_fits(alike)
        for alike in by_graph.values()
    )


def warm_kernels(
    tasks: Sequence[Task], plan: Plan, estimator: Estimator, arch: int, progress: Progress, processes: int | None = None
) -> int:
    """Compile what ``tasks`` need as the group of ``plan`` on a GPU of capability ``arch``; returns how many.

    Nothing is done where that is not possible: launches compile what they lack.
    """
    if not have_triton() or not can_compile_in_parallel():
        return 0
    keep_triton_key(home() / KERNELS)
    missing = missing_kernels(arch, estimator.kernels(tasks, plan))
    if len(missing) < FEWEST_KERNELS:
        return 0
    versions = estimator.versions(tasks, plan)
    listed = [versions[digest] for digest in missing if digest in versions]
    compiled = compile_versions(listed, arch, processes or cpu_count(), progress)
    with suppress(OSError):
        note_kernels(arch, {listed[version.index].digest: version.folder for version in compiled})
    return len(compiled)


# ---- Check that a saved plan can be run here as it is.


def check_runnable(report: PlanReport) -> None:
    """Refuse a report that cannot be run anywhere."""
    if report.options.tuner is not None:
        raise SpecError(
            f"plan {report.name!r} is of a tuned sweep, whose trials are chosen while it runs: give the sweep and the "
            "tuner to weft.run"
        )
    if report.work is None:
        raise SpecError(f"plan {report.name!r} has no tasks in it; weft.plan(...) makes one that can be run")
    if not report.fits:
        raise DoesNotFitError(refusal(report))
    for plan in report.plans:
        if plan.shards != 1:
            raise SpecError(
                f"plan {report.name!r}: {plan.shards} shards are more than this run has devices for; plan again"
            )


def device_of(report: PlanReport, choice: str | torch.device) -> torch.device:
    """The device to run on: of the kind that was planned for, which must be there and not excluded by ``choice``."""
    kind = report.plans[0].device
    device = choose_device(choice)
    if str(choice) == "auto" and kind == "cpu":
        return torch.device("cpu")
    if device.type != kind:
        where = "there is none here" if str(choice) == "auto" else f"device={str(choice)!r} is another kind"
        raise SpecError(
            f"plan {report.name!r} is for a {kind} device ({report.machine.name}), but {where}; "
            "plan again with the machine to run on"
        )
    return device


def check_here(plans: Sequence[Plan], graphs: Graphs, planner: RunPlanner) -> None:
    """Refuse plans of another graph, of other weights, or of groups that do not fit into what is free here."""
    for plan in plans:
        task = plan.tasks[0]
        obstacle = None if plan.graph is None else plan.graph.obstacle(graphs.stats(task).fingerprint())
        if obstacle is not None:
            raise SpecError(f"task {task.label!r}: {obstacle}")
    room = planner.room
    for number, plan in enumerate(plans, 1):
        need = plan.cost.get("total_bytes", 0)
        if need > room:
            raise DoesNotFitError(
                f"group {number} of the plan ({_named(plan)}) needs {show_bytes(need)} ({need:,} bytes), but only "
                f"{show_bytes(room)} may be taken on this device; free some memory or raise the budget, or plan again "
                f"for {show_bytes(room)}"
            )
    for plan in plans:
        for stack, planned in zip(plan.stack_members, plan.weights, strict=False):
            task = plan.tasks[stack[0]]
            if task.traits is None:  # a user's module may have changed; settings define the shapes of built-in models
                now = planner.weights(task)
                if now and now[0] != planned:
                    raise SpecError(other_weights(task.label, task.model_name))


def other_weights(task: str, model: str) -> str:
    """The error for parameters that are not those that were planned."""
    return f"task {task!r}: model {model} has other weights, by name or shape, than when this was planned; plan again"


def check_same_groups(saved: Sequence[Plan], plans: Sequence[Plan], where: str) -> None:
    """Refuse to resume a run whose groups are not the plan's; a group that had to be halved is still the plan's."""
    for former in saved:
        if not any(set(former.members) <= set(plan.members) for plan in plans):
            raise SpecError(
                f"{where}: was trained in other groups than this plan has ({_named(former)}); "
                "resume with the spec instead of the plan, or choose another --out"
            )


def _named(plan: Plan) -> str:
    more = len(plan.members) - 1
    return repr(plan.members[0]) + (f" and {more} more" if more else "")
