"""Format a PlanReport as text: the verdict first, then its parts, then the reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.core.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from weft.planner.report.plan_report import GroupEstimate, PlanReport, TaskEstimate

WIDTH = 118
INDENT = " " * 10
MOST_TASKS = 12  # lines of the table of tasks
MOST_GROUPS = 12  # groups that are described
LONGEST = 60  # name of a task
BUDGET_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
MIN_SHARE = 0.02  # parts below this share are left out of a sentence
KINDS = {
    "graph": "graph",
    "input": "features",
    "weight": "weights",
    "state": "optimizer and best weights",
    "activation": "activations",
    "gradient": "gradients",
    "temporary": "temporaries",
    "constant": "constants",
    "batch": "batch",
    "queue": "queue of batches",
    "sampling": "sampling",
    "cache": "cache",
    "workspace": "workspaces",
    "rounding": "rounding",
    "setup": "set-up beyond the step",
    "prepared": "prepared batches",
}
FAMILY_WORDS = {
    "spmm": "aggregation",
    "attention": "attention",
    "scatter": "gather and scatter",
    "matmul": "products",
    "pointwise": "element-wise",
    "launch": "launches",
}


def explain(report: PlanReport) -> str:
    """The text that ``weft plan`` prints."""
    lines = [*_headline(report), "", *_tasks(report.tasks)]
    runs: dict[object, list[int]] = {}  # groups that differ in the names of their members alone
    for index, group in enumerate(report.groups):
        plan, cost = group.plan, group.cost
        key = (plan.join, len(plan.members), plan.stacks, group.epochs, cost.total_bytes, cost.epoch_seconds)
        runs.setdefault(key, []).append(index)
    largest = sorted(runs.values(), key=lambda alike: -report.groups[alike[0]].cost.total_bytes)[:MOST_GROUPS]
    for alike in runs.values():
        if alike in largest:
            lines += ["", *_group(alike, report)]
    rest = [report.groups[index] for alike in runs.values() if alike not in largest for index in alike]
    if rest:
        sizes = [group.cost.total_bytes for group in rest]
        span = f"{show_bytes(min(sizes))} to {show_bytes(max(sizes))}"
        seconds = show_seconds(sum(group.run_seconds for group in rest))
        count = _plural(sum(len(group.plan.members) for group in rest), "task")
        smaller = _plural(len(rest), "smaller group")
        lines += ["", f"... and {smaller} of {count}: {span} each, {seconds}; --json has them all"]
    if report.nearest:
        lines += ["", "nearest plan that fits"]
        lines += [line for suggestion in report.nearest for line in _wrapped("  - ", suggestion.words)]
    if report.notes:
        lines += ["", "notes", *(line for note in report.notes for line in _wrapped("  - ", note))]
    return "\n".join(lines)


def refusal(report: PlanReport) -> str:
    """Why a plan that does not fit is not run, in one sentence, and what would fit."""
    largest = max(report.groups, key=lambda group: group.cost.total_bytes)
    who = f"task {largest.plan.members[0]!r}"
    need = f"{show_bytes(largest.cost.total_bytes)} of {show_bytes(report.budget)}: does not fit"
    ways = [f"nearest plan that fits: {suggestion.words}" for suggestion in report.nearest[:1]]
    if largest.cost.total_bytes <= report.machine.memory_bytes:
        ways.append(would_do(largest.cost.total_bytes))
    return "; ".join([f"{who} needs {need}", *(ways or report.notes[-1:])])


def would_do(total_bytes: int) -> str:
    """The smallest budget for what takes ``total_bytes``, in words and as options take it."""
    unit, size = next((unit, size) for unit, size in BUDGET_UNITS if total_bytes >= 64 * size or size == 1)
    return f"a budget of {-(-total_bytes // size)}{unit} would do on this machine"


def _headline(report: PlanReport) -> list[str]:
    count = len(report.tasks)
    tasks = f"{count} tasks in {_plural(len(report.groups), 'group')}" if count > 1 else "1 task"
    verdict = "fits" if report.fits else "does not fit"
    # What a process on a CPU takes in all, which a budget does not count.
    most = max((group.cost.process_bytes for group in report.groups), default=0)
    process = [f"process   about {show_bytes(most)} resident, Python, torch and kernels included"] if most else []
    compiling = ""
    if report.compile_seconds:
        compiling = f", and {show_seconds(report.compile_seconds)} once to compile kernels (`weft warm` does it ahead)"
    return [
        f"{report.name}: {tasks} on {'; '.join(report.graphs)}",
        f"machine   {report.machine.name} ({'measured' if report.machine.measured else 'profile'})",
        f"memory    {show_bytes(report.peak_bytes)} of {show_bytes(report.budget)}: {verdict}",
        *process,
        f"time      {show_seconds(report.run_seconds)} for all epochs of all tasks{compiling}",
    ]


def _tasks(tasks: tuple[TaskEstimate, ...]) -> list[str]:
    """A line for every task, or for several that take the same in the same group."""
    alike: dict[object, list[TaskEstimate]] = {}
    for task in tasks:
        cost = (task.cost.total_bytes, task.cost.epoch_seconds) if task.cost is not None else task.name
        alike.setdefault((task.parameters, task.group, cost), []).append(task)
    rows = []
    for same in alike.values():
        name = same[0].name if len(same[0].name) <= LONGEST else same[0].name[: LONGEST - 3] + "..."
        rows.append((name if len(same) == 1 else f"{name} and {len(same) - 1} alike", same[0]))
    width = max(len(name) for name, _ in [*rows[:MOST_TASKS], ("task", None)])
    lines = [f"{'task':<{width}}  {'parameters':>10}  {'alone: peak':>11}  {'epoch':>8}  group"]
    for name, task in rows[:MOST_TASKS]:
        figures = f"{'-':>10}  {'-':>11}  {'-':>8}"
        if task.cost is not None and task.parameters is not None:
            seconds = show_seconds(task.cost.epoch_seconds)
            figures = f"{task.parameters:>10,}  {show_bytes(task.cost.peak_bytes):>11}  {seconds:>8}"
        lines.append(f"{name:<{width}}  {figures}  {task.group + 1}")
    rest = sum(len(same) for same in list(alike.values())[MOST_TASKS:])
    return [*lines, f"... and {rest} more"] if rest else lines


def _group(alike: list[int], report: PlanReport) -> list[str]:
    group = report.groups[alike[0]]
    plan, cost = group.plan, group.cost
    members = len(plan.members)
    heading = f"group {alike[0] + 1}"
    if len(alike) > 1:
        numbers = ", ".join(str(index + 1) for index in alike[:MOST_TASKS])
        heading = f"groups {numbers}{', ...' if len(alike) > MOST_TASKS else ''} ({len(alike)} alike, each)"
    each = f", {show_seconds(cost.epoch_seconds / members)} per task" if members > 1 else ""
    verdict = "" if group.fits else f" - does not fit into {show_bytes(report.budget)}"
    lines = [
        f"{heading}: {_plural(members, 'task')}, {plan.join}, on {plan.device}",
        f"  memory  {show_bytes(cost.total_bytes)} in all{verdict}",
        *_wrapped(INDENT, _memory(group, report)),
        *(f"{'          at the peak: ' if i == 0 else ' ' * 23}{value}" for i, value in enumerate(group.at_peak)),
        *(f"{'          to lower it: ' if i == 0 else ' ' * 23}{words}" for i, words in enumerate(group.advice[:2])),
        f"  epoch   {show_seconds(cost.epoch_seconds)}{each}; {group.epochs} epochs {show_seconds(group.run_seconds)}",
        *_wrapped(INDENT, _shares(cost.families, FAMILY_WORDS)),
        *_wrapped(INDENT, _shares(cost.phases, {})),
    ]
    lines += [line for reason in plan.why for line in _wrapped("  - ", reason)]
    if group.unknown:
        lines += _wrapped(
            "  - ", f"no cost is known for {', '.join(group.unknown)}: counted as one pass over its tensors"
        )
    return lines + (_wrapped("  - ", group.note) if group.note else [])


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head``, folded with its lines one below the other."""
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


def _memory(group: GroupEstimate, report: PlanReport) -> str:
    cost, machine = group.cost, report.machine
    parts = sorted(cost.bytes.items(), key=lambda part: -part[1])
    named = [
        f"{KINDS.get(kind, kind)} {show_bytes(size)}" for kind, size in parts if size >= MIN_SHARE * cost.peak_bytes
    ]
    beyond = max(cost.reserved_bytes - cost.peak_bytes, 0)
    fixed = machine.context_bytes + machine.workspace_bytes
    around = [f"CUDA and libraries {show_bytes(fixed)}"] if fixed else []
    if group.plan.mode == "sampled" and 0 < cost.training_bytes < (1.0 - MIN_SHARE) * cost.peak_bytes:
        around.insert(0, f"{show_bytes(cost.training_bytes)} without evaluations")
    if beyond >= MIN_SHARE * cost.peak_bytes:  # not part of the total: the allocator returns it when memory is short
        around.append(f"if there is room, the allocator keeps another {show_bytes(beyond)} idle")
    return f"tensors {show_bytes(cost.peak_bytes)}: {', '.join(named)}" + "".join(f"; {part}" for part in around)


def _shares(parts: Mapping[str, float], words: Mapping[str, str]) -> str:
    total = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shares = (f"{words.get(name, name)} {value / total:.0%}" for name, value in ordered if value >= MIN_SHARE * total)
    return ", ".join(shares)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
