"""Estimator: predict memory and time of groups with one dry run per structure."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.compatibility import group_key, stack_key, width
from weft.core.cost import SIZES, Cost
from weft.core.errors import SpecError, WeftError
from weft.core.files import write_bytes
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.models import BUILT_IN
from weft.core.placement import Placement, on_device
from weft.core.plan import Plan, PlanOptions
from weft.core.program import Program
from weft.core.task import OWN_FUNCTIONS, Task
from weft.core.units import show_bytes
from weft.engine.graphs import Graphs
from weft.engine.home import STEPS, home
from weft.engine.kernel_store import code_digest
from weft.engine.memory import base_bytes
from weft.engine.merger import merger_for
from weft.graph.graph import Graph
from weft.ops.launch.backend import H200, DeviceLimits, assume_limits
from weft.ops.launch.hooks import KernelVersion, kernel_versions
from weft.planner.cost.calibration import Calibration
from weft.planner.cost.inductor import Compiling, compiling, whether_to_compile
from weft.planner.cost.memory import Memory, memory, process_bytes
from weft.planner.cost.program_scaling import one_after_another, stacked
from weft.planner.cost.roofline import OperatorSeconds, RunMode, seconds
from weft.planner.cost.rule import attention_bytes, rates_of, rule_memory, work
from weft.planner.grouping.groups import group, plan_as_one_group
from weft.planner.grouping.limits import SURELY, Throughput
from weft.planner.placement import chunk_filled, chunks, filled, reasons, steps_per_epoch, with_cache
from weft.planner.transfers import with_batches

# ---- Remember captured steps per graph and structure under ``$WEFT_HOME/steps``, so that a dry run is made once.
#
# A step is found again if its graph's summary, the structure of its tasks, the plan and the kind of device are the
# same,
# and Weft's code and torch are those that captured it. Only built-in models are kept: a user's may change meanwhile.
#
# The kernels that a step launches are kept beside it, in a file of their own that serves any number of epochs: the
# step
# has histories as long as the training, but no version of a kernel depends on that. A training that is as long as none
# before thus needs no dry run to know its kernels.

STEP, KERNELS = ".json.gz", ".kernels.json"  # how names of files end
MOST_FILES = 1024  # of each kind, about 20 KB for a step; the oldest go
SPARE_FILES = 64  # beyond that, before some go: files are dated once in so many writes, else only counted
PLAN_FIELDS = ("join", "device", "replay", "first_layer", "row_order", "mode", "stacks", "places", "division")


@dataclass(frozen=True)
class Steps:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Steps:
        """The inverse of :meth:`to_dict`."""
        programs = Program.from_dict(data["step"]), Program.from_dict(data["preparation"])
        return cls(*programs, tuple(data["parameters"]), tuple(data["weights"]), tuple(data["kernels"]))


def remembered(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Steps | None:
    """The step of ``tasks`` as an earlier dry run captured it; None if there was none, or it cannot be read."""
    if not _may_be_kept(tasks):
        return None
    path = _step_path(tasks, stats, plan, limits)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=8)
def _read(path: Path, written: int) -> Steps:  # a run asks twice, and another of the same kind again
    return Steps.from_dict(json.loads(gzip.decompress(path.read_bytes())))


def remembered_kernels(
    tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None
) -> tuple[str, ...] | None:
    """Digests of the kernels that ``tasks`` launch, by an earlier dry run with any number of epochs; None if not known.

    A list that lacked one would do no harm: launches compile what they lack.
    """
    if not _may_be_kept(tasks):
        return None
    try:
        found = json.loads(_kernels_path(tasks, stats, plan, limits).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tuple(map(str, found)) if isinstance(found, list) else None


def remember(steps: Steps, tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> None:
    """Keep the step for later plans, and the list of its kernels; a failure to do so is ignored."""
    if not _may_be_kept(tasks):
        return
    _keep(_step_path(tasks, stats, plan, limits), gzip.compress(json.dumps(steps.to_dict()).encode(), 1))
    if steps.kernels:
        _keep(_kernels_path(tasks, stats, plan, limits), json.dumps(steps.kernels).encode())


def _may_be_kept(tasks: Sequence[Task]) -> bool:
    """Whether all models are built in and no function is the user's own: those may change under one name."""
    named = all(task.traits is not None and task.traits is BUILT_IN.get(task.model_name) for task in tasks)
    own = any(task.has_own(name) for task in tasks for name in OWN_FUNCTIONS)
    return named and not own and not any(task.model_args for task in tasks)


def _keep(path: Path, data: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
        _forget_oldest(path)


def _step_path(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Path:
    epochs = [task.epochs for task in tasks]
    return home() / STEPS / f"{_digest(tasks, stats, plan, limits, epochs)}{STEP}"


def _kernels_path(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Path:
    # Launches that are merged into one have a version of their own for lengths that are divisible by 16.
    epochs = [task.epochs for task in tasks] if plan.join == "woven" else []
    return home() / STEPS / f"{_digest(tasks, stats, plan, limits, epochs)}{KERNELS}"


def _digest(
    tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None, epochs: Sequence[int]
) -> str:
    about = {
        "code": code_digest(),
        "graph": stats.fingerprint().digest,
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "limits": None if limits is None else asdict(limits),
        "tasks": [_structure(task, stats) for task in tasks],
        "epochs": epochs,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _structure(task: Task, stats: GraphStats) -> list[Any]:
    """Equal for tasks whose steps differ in numbers alone, and in the length of their histories."""
    treatment = group_key(task, stats.multilabel)[1:]  # the graph itself is there by its summary
    return [treatment, sorted(stack_key(task).items()), width(task), switches(task)]


def switches(task: Task) -> tuple[bool, ...]:
    """Numbers that leave operators out when they are zero."""
    attention = task.dropout if task.attention_dropout is None else task.attention_dropout
    return (task.dropout > 0, attention > 0, task.weight_decay > 0, task.label_smoothing > 0, task.patience is None)


def _forget_oldest(new: Path) -> None:
    """Remove the oldest files of the kind of ``new``, once there are clearly too many of them."""
    folder, ending = new.parent, new.name[new.name.index(".") :]
    alike = [folder / name for name in os.listdir(folder) if name.endswith(ending)]
    if len(alike) <= MOST_FILES + SPARE_FILES:
        return
    for path in sorted(alike, key=lambda path: path.stat().st_mtime, reverse=True)[MOST_FILES:]:
        path.unlink(missing_ok=True)


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
    from weft.runtime.group import weight_digests

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


# ---- Choose which groups of a plan get a dry run; extrapolate the others: a dry run takes time.
#
# Of up to :data:`MAX_TASKS_TO_DRY_RUN` tasks every group gets a dry run. Of more, the largest group of every kind
# comes
# first, then the others by size, until :data:`MAX_DRY_RUNS` members have been dry-run. The cost of the rest is that
# of a
# dry-run group of the same kind, scaled by the rule of thumb; none of them is close to the memory limit.

if TYPE_CHECKING:
    pass

MAX_TASKS_TO_DRY_RUN = 1024  # with more tasks, some groups are extrapolated
MAX_DRY_RUNS = 384  # members of groups of so many: following more would make a plan of thousands take minutes
MAX_SOLO_DRY_RUNS = 12  # tasks of different structures that get a dry run alone, of so many


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
            one = work(widest, stats)
            seconds += one.launches * rates.launch + len(slots) * one.seconds(rates)
            heads = (widest.heads, widest.out_heads) if widest.traits is not None and widest.traits.has_heads else ()
            kinds.add((widest.model_name, widest.layers, *heads))
        rough = rule_memory(list(tasks), stats, device)
        most = SURELY * rough + attention_bytes(list(tasks), stats)
        return cls(tasks, plan, (tasks[0].graph_name, frozenset(kinds)), rough, most, seconds)


def group_estimates(
    plans: Sequence[Plan], tasks: Mapping[str, Task], estimator: Estimator, room: int
) -> list[Estimate]:
    """What every group takes, in the order of ``plans``."""
    groups = [RoughEstimate.of([tasks[name] for name in plan.members], plan, estimator) for plan in plans]
    found: dict[int, Estimate] = {}
    spent, most = 0, MAX_DRY_RUNS if len(tasks) > MAX_TASKS_TO_DRY_RUN else len(tasks)
    for place in _in_order(groups):
        one = groups[place]
        known = estimator.knows(one.tasks, one.plan)
        if known or spent + len(one.tasks) <= most or not found or not _surely_fits(one, room):
            found[place] = estimator.together(one.tasks, one.plan)
            spent += 0 if known else len(one.tasks)
    return [found[i] if i in found else _compared(one, groups, found) for i, one in enumerate(groups)]


def _in_order(groups: Sequence[RoughEstimate]) -> list[int]:
    """The largest of every kind, then the others, large ones first."""
    by_size = sorted(range(len(groups)), key=lambda place: -groups[place].bytes)
    first: dict[Hashable, int] = {}
    for place in by_size:
        first.setdefault(groups[place].kind, place)
    leading = set(first.values())
    return [*first.values(), *(place for place in by_size if place not in leading)]


def _surely_fits(group: RoughEstimate, room: int) -> bool:
    return all(task.traits is not None for task in group.tasks) and group.most <= room


def _compared(group: RoughEstimate, groups: Sequence[RoughEstimate], found: Mapping[int, Estimate]) -> Estimate:
    """The estimate of a dry-run group, made as large as ``group`` is: the nearest of its kind, or of all."""
    alike = [place for place in found if groups[place].kind == group.kind] or list(found)
    place = min(alike, key=lambda place: abs(groups[place].bytes - group.bytes))
    other, estimate = groups[place], found[place]
    note = f"extrapolated from group {place + 1} by size, without a dry run of its own: there are many groups"
    return replace(
        estimate,
        cost=_scaled(estimate.cost, group.bytes / other.bytes, group.seconds / other.seconds),
        memory=replace(estimate.memory, alive=(), advice=(), timeline={}, phases=()),
        program=replace(estimate.program, note=note),
        parameters=(),
        weights=(),
        extrapolated=True,
    )


def _scaled(cost: Cost, larger: float, longer: float) -> Cost:
    """A cost with other bytes and seconds; nothing that a calibration could learn from."""
    sizes = {name: int(larger * getattr(cost, name)) for name in SIZES}
    times = {
        name: {key: longer * value for key, value in getattr(cost, name).items()}
        for name in ("seconds", "families", "phases")
    }
    kinds = {key: int(larger * value) for key, value in cost.bytes.items()}
    return replace(cost, **sizes, **times, bytes=kinds, uncorrected={})


def alone_estimates(tasks: Sequence[Task], estimator: Estimator) -> list[Estimate | None]:
    """What every task takes by itself; of very many, None beyond the first :data:`MAX_SOLO_DRY_RUNS` structures."""
    left = MAX_SOLO_DRY_RUNS if len(tasks) > MAX_TASKS_TO_DRY_RUN else len(tasks)
    found: list[Estimate | None] = []
    for task in tasks:
        known = estimator.knows([task])
        left -= not known
        found.append(estimator.alone(task) if known or left >= 0 else None)
    return found


# ---- Find groups of tasks that fit into a budget, by what an estimator says of them.

ATTEMPTS = 4  # at groups that fit
LESS = 0.99  # of the budget that would be right if memory were proportional to the members


def groups_within_budget(
    tasks: Sequence[Task], estimator: Estimator, room: int, throughput: Throughput, plan_options: PlanOptions = NONE
) -> list[tuple[Plan, Estimate]]:
    """Groups within ``room`` bytes and what they take, which is also their ``cost``.

    They are made smaller if the dry run of a group takes more than grouping had predicted; a task that does not fit
    alone is a group all the same.
    """
    left, by_name = room - (plan_options.cache or 0), {task.label: task for task in tasks}
    budget = left
    for _ in range(ATTEMPTS):
        plans = grouped(tasks, estimator, budget, throughput, plan_options.weave)
        found = list(zip(plans, group_estimates(plans, by_name, estimator, left), strict=True))
        over = [one.cost.total_bytes for plan, one in found if one.cost.total_bytes > left and len(plan.members) > 1]
        if not over:
            break
        budget = int(budget * left / max(over) * LESS)
    cached = [cached_group(plan, estimate, by_name, estimator, room, plan_options) for plan, estimate in found]
    return [(_decided(plan, estimate, by_name, estimator, plan_options), estimate) for plan, estimate in cached]


def cached_group(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, room: int, options: PlanOptions
) -> tuple[Plan, Estimate]:
    """A sampled group with its cache, in what is left of ``room``, and the reasons for where its things lie."""
    task, machine = tasks[plan.members[0]], estimator.machine
    if not task.sampled:
        return plan, estimate
    stats, before = estimator.stats(task), plan.places
    left = room - estimate.cost.total_bytes
    placement = with_cache(before, task, stats, options, left)
    if placement != before:
        estimate = replace(estimate, cost=_with_placement(estimate, task, placement, estimator))
    plan = replace(plan, placement=placement, why=(*plan.why, *reasons(placement, task, stats, machine)))
    return plan, estimate


def _with_placement(estimate: Estimate, task: Task, placement: Placement, estimator: Estimator) -> Cost:
    """The cost with the bytes and the gain of a cache, of which the dry run knew nothing."""
    cost, stats = estimate.cost, estimator.stats(task)
    if estimate.trained is not None:
        times = {name: getattr(estimate.trained, name) for name in ("seconds", "families", "phases", "uncorrected")}
        cost = with_batches(replace(cost, **times), task, stats, placement, estimator.machine)
    taken = placement.cache_bytes
    sizes = {name: getattr(cost, name) + taken for name in SIZES}
    return replace(cost, **sizes, bytes={**cost.bytes, "cache": taken} if taken else cost.bytes)


def _decided(
    plan: Plan, estimate: Estimate, tasks: Mapping[str, Task], estimator: Estimator, plan_options: PlanOptions
) -> Plan:
    """The plan with its cost, and with what that says of compiling it."""
    epochs = max(tasks[name].epochs for name in plan.members)
    found = estimator.compiling(estimate, tasks[plan.members[0]], plan)
    compiled, why = whether_to_compile(plan_options.compile, found, epochs, plan.device, plan.join)
    if plan.mode == "sampled":
        compiled, why = (
            False,
            ("not compiled: Inductor is for steps on the whole graph",) if plan_options.compile else (),
        )
    decisions = {"compiled": compiled, "why": (*plan.why, *estimate.notes, *why)}
    return replace(plan, cost=estimate.cost.to_dict(), weights=estimate.weights, **decisions)


def grouped(
    tasks: Sequence[Task], estimator: Estimator, budget: int, throughput: Throughput, weave: bool | None = None
) -> list[Plan]:
    """Groups by what the estimator says of their memory."""
    machine, by_name = estimator.machine, {task.label: task for task in tasks}

    def bytes_of(some: Sequence[Task]) -> float:
        return 0.0 if estimator.surely_fit(some, budget) else estimator.group_bytes(some)

    plans = group(
        tasks,
        estimator.stats,
        machine.device,
        machine=machine,
        memory_of=bytes_of,
        throughput=throughput,
        budget=budget,
        weave=weave,
    )
    return [estimator.placed(plan, by_name[plan.members[0]]) for plan in plans]
