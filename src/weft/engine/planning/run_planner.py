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

from weft.core.compatibility import width
from weft.core.errors import DoesNotFitError, WeftError
from weft.core.placement import on_device
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.machines import load_calibration, machine_with
from weft.engine.base.memory_budget import room
from weft.engine.planning.choosing import with_divisions
from weft.engine.planning.estimator import NONE, Estimator
from weft.engine.planning.learn_times import label_of, observe
from weft.engine.planning.plan_report_builder import report_on
from weft.engine.planning.search.fitting_groups import groups_within_budget
from weft.engine.planning.small_run import is_small
from weft.engine.planning.training_modes import with_modes, with_reason
from weft.ops.launch.device_limits import limits_of
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.grouping.groups import group
from weft.planner.grouping.stack_size_table import Throughput
from weft.planner.report.plan_text import refusal
from weft.planner.sampling.places import host_activations
from weft.runtime.batches.host_room import ACTIVATIONS, fits_host, too_little
from weft.runtime.device.torch_rng import seeded

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

    def groups(self, tasks: Sequence[Task], throughput: Throughput) -> list[Plan]:
        """Groups within the budget, with predicted costs; by rule of thumb if there is no dry run."""
        room = self.room
        if self._budget is None and self._plan_options == NONE and is_small(tasks, self._estimator, room):
            told = f"no dry run: it surely fits into {show_bytes(room)} and trains for seconds"
            return [self._with_known_cost(plan, tasks) for plan in self._by_rule(tasks, throughput, told)]
        with seeded(tasks[0].seed, self._device):  # a user's model may draw during its dry run
            known, unknown = self._followed(tasks)
            plans = self._estimated(known, throughput) if known else []
        for reason in dict.fromkeys(unknown.values()):
            told = f"memory by rule of thumb, time not known: {reason}"
            plans += self._by_rule([task for task in tasks if unknown.get(task.label) == reason], throughput, told)
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
        from weft.engine.planning.warm_kernels import warm_kernels

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

    def _estimated(self, tasks: Sequence[Task], throughput: Throughput) -> list[Plan]:
        try:
            found = groups_within_budget(tasks, self._estimator, self.room, throughput, self._plan_options)
            by_name = {task.label: task for task in tasks}
            divided = with_divisions(found, by_name, self._estimator, self.room, self._plan_options)
            return [plan for plan, _ in divided]
        except Exception as error:  # a fault in an estimate must not keep anybody from training
            told = f"memory by rule of thumb, time not known: {_in_words(error)}"
            return self._by_rule(tasks, throughput, told)

    def _by_rule(self, tasks: Sequence[Task], throughput: Throughput, told: str) -> list[Plan]:
        stats, machine = self._estimator.stats, self.machine
        limits = {"throughput": throughput, "budget": self.room, "weave": self._plan_options.weave}
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
