"""Estimator: predict memory and time of groups with one dry run per structure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.core.compatibility import group_key, stack_key, width
from weft.core.cost import SIZES, Cost
from weft.core.errors import SpecError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.models import BUILT_IN
from weft.core.placement import DataPlacement, on_device
from weft.core.plain_data import PlainData
from weft.core.plan import Plan
from weft.core.program import Program
from weft.core.run_options import RunOptions
from weft.core.task import OWN_FUNCTIONS, Task
from weft.engine.graphs import Graphs, check_trainable
from weft.engine.home import step_store
from weft.engine.memory import base_bytes
from weft.ops.launch.backend import H200, DeviceLimits, assume_limits
from weft.ops.launch.hooks import KernelVersion, kernel_versions
from weft.planner.cost.calibration import Calibration
from weft.planner.cost.inductor import Compiling, compiling
from weft.planner.cost.memory import Execution, MemoryEstimate, memory, process_bytes
from weft.planner.cost.program_scaling import one_after_another, stacked
from weft.planner.cost.roofline import RunMode, epoch_clocks, seconds
from weft.planner.cost.rule import attention_bytes, rates_of, rule_memory, work
from weft.planner.grouping.groups import group, plan_as_one_group
from weft.planner.grouping.limits import RULE_SAFETY_FACTOR
from weft.planner.placement import chunk_padding_share, chunks, padding_share, steps_per_epoch
from weft.planner.transfers import with_batches

# ---- Captured steps, kept under ``$WEFT_HOME/steps`` so that a dry run is made once.
#
# The key of a step has its graph's summary, the structure of its tasks, the plan and the kind of device. Only built-in
# models are kept: a user's may change under the same name. The kernels that a step launches are an entry of their own
# for any number of epochs: histories are as long as the training, but no version of a kernel depends on that.

PLAN_FIELDS = ("join", "device", "replay", "first_layer", "row_order", "mode", "stacks", "places", "division")


@dataclass(frozen=True)
class Steps(PlainData):
    """A captured group: one epoch, what is done once before, the parameters of every member, and their shapes.

    ``kernels``: digests of the versions of Weft's kernels that it launches on a GPU. ``notes``: remarks of the dry run
    of users' modules.
    """

    step: Program
    preparation: Program | None
    parameters: tuple[int, ...]
    weights: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def step_keys(
    tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None
) -> tuple[str, str] | None:
    """Keys of the step of ``tasks`` and of its kernels; None if a model or function of the user's own is among them."""
    for task in tasks:
        built_in = task.traits is not None and task.traits is BUILT_IN.get(task.model_name)
        if not built_in or task.model_args or any(task.has_own(name) for name in OWN_FUNCTIONS):
            return None
    structure = {
        "graph": stats.fingerprint().digest,
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "limits": None if limits is None else asdict(limits),
        # Equal for tasks whose steps differ in numbers and the length of histories alone; the graph is there already.
        "tasks": [
            [group_key(task, stats.multilabel)[1:], sorted(stack_key(task).items()), width(task), switches(task)]
            for task in tasks
        ],
    }
    epochs = [task.epochs for task in tasks]
    # Launches that are merged into one have a version of their own for lengths that are divisible by 16.
    kernel_epochs = epochs if plan.woven else []
    texts = [json.dumps([structure, lengths], sort_keys=True, default=str) for lengths in (epochs, kernel_epochs)]
    step, kernels = (hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts)
    return f"{step}.json.gz", f"{kernels}.kernels.json"


def switches(task: Task) -> tuple[bool, ...]:
    """Numbers that leave operators out when they are zero."""
    attention = task.dropout if task.attention_dropout is None else task.attention_dropout
    # Weft's update reads the decay of all weights from its table; only torch's optimizers, groups and masks differ.
    ours = task.traits is not None and task.traits is BUILT_IN.get(task.model_name) and not task.has_own("optimizer")
    decays = task.weight_decay > 0 and (not ours or bool(task.param_groups))
    return (task.dropout > 0, attention > 0, decays, task.label_smoothing > 0, task.patience is None)


NONE = RunOptions()


@dataclass(frozen=True)
class Estimate:
    """What a group takes: the cost, how its memory comes about, and the step they were read from.

    ``extrapolated``: worked out by size from another group's, whose memory and step these are.
    ``weights``: a digest per stack of its parameters' names and shapes; empty where they are not known.
    """

    cost: Cost
    memory: MemoryEstimate
    program: Program
    parameters: tuple[int, ...]
    weights: tuple[str, ...] = ()
    extrapolated: bool = False
    trained: Cost | None = None  # of sampled training, without sampling and fetching
    notes: tuple[str, ...] = ()  # remarks of the dry run


class Estimator:
    """Estimates for one machine; holds the steps it has captured. ``graphs``: provides the graphs of tasks.

    Methods with a ``placement`` answer for tasks whose features and batches lie there; None: where
    :meth:`with_placements` has decided, else on the device.
    """

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
        self.known_kernels: set[str] = set()  # digests of all of them, and of the steps that were read
        self._graphs = Graphs() if graphs is None else graphs
        self._captures: dict[Hashable, Steps] = {}
        self._estimates: dict[Hashable, Estimate] = {}
        self._bytes: dict[Hashable, float] = {}
        self._places: Mapping[Hashable, DataPlacement] = {}

    def with_placements(self, placements: Mapping[Hashable, DataPlacement]) -> Estimator:
        """The same estimator for sampled tasks whose things lie where ``placements`` say, by their group keys."""
        other = copy(self)  # what was estimated is shared
        other._places = placements
        return other

    def placement(self, task: Task) -> DataPlacement:
        """Where the things of ``task`` lie: on the device, unless it was decided otherwise."""
        placed = self._places.get(group_key(task, self.stats(task).multilabel)) if task.sampled else None
        return placed or on_device(self.machine.device)

    def stats(self, task: Task) -> GraphStats:
        """The summary of the graph of ``task``."""
        check_trainable(task, self._graphs.summary(task))
        return self._graphs.stats(task)

    def plan(self, task: Task, placement: DataPlacement | None = None) -> Plan:
        """How ``task`` would run alone."""
        plan = plan_as_one_group([task], self.stats(task), self.machine.device)
        return replace(plan, placement=placement or self.placement(task))

    # ---- Estimates

    def alone(self, task: Task, placement: DataPlacement | None = None) -> Estimate:
        """The estimate of ``task`` by itself."""
        key = self._key(task, placement or self.placement(task))
        if key not in self._estimates:
            plan = self.plan(task, placement)
            self._estimates[key] = self._estimate(self._captured([task], plan), [task], plan)
        return self._estimates[key]

    def together(self, tasks: Sequence[Task], plan: Plan) -> Estimate:
        """The estimate of ``tasks`` as the group that ``plan`` describes: captured as it will be run."""
        if len(tasks) == 1:
            return self.alone(tasks[0], plan.places)
        key = self._group_key(tasks, plan)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(self._captured(tasks, plan), tasks, plan)
        return self._estimates[key]

    def alike(self, task: Task, tasks: int, placement: DataPlacement | None = None) -> Estimate:
        """The estimate of ``tasks`` tasks like ``task`` as one stack, computed from the step of two."""
        key = ("alike", self._key(task, placement or self.placement(task)), tasks)
        if key not in self._estimates:
            steps, plan = self.steps(task, min(tasks, 2), placement), self.plan(task, placement)
            if tasks > 2:  # the preparation is that of two
                steps = replace(steps, step=stacked(steps.step, tasks), preparation=None)
            self._estimates[key] = self._estimate(steps, [task], plan)
        return self._estimates[key]

    def recalled(self, tasks: Sequence[Task], plan: Plan) -> Estimate | None:
        """The estimate of ``tasks`` from the step that an earlier dry run captured; None if there was none."""
        keys = step_keys(tasks, self.stats(tasks[0]), plan, self._limits)
        steps = None if keys is None else step_store().read(keys[0], Steps.from_dict)
        return None if steps is None else self._estimate(steps, tasks, plan)

    def knows(self, tasks: Sequence[Task], plan: Plan) -> bool:
        """True if :meth:`together` would answer at once."""
        key = self._key(tasks[0], plan.places) if len(tasks) == 1 else self._group_key(tasks, plan)
        return key in self._estimates

    def group_bytes(self, tasks: Sequence[Task]) -> float:
        """Bytes of ``tasks`` as one group, one stack for every structure, computed from the steps of two.

        Grouping calls this for many sets of tasks, so it makes no dry run.
        """
        if len(tasks) == 1:
            return float(self.alone(tasks[0]).cost.total_bytes)
        stacks: dict[Hashable, list[Task]] = {}
        for task in tasks:
            stacks.setdefault(tuple(stack_key(task).items()), []).append(task)
        # A stack is as wide as its widest member: the others are padded.
        sizes = [(max(part, key=width), len(part)) for part in stacks.values()]
        key = frozenset((self._key(widest, self.placement(widest)), count) for widest, count in sizes)
        if key not in self._bytes:
            parts = [stacked(self.steps(widest, min(count, 2)).step, count) for widest, count in sizes]
            execution = Execution(stepped=tasks[0].sampled, **_trial_calls(tasks))
            self._bytes[key] = float(memory(one_after_another(parts), self.machine, None, execution).safe)
        return self._bytes[key]

    def compiling(self, estimate: Estimate, task: Task, plan: Plan) -> Compiling | None:
        """What Inductor would make of a group that ``plan`` describes; None if its own step had no dry run."""
        if not estimate.parameters:
            return None
        stats = self.stats(task)
        mode = _run_mode(estimate.program, task, plan, stats)
        return compiling(
            estimate.program, epoch_clocks(estimate.program, self.machine, self.calibration, stats, mode)[1]
        )

    def _estimate(self, steps: Steps, tasks: Sequence[Task], plan: Plan) -> Estimate:
        task, stats = tasks[0], self.stats(tasks[0])
        execution = Execution(plan.replay, steps.step.recordable, task.sampled, **_trial_calls(tasks))
        held = memory(steps.step, self.machine, steps.preparation, execution)
        mode = _run_mode(steps.step, task, plan, stats)
        cost = seconds(steps.step, self.machine, self.calibration, stats=stats, mode=mode)
        # On a CPU the whole process counts; on a GPU only what is on the device.
        process = base_bytes() + process_bytes(steps.step, steps.preparation) if self.machine.device == "cpu" else 0
        cost = replace(
            cost,
            peak_bytes=held.peak,
            reserved_bytes=held.reserved,
            total_bytes=held.safe,
            bytes=dict(held.kinds),
            process_bytes=process,
            training_bytes=held.training,
        )
        trained = cost if task.sampled else None
        if task.sampled:
            cost = with_batches(cost, task, stats, plan.places, self.machine)
        notes = steps.notes
        return Estimate(cost, held, steps.step, steps.parameters, steps.weights, trained=trained, notes=notes)

    # ---- Captured steps

    def steps(self, task: Task, tasks: int = 1, placement: DataPlacement | None = None) -> Steps:
        """The captured step of ``task`` alone, or stacked with its like; tasks that differ in numbers share one."""
        alike = [task.with_values(name=f"{task.label} {i}") for i in range(tasks)] if tasks > 1 else [task]
        plan = plan_as_one_group(alike, self.stats(task), self.machine.device)
        return self._captured(alike, replace(plan, placement=placement or self.placement(task)))

    def _captured(self, tasks: Sequence[Task], plan: Plan) -> Steps:
        """As an earlier process captured it, or captured now and kept for later ones."""
        key = self._capture_key(tasks, plan)
        if key in self._captures:
            return self._captures[key]
        keys, store = step_keys(tasks, self.stats(tasks[0]), plan, self._limits), step_store()
        steps = None if keys is None else store.read(keys[0], Steps.from_dict)
        if steps is not None:
            self.known_kernels.update(steps.kernels)
        else:
            steps = self.captured_now(tasks, plan)
            with suppress(OSError):  # a home that cannot be written to
                if keys is not None:
                    store.write(keys[0], steps.to_dict())
                if keys is not None and steps.kernels:
                    store.write(keys[1], steps.kernels)
        self._captures[key] = steps
        return steps

    def captured_now(self, tasks: Sequence[Task], plan: Plan) -> Steps:
        """The step of ``tasks`` by a dry run; a model that cannot be dry-run raises an InputError with the reason."""
        from weft.runtime.dry_run import capture  # a run that needs no dry run does without

        with assume_limits(self._limits), kernel_versions() as versions:
            try:
                graph = self._graphs.summary(tasks[0])
                captured = capture(tasks, graph, plan, merger_for(plan))
            except WeftError:
                raise
            except Exception as error:  # a user's module may raise anything
                first = tasks[0]
                raise SpecError(
                    f"task {first.label!r}: model {first.model_name} does not trace: {type(error).__name__}: {error}"
                ) from error
        launched = {version.digest: version for version in versions}
        self._versions |= launched
        self.known_kernels.update(launched)
        # A step scaled from a small graph has the shapes of that one.
        whole = captured.program.recordable
        weights, notes = (captured.run.weight_digests(), tuple(captured.run.notes)) if whole else ((), ())
        parameters = tuple(map(captured.run.num_parameters, range(len(captured.run.members))))
        return Steps(captured.program, captured.preparation, parameters, weights, tuple(launched), notes)

    def kernels(self, tasks: Sequence[Task], plan: Plan) -> tuple[str, ...]:
        """Digests of the versions of kernels that ``tasks`` launch as the group of ``plan``.

        They are known without a dry run if one was made of such tasks, whatever their number of epochs. A list that
        lacks one does no harm: launches compile what they lack.
        """
        if self._capture_key(tasks, plan) not in self._captures:
            keys = step_keys(tasks, self.stats(tasks[0]), plan, self._limits)
            listed = None if keys is None else step_store().read(keys[1], list)
            if listed is not None:
                return tuple(map(str, listed))
        return self._captured(tasks, plan).kernels

    def versions(self, tasks: Sequence[Task], plan: Plan) -> Mapping[str, KernelVersion]:
        """The same with the versions themselves, by digest."""
        if any(digest not in self._versions for digest in self.kernels(tasks, plan)):
            self.captured_now(tasks, plan)
        return self._versions

    # ---- Keys: equal for tasks and groups whose steps differ in numbers alone

    def _key(self, task: Task, placement: DataPlacement) -> Hashable:
        batches = group_key(task, self.stats(task).multilabel)
        numbers = (width(task), task.epochs, *switches(task))
        return (batches, placement, tuple(stack_key(task).items()), *numbers)

    def _group_key(self, tasks: Sequence[Task], plan: Plan) -> Hashable:
        key: list[Hashable] = [plan.join, plan.first_layer]
        for slots in plan.stack_members:  # narrower members are padded
            members = [tasks[slot] for slot in slots]
            widest, longest = max(members, key=width), max(task.epochs for task in members)
            kinds = tuple(sorted({switches(task) for task in members}))
            widths = len({width(task) for task in members})
            key.append((self._key(widest, plan.places), widths, kinds, longest, len(members)))
        return tuple(key)

    def _capture_key(self, tasks: Sequence[Task], plan: Plan) -> Hashable:
        return (self._group_key(tasks, plan), plan.replay, plan.row_order, plan.mode)


def _trial_calls(tasks: Sequence[Task]) -> dict[str, int]:
    """How often users' modules are called before the first epoch: one twice, several together once and each alone."""
    if all(task.traits is not None for task in tasks):
        return {}
    return {"tried": 2} if len(tasks) == 1 else {"tried": 1, "alone": True}


def _run_mode(program: Program, task: Task, plan: Plan, stats: GraphStats) -> RunMode:
    """How the step of a group will run, of which ``task`` is a member."""
    return RunMode(
        task.precision,
        plan.replay and program.recordable,
        plan.threads,
        task.eval_every,
        steps_per_epoch(task, stats),
        chunks(plan.places, stats),
        padding_share(task, stats),
        chunk_padding_share(plan.places, stats),
    )


def limits_for(machine: Machine) -> DeviceLimits | None:
    """What launches are chosen by on the machine planned for; None if it has no GPU or does not say.

    A machine does not say how much shared memory a block may have: that is taken to be an H200's.
    """
    if machine.device != "cuda" or not machine.sms or not machine.l2_bytes:
        return None
    return replace(H200, sms=machine.sms, l2_bytes=machine.l2_bytes)


def merger_for(plan: Plan) -> Any:
    """What merges the steps of a woven plan; None for every other plan, which does without ``weft.weave``."""
    if not plan.woven:
        return None
    from weft.weave.step import Weaver

    return Weaver(push=plan.join == "woven+push")


# ---- Choose which groups of a plan get a dry run, which takes time; extrapolate the others.
#
# Of up to :data:`MAX_TASKS_TO_DRY_RUN` tasks every group gets a dry run. Of more, the largest group of every kind comes
# first, then the others by size, until :data:`MAX_DRY_RUNS` members have been dry-run. The rest cost as much as a
# dry-run group of the same kind, scaled by the rule of thumb; none of them is close to the memory limit.

MAX_TASKS_TO_DRY_RUN = 1024  # with more tasks, some groups are extrapolated
MAX_DRY_RUNS = 384  # members of groups of so many: following more would make a plan of thousands take minutes
ATTEMPTS = 4  # at groups that fit
LESS = 0.99  # of the budget that would be right if memory were proportional to the members


@dataclass(frozen=True)
class RoughEstimate:
    """A group by rule of thumb: its kind, bytes and the most they may turn out to be, and seconds of an epoch."""

    tasks: Sequence[Task]
    plan: Plan
    kind: Hashable
    bytes: float
    most: float
    seconds: float

    @classmethod
    def of(cls, tasks: Sequence[Task], plan: Plan, estimator: Estimator) -> RoughEstimate:
        """By the sizes of its tasks, each as wide as the widest of its stack."""
        stats, device = estimator.stats(tasks[0]), estimator.machine.device
        rates = rates_of(device, estimator.machine, tasks[0].precision)
        kinds, seconds = set(), 0.0
        for slots in plan.stack_members:
            widest = max((tasks[slot] for slot in slots), key=lambda task: task.hidden)
            amount = work(widest, stats)
            seconds += amount.launches * rates.launch + len(slots) * amount.seconds(rates)
            heads = (widest.heads, widest.out_heads) if widest.traits is not None and widest.traits.has_heads else ()
            kinds.add((widest.model_name, widest.layers, *heads))
        rough = rule_memory(list(tasks), stats, device)
        most = RULE_SAFETY_FACTOR * rough + attention_bytes(list(tasks), stats)
        return cls(tasks, plan, (tasks[0].graph_name, frozenset(kinds)), rough, most, seconds)


def group_estimates(
    plans: Sequence[Plan], tasks: Mapping[str, Task], estimator: Estimator, room: int
) -> list[Estimate]:
    """The estimate of every group, in the order of ``plans``."""
    if len(tasks) <= MAX_TASKS_TO_DRY_RUN:
        return [estimator.together([tasks[name] for name in plan.members], plan) for plan in plans]
    groups = [RoughEstimate.of([tasks[name] for name in plan.members], plan, estimator) for plan in plans]
    by_size = sorted(range(len(groups)), key=lambda index: -groups[index].bytes)
    largest: dict[Hashable, int] = {}  # of every kind
    for index in by_size:
        largest.setdefault(groups[index].kind, index)
    estimates: dict[int, Estimate] = {}
    spent = 0
    for index in dict.fromkeys([*largest.values(), *by_size]):
        rough = groups[index]
        estimated = estimator.knows(rough.tasks, rough.plan)
        surely_fits = all(task.traits is not None for task in rough.tasks) and rough.most <= room
        if estimated or spent + len(rough.tasks) <= MAX_DRY_RUNS or not estimates or not surely_fits:
            estimates[index] = estimator.together(rough.tasks, rough.plan)
            spent += 0 if estimated else len(rough.tasks)
    return [
        estimates[index] if index in estimates else _extrapolated(rough, groups, estimates)
        for index, rough in enumerate(groups)
    ]


def _extrapolated(group: RoughEstimate, groups: Sequence[RoughEstimate], estimates: Mapping[int, Estimate]) -> Estimate:
    """The estimate of the nearest dry-run group of the same kind, or of all, scaled to the size of ``group``."""
    alike = [index for index in estimates if groups[index].kind == group.kind] or list(estimates)
    nearest = min(alike, key=lambda index: abs(groups[index].bytes - group.bytes))
    rough, estimate = groups[nearest], estimates[nearest]
    larger, longer, cost = group.bytes / rough.bytes, group.seconds / rough.seconds, estimate.cost
    scaled = {name: int(larger * getattr(cost, name)) for name in SIZES} | {
        name: {key: longer * value for key, value in getattr(cost, name).items()}
        for name in ("seconds", "families", "phases")
    }
    kinds = {key: int(larger * value) for key, value in cost.bytes.items()}
    note = f"extrapolated from group {nearest + 1} by size, without a dry run of its own: there are many groups"
    return replace(
        estimate,
        cost=replace(cost, **scaled, bytes=kinds, uncorrected={}),  # a calibration can learn nothing from it
        memory=replace(estimate.memory, alive=(), advice=(), timeline={}, phases=()),
        program=replace(estimate.program, note=note),
        parameters=(),
        weights=(),
        extrapolated=True,
    )


# ---- Find groups of tasks that fit into a budget.


def groups_within_budget(
    tasks: Sequence[Task], estimator: Estimator, room: int, weave: str | None
) -> list[tuple[Plan, Estimate]]:
    """Groups within ``room`` bytes and their estimates.

    They are made smaller if the dry run of a group takes more than grouping had predicted; a task that does not fit
    alone is a group all the same.
    """
    by_name, machine, budget = {task.label: task for task in tasks}, estimator.machine, room

    def bytes_of(some: Sequence[Task]) -> float:
        # Users' modules may fit by far, going by the bytes of each alone: a stack of them keeps to a few times that.
        if all(task.traits is None and not task.sampled for task in some):
            alone = sum(estimator.alone(task).cost.total_bytes for task in some)
            if RULE_SAFETY_FACTOR * alone <= budget:
                return 0.0  # dry runs of the groups that are made check it
        return estimator.group_bytes(some)

    for _ in range(ATTEMPTS):
        limits = {"machine": machine, "memory_of": bytes_of, "budget": budget, "weave": weave}
        plans = group(tasks, estimator.stats, machine.device, **limits)
        plans = [replace(plan, placement=estimator.placement(by_name[plan.members[0]])) for plan in plans]
        groups = list(zip(plans, group_estimates(plans, by_name, estimator, room), strict=True))
        totals = [estimate.cost.total_bytes for plan, estimate in groups if len(plan.members) > 1]
        if not totals or max(totals) <= room:
            break
        budget = int(budget * room / max(totals) * LESS)
    return groups
