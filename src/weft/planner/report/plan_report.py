"""PlanReport: a plan for a sweep on a machine, as data; ``str()`` of it is what is printed.

It is also what runs: ``weft.run(report)`` carries it out group by group, here or, through a file, in another process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, ClassVar

from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.event import finite
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plain_data import PlainData
from weft.core.plan import Plan, object_obstacle, read_task
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.core.version import __version__
from weft.planner.cost.inductor import whether_to_compile
from weft.planner.grouping.groups import plan_with_first
from weft.planner.report.plan_text import explain

FORMAT, VERSION = "weft plan", 1
NOT_EXECUTED = ("why", "cost", "measured")  # fields of a plan that say something, but do nothing


@dataclass(frozen=True)
class TaskEstimate(PlainData):
    """One task: what it would take alone, and in which group it trains (counted from 0).

    ``parameters`` and ``cost`` are None if not predicted: for thousands of tasks with many structures.
    """

    name: str
    model: str
    graph: str
    epochs: int
    parameters: int | None
    cost: Cost | None
    group: int


@dataclass(frozen=True)
class GroupEstimate(PlainData):
    """One group: its plan with the reason for every decision, and what it takes while it trains.

    ``timeline``: live bytes after every operator, by kind of value; ``phases`` the phase of each operator: for charts,
    and not part of the plain data. ``at_peak``: the largest things alive at the peak, in words; ``advice``: what would
    lower it. ``unknown``: operators without a known cost. ``extrapolated``: worked out by size from another group.
    """

    plan: Plan
    cost: Cost
    epochs: int
    fits: bool
    at_peak: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    note: str = ""
    timeline: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    phases: tuple[str, ...] = field(default=(), compare=False)
    extrapolated: bool = False

    @property
    def run_seconds(self) -> float:
        """Seconds of all epochs, set-up apart."""
        return self.epochs * self.cost.epoch_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "run_seconds": self.run_seconds}


@dataclass(frozen=True)
class Suggestion(PlainData):
    """The nearest plan that fits: what to change, as settings, and what it then takes."""

    changes: Mapping[str, Any]
    words: str
    cost: Cost
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanReport(PlainData):
    """Tasks, groups, what each takes on ``machine`` within ``budget`` bytes, and why.

    ``fits`` says whether every group does; where one does not, ``nearest`` names the nearest plan that would, if there
    is one. ``notes`` are remarks on how much to trust the figures. ``compile_seconds``: of compiling the kernels that
    this machine lacks, which is done once. ``work`` is what was planned, which makes the report executable:
    ``weft.run(report)``. ``options``: those it was planned with, which are not part of the plain data.
    """

    name: str
    machine: Machine
    budget: int
    tasks: tuple[TaskEstimate, ...]
    groups: tuple[GroupEstimate, ...]
    nearest: tuple[Suggestion, ...] = ()
    notes: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    work: Task | Sweep | None = None
    compile_seconds: float = 0.0
    options: RunOptions = field(default=RunOptions(), compare=False)

    in_file: ClassVar[str] = "a plan; `weft plan SPEC --out FILE` writes one"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every group, in the order in which they train."""
        return tuple(group.plan for group in self.groups)

    @property
    def fits(self) -> bool:
        """Whether every group keeps within the budget."""
        return all(group.fits for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """What the device must have: the largest group, everything counted. Groups train one after another."""
        return max(group.cost.total_bytes for group in self.groups)

    @property
    def run_seconds(self) -> float:
        """Seconds of all epochs of all groups, set-up apart."""
        return sum(group.run_seconds for group in self.groups)

    def __str__(self) -> str:
        return explain(self)

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, and the rest folded away."""
        headline, *rest = explain(self).splitlines()
        verdict = "fits" if self.fits else "does not fit"
        heading = f"<p><b>{escape(headline)}</b>: {verdict}</p>"
        return f"{heading}<details open><summary>plan</summary><pre>{escape(chr(10).join(rest))}</pre></details>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; graphs and models given as objects become descriptions of them."""
        work = None
        if self.work is not None:
            work = {"task" if isinstance(self.work, Task) else "sweep": self.work.to_dict()}
        figures = {"fits": self.fits, "peak_bytes": self.peak_bytes, "run_seconds": self.run_seconds}
        data = {"format": FORMAT, "version": VERSION, "weft": __version__, **figures, **super().to_dict(), "work": work}
        data["budget_bytes"] = data.pop("budget")
        return {**data, "digest": _digest(data)}

    def to_json(self) -> str:
        """The text of a plan file, which ``weft run FILE`` carries out; refuses what a file cannot hold."""
        for task in self.work_tasks:
            for key in ("graph", "model"):
                if not isinstance(getattr(task, key), str):
                    raise SpecError(object_obstacle(task.label, key, task.to_dict()[key]))
        return json.dumps(finite(self.to_dict()), indent=1, allow_nan=False) + "\n"

    @property
    def work_tasks(self) -> list[Task]:
        """The tasks that were planned, in their order."""
        if self.work is None:
            return []
        return [self.work] if isinstance(self.work, Task) else self.work.tasks()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanReport:
        """The inverse of :meth:`to_dict`; a :class:`SpecError` for what is no plan, or no longer the one written."""
        if data.get("format") != FORMAT:
            raise SpecError(f"not {cls.in_file}")
        if data.get("version") != VERSION:
            raise SpecError(
                f"a plan of version {data.get('version')!r}, but Weft {__version__} reads version {VERSION}; plan again"
            )
        try:
            work = data["work"]
            if work is not None:
                work = read_task(work["task"]) if "task" in work else Sweep.from_dict(work["sweep"])
            report = super().from_dict({**data, "budget": data["budget_bytes"], "work": work})
            changed = data["digest"] != _digest(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise SpecError(f"a damaged plan ({type(error).__name__}: {error}); plan again") from None
        if changed:
            raise SpecError("settings or groups were changed after it was planned; plan again with those settings")
        _check_members(report)
        return report


def _digest(data: Mapping[str, Any]) -> str:
    """A digest of what a plan would do: the work, and the groups without their descriptions."""
    plans = [group["plan"] for group in data["groups"]]
    executed = [{key: value for key, value in plan.items() if key not in NOT_EXECUTED} for plan in plans]
    text = json.dumps(finite([data["work"], executed]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_members(report: PlanReport) -> None:
    """A sweep is expanded again when a plan is read: its members have to be those that the groups were made for."""
    if report.work is None:
        return
    expanded = {task.label: task for task in report.work_tasks}
    planned = {task.label: task for plan in report.plans for task in plan.tasks}
    if expanded.keys() != planned.keys():
        name = sorted(expanded.keys() ^ planned.keys())[0]
        raise SpecError(f"task {name!r} is not in both the sweep and its groups; plan again")
    for name, task in planned.items():
        now = expanded[name].to_dict()
        for key, value in task.to_dict().items():
            if now[key] != value:
                raise SpecError(
                    f"task {name!r} was planned with {key}={value!r}, but has {key}={now[key]!r}; plan again"
                )


# ---- The plan of one group, from a scheduler to a worker


def group_plan(
    tasks: Sequence[Task],
    stats: GraphStats,
    alone: Plan,
    total_bytes: int,
    machine: Machine,
    options: RunOptions = RunOptions(),  # noqa: B008
) -> Plan:
    """The plan of the first of ``tasks`` and of those that share its group, as a run with ``options`` groups them.

    ``alone`` is the plan of the first by itself. The plan is executable elsewhere. The cost of a group of several is
    not predicted beyond ``total_bytes``, which admission has set aside for it.
    """
    if len(tasks) == 1:
        return replace(alone, members=(tasks[0].label,), tasks=tuple(tasks), graph=stats.fingerprint())
    made = plan_with_first(tasks, stats, alone.device, machine, weave=options.weave)
    compiled, _ = whether_to_compile(options.compile, None, 0, made.device, made.join)
    stacked = len(made.stack_members) == 1
    return replace(
        made,
        tasks=tuple(task for task in tasks if task.label in made.members),
        graph=stats.fingerprint(),
        cost={"total_bytes": total_bytes},
        compiled=compiled and alone.mode == "full",
        placement=alone.placement,
        division=alone.division if stacked else None,
        phases=alone.phases if stacked else {},
    )


def report_to_run(data: Mapping[str, Any], machine: Machine) -> PlanReport:
    """The report that ``weft.run`` carries out, from the plan of one group as plain data."""
    plan = Plan.from_dict(data)
    work: Task | Sweep = plan.tasks[0] if len(plan.tasks) == 1 else Sweep.from_tasks(plan.tasks)
    epochs = max(task.epochs for task in plan.tasks)
    group = GroupEstimate(plan, Cost.from_dict(plan.cost), epochs, fits=True)
    return PlanReport(work.label, machine, machine.memory_bytes, (), (group,), work=work)


# ---- The nearest change that makes a task fit
#
# Tried in this order: lower precision (if the machine has units for it), narrower layers, both. Fewer tasks in a group
# is not among them: groups are cut to the budget before suggestions are made (``weft.planner.grouping.groups``).

CostOf = Callable[[Task], Cost]


def nearest(task: Task, cost_of: CostOf, budget: int, bf16: bool = True) -> Suggestion | None:
    """The smallest change of ``task`` that fits into ``budget`` bytes, None if none of those tried does."""
    for changes in candidates(task, bf16):
        cost = cost_of(task.with_values(**changes))
        if cost.total_bytes <= budget:
            sets = [f"--set {'model' if key == 'hidden' else 'train'}.{key}={v}" for key, v in changes.items()]
            settings = " and ".join(f"{key}={value!r}" for key, value in changes.items())
            takes = f"takes {show_bytes(cost.total_bytes)} ({' '.join(sets)})"
            return Suggestion(dict(changes), f"task {task.label!r} with {settings} {takes}", cost, (task.label,))
    return None


def candidates(task: Task, bf16: bool = True) -> list[dict[str, Any]]:
    """Changes to try, the least first: bf16 if the machine has it, then narrower layers, then both."""
    lower: list[dict[str, Any]] = [{"precision": "bf16"}] if bf16 and task.precision != "bf16" else []
    widths: list[int] = []
    if task.traits is not None and task.layers > 1:  # else ``hidden`` does not shape the model
        step, width = task.heads if task.traits.has_heads else 1, task.hidden // 2
        while width >= max(step, 4):
            widths.append(width // step * step)
            width //= 2
    narrower: list[dict[str, Any]] = [{"hidden": width} for width in dict.fromkeys(widths)]
    return [*lower, *narrower, *({**low, **narrow} for low in lower for narrow in narrower)]


def roomy_machines(total_bytes: int, machines: Iterable[Machine], here: Machine) -> list[str]:
    """Names of the GPUs that have the memory for it as it is, smallest first."""
    fixed = here.context_bytes + here.workspace_bytes
    able = [
        machine
        for machine in machines
        if machine.device == "cuda"
        and machine.name != here.name
        and total_bytes - fixed + machine.context_bytes + machine.workspace_bytes <= machine.memory_bytes
    ]
    return [machine.name for machine in sorted(able, key=lambda machine: machine.memory_bytes)]
