"""Estimator: predict memory and time of groups with one dry run per structure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.compatibility import group_key, stack_key, width
from weft.core.cost import Cost
from weft.core.errors import SpecError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import Placement, on_device
from weft.core.plan import Plan, PlanOptions
from weft.core.program import Program
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.merger import merger_for
from weft.engine.base.process_memory import base_bytes
from weft.engine.planning.step_memory import Steps, remember, remembered, remembered_kernels, switches
from weft.graph.data.graph import Graph
from weft.ops.launch.device_limits import H200, DeviceLimits, assume_limits
from weft.ops.launch.kernel_versions import KernelVersion, kernel_versions
from weft.planner.cost.calibration import Calibration
from weft.planner.cost.inductor import Compiling, compiling
from weft.planner.cost.memory import Memory, memory
from weft.planner.cost.process_memory import process_bytes
from weft.planner.cost.program_scaling import one_after_another, stacked
from weft.planner.cost.roofline import OperatorSeconds, RunMode, seconds
from weft.planner.grouping.groups import group, plan_as_one_group
from weft.planner.grouping.limits import SURELY
from weft.planner.sampling.filled import filled
from weft.planner.sampling.places import chunk_filled, chunks
from weft.planner.sampling.transfers import with_batches
from weft.planner.training_mode import steps_per_epoch

NONE = PlanOptions()


@dataclass(frozen=True)
class Estimate:
    """What a group takes: the cost, how its memory comes about, and the step they were read from.

    ``extrapolated``: worked out by size from another group's, whose memory and step these are.
    ``weights``: a digest per stack of its parameters' names and shapes; empty where they are not known.
    """

    cost: Cost
    memory: Memory
    program: Program
    parameters: tuple[int, ...]
    weights: tuple[str, ...] = ()
    extrapolated: bool = False
    trained: Cost | None = None  # of sampled training, without sampling and fetching
    notes: tuple[str, ...] = ()  # remarks of the dry run


class Estimator:
    """Estimates for one machine; remembers the steps it has captured. ``graphs``: where those of tasks are found."""

    def __init__(
        self,
        machine: Machine,
        calibration: Calibration | None = None,
        graphs: Graphs | None = None,
        limits: DeviceLimits | None = None,
    ) -> None:
        self.machine, self.calibration = machine, calibration
        self._limits = limits if limits is not None else limits_for(machine)
        self._versions: dict[str, KernelVersion] = {}  # of the kernels in the steps that were captured here
        self.known_kernels: set[str] = set()  # digests of all of them, and of the steps that were remembered
        self._graphs = Graphs() if graphs is None else graphs
        self._captures: dict[Hashable, Steps] = {}
        self._estimates: dict[Hashable, Estimate] = {}
        self._bytes: dict[Hashable, float] = {}
        self._places: dict[Hashable, Placement] = {}

    def place(self, task: Task, placement: Placement) -> None:
        """From now on ``task`` and those that share its batches have their things there."""
        self._places[self._batches(task)] = placement

    def placement(self, task: Task) -> Placement:
        """Where the things of ``task`` lie: on the device, unless :meth:`place` has said otherwise."""
        found = self._places.get(self._batches(task)) if task.sampled else None
        return found or on_device(self.machine.device)

    def _batches(self, task: Task) -> Hashable:
        return group_key(task, self.stats(task).multilabel)

    def placed(self, plan: Plan, task: Task) -> Plan:
        """``plan``, whose first task is ``task``, with its placement."""
        return replace(plan, placement=self.placement(task))

    def stats(self, task: Task) -> GraphStats:
        """The summary of the graph of ``task``."""
        self._graphs.check(task)
        return self._graphs.stats(task)

    def plan(self, task: Task) -> Plan:
        """How ``task`` would run alone."""
        return self.placed(group([task], self.stats(task), self.machine.device)[0], task)

    def steps(self, task: Task, tasks: int = 1) -> Steps:
        """The captured step of ``task`` alone, or stacked with its like; tasks that differ in numbers share one."""
        key = (self._key(task), tasks)
        if key not in self._captures:
            alike = [task.with_values(name=f"{task.label} {i}") for i in range(tasks)] if tasks > 1 else [task]
            plan = plan_as_one_group(alike, self.stats(task), self.machine.device)
            self._captures[key] = self._captured(alike, self.placed(plan, task))
        return self._captures[key]

    def alone(self, task: Task) -> Estimate:
        """What ``task`` takes by itself."""
        key = self._key(task)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(self.steps(task), [task], self.plan(task))
        return self._estimates[key]

    def together(self, tasks: Sequence[Task], plan: Plan) -> Estimate:
        """What ``tasks`` take as the group that ``plan`` describes: captured as it will be run."""
        if len(tasks) == 1:
            return self.alone(tasks[0])
        key = self._group_key(tasks, plan)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(self._captured(tasks, plan), tasks, plan)
        return self._estimates[key]

    def alike(self, task: Task, tasks: int) -> Estimate:
        """What ``tasks`` tasks like ``task`` take as one stack, worked out from the step of two."""
        key = ("alike", self._key(task), tasks)
        if key not in self._estimates:
            steps, plan = self.steps(task, min(tasks, 2)), self.plan(task)
            if tasks > 2:  # what is done before is that of two
                steps = replace(steps, step=stacked(steps.step, tasks), preparation=None)
            self._estimates[key] = self._estimate(steps, [task], plan)
        return self._estimates[key]

    def recalled(self, tasks: Sequence[Task], plan: Plan) -> Estimate | None:
        """What ``tasks`` take as an earlier dry run captured them; None if there was none."""
        steps = remembered(tasks, self.stats(tasks[0]), plan, self._limits)
        return None if steps is None else self._estimate(steps, tasks, plan)

    def _captured(self, tasks: Sequence[Task], plan: Plan) -> Steps:
        key = self._capture_key(tasks, plan)
        if key not in self._captures:
            self._captures[key] = self._remembered(tasks, plan)
        return self._captures[key]

    def _capture_key(self, tasks: Sequence[Task], plan: Plan) -> Hashable:
        return (self._group_key(tasks, plan), plan.replay, plan.row_order, plan.mode, plan.places)

    def _remembered(self, tasks: Sequence[Task], plan: Plan) -> Steps:
        """As an earlier process captured it, or captured now and kept for later ones."""
        stats = self.stats(tasks[0])
        known = remembered(tasks, stats, plan, self._limits)
        if known is not None:
            self.known_kernels.update(known.kernels)
            return known
        found = self._captured_now(tasks, plan)
        remember(found, tasks, stats, plan, self._limits)
        return found

    def _captured_now(self, tasks: Sequence[Task], plan: Plan) -> Steps:
        with assume_limits(self._limits), kernel_versions() as versions:
            found = captured(tasks, self._graphs.summary(tasks[0]), plan)
        known = {version.digest: version for version in versions}
        self._versions |= known
        self.known_kernels.update(known)
        return replace(found, kernels=tuple(known))

    def kernels(self, tasks: Sequence[Task], plan: Plan) -> tuple[str, ...]:
        """Digests of the versions of kernels that ``tasks`` launch as the group of ``plan``.

        They are known without a dry run if one was made of such tasks, whatever their number of epochs.
        """
        if self._capture_key(tasks, plan) not in self._captures:
            known = remembered_kernels(tasks, self.stats(tasks[0]), plan, self._limits)
            if known is not None:
                return known
        return self._captured(tasks, plan).kernels

    def versions(self, tasks: Sequence[Task], plan: Plan) -> Mapping[str, KernelVersion]:
        """The same with the versions themselves, by digest."""
        if any(digest not in self._versions for digest in self.kernels(tasks, plan)):
            self._captured_now(tasks, plan)
        return self._versions

    def knows(self, tasks: Sequence[Task], plan: Plan | None = None) -> bool:
        """Whether :meth:`alone` or :meth:`together` would answer at once."""
        key = self._key(tasks[0]) if plan is None or len(tasks) == 1 else self._group_key(tasks, plan)
        return key in self._estimates

    def _group_key(self, tasks: Sequence[Task], plan: Plan) -> Hashable:
        stacks = (self._stack_key([tasks[i] for i in slots]) for slots in plan.stack_members)
        return (plan.join, plan.first_layer, *stacks)

    def _key(self, task: Task) -> Hashable:
        """Equal for tasks whose steps differ in numbers alone."""
        numbers = (width(task), task.epochs, *switches(task))
        return (self._batches(task), self.placement(task), tuple(stack_key(task).items()), *numbers)

    def _stack_key(self, tasks: Sequence[Task]) -> Hashable:
        """Equal for stacks of the same size as wide as each other: narrower members are padded."""
        widest = max(tasks, key=width)
        kinds = tuple(sorted({switches(task) for task in tasks}))
        longest = max(task.epochs for task in tasks)
        return (self._key(widest), len({width(task) for task in tasks}), kinds, longest, len(tasks))

    def group_bytes(self, tasks: Sequence[Task]) -> float:
        """Bytes of ``tasks`` as one group, one stack for every structure, worked out from the steps of two.

        Grouping calls this for many sets of tasks, so it makes no dry run.
        """
        if len(tasks) == 1:
            return float(self.alone(tasks[0]).cost.total_bytes)
        stacks: dict[Hashable, list[Task]] = {}
        for task in tasks:
            stacks.setdefault(tuple(stack_key(task).items()), []).append(task)
        key = frozenset((self._key(max(part, key=width)), len(part)) for part in stacks.values())
        if key not in self._bytes:
            # A stack is as wide as its widest member: the others are padded.
            parts = [self._stack(max(part, key=width), len(part)) for part in stacks.values()]
            about = _tried(tasks)
            whole = one_after_another(parts)
            self._bytes[key] = float(memory(whole, self.machine, stepped=tasks[0].sampled, **about).safe)
        return self._bytes[key]

    def surely_fit(self, tasks: Sequence[Task], budget: int) -> bool:
        """Whether users' modules fit into ``budget`` together by far, going by what each takes alone.

        A stack of them keeps to a few times that; dry runs of the groups that are made check it.
        """
        users = all(task.traits is None and not task.sampled for task in tasks)
        return users and SURELY * sum(self.alone(task).cost.total_bytes for task in tasks) <= budget

    def _stack(self, task: Task, tasks: int) -> Program:
        return stacked(self.steps(task, min(tasks, 2)).step, tasks)

    def _estimate(self, steps: Steps, tasks: Sequence[Task], plan: Plan) -> Estimate:
        first = tasks[0]
        mode = _run_mode(steps.step, first, plan, self.stats(first))
        captured = (plan.replay, steps.preparation, steps.step.recordable, first.sampled)
        held = memory(steps.step, self.machine, *captured, **_tried(tasks))
        cost = seconds(steps.step, self.machine, self.calibration, stats=self.stats(first), mode=mode)
        cost = replace(
            cost,
            peak_bytes=held.peak,
            reserved_bytes=held.reserved,
            total_bytes=held.safe,
            bytes=dict(held.kinds),
            process_bytes=self._process_bytes(steps),
            training_bytes=held.training,
        )
        trained = None
        if first.sampled:
            trained, cost = cost, with_batches(cost, first, self.stats(first), plan.places, self.machine)
        about = {"trained": trained, "notes": steps.notes}
        return Estimate(cost, held, steps.step, steps.parameters, steps.weights, **about)

    def _process_bytes(self, steps: Steps) -> int:
        """On a CPU, what the process takes in all; on a GPU nobody counts that."""
        return base_bytes() + process_bytes(steps.step, steps.preparation) if self.machine.device == "cpu" else 0

    def compiling(self, estimate: Estimate, task: Task, plan: Plan) -> Compiling | None:
        """What Inductor would make of a group that ``plan`` describes; None if its own step had no dry run."""
        if not estimate.parameters:
            return None
        mode = _run_mode(estimate.program, task, plan, self.stats(task))
        costs = OperatorSeconds(estimate.program, self.machine, self.calibration, self.stats(task), mode)
        return compiling(estimate.program, costs, costs.waiting)


def _tried(tasks: Sequence[Task]) -> dict[str, int]:
    """How users' modules are called before the first epoch: one twice, several together once and each alone."""
    if all(task.traits is not None for task in tasks):
        return {}
    return {"tried": 2} if len(tasks) == 1 else {"tried": 1, "alone": True}


def _run_mode(program: Program, task: Task, plan: Plan, stats: GraphStats) -> RunMode:
    """How the step of a group will run, of which ``task`` is a member."""
    replay = plan.replay and program.recordable
    repeated = (steps_per_epoch(task, stats), chunks(plan.places, stats))
    about = (filled(task, stats), chunk_filled(plan.places, stats))
    return RunMode(task.precision, replay, plan.threads, task.eval_every, *repeated, *about)


def captured(tasks: Sequence[Task], graph: Graph | GraphStats, plan: Plan) -> Steps:
    """The step of ``tasks``; a model that cannot be dry-run raises an InputError with the reason."""
    from weft.runtime.dry_run import capture  # a run that needs no dry run does without
    from weft.runtime.weight_shapes import weight_digests

    try:
        found = capture(tasks, graph, plan.device, plan=plan, merger=merger_for(plan))
    except WeftError:
        raise
    except Exception as error:
        first = tasks[0]
        raise SpecError(
            f"task {first.label!r}: model {first.model_name} does not trace: {type(error).__name__}: {error}"
        ) from error
    # A step scaled from a small graph has the shapes of that one.
    weights = () if not found.program.recordable else weight_digests(found.run)
    notes = tuple(found.run.notes) if found.program.recordable else ()
    return Steps(found.program, found.preparation, tuple(found.parameters), weights, notes=notes)


def limits_for(machine: Machine) -> DeviceLimits | None:
    """What launches are chosen by on the machine planned for; None if it has no GPU or does not say.

    A machine does not say how much shared memory a block may have: that is taken to be an H200's.
    """
    if machine.device != "cuda" or not machine.sms or not machine.l2_bytes:
        return None
    return replace(H200, sms=machine.sms, l2_bytes=machine.l2_bytes)


def check_budget(estimate: Estimate, task: Task, budget: int) -> None:
    """A clear error for a budget that not even the weights fit into."""
    kinds = estimate.program.bytes_by_kind(estimate.program.resident)
    weights = kinds.get("weight", 0) + kinds.get("state", 0)
    if weights > budget:
        raise SpecError(
            f"{show_bytes(budget)} is below the weights and optimizer state of task {task.label!r} alone, "
            f"{show_bytes(weights)}; it needs {show_bytes(estimate.cost.total_bytes)} in all"
        )
