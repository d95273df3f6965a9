"""Stacks for the trials of a tuner: one per structure that the space of a sweep has, planned before the first trial.

A stack is as wide as its widest trial and has every part of a step that one of its trials may have. Trials then differ
in numbers alone, which a row of a stack takes without another step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.compatibility import MEMBER_NUMBERS, padding_obstacle, stack_key, width
from weft.core.errors import SpecError
from weft.core.models import traits_of
from weft.core.run_options import MAX_MEMBERS
from weft.core.search_space import Choice, Range
from weft.core.settings import ARGS, identity
from weft.core.sweep import Sweep
from weft.core.task import SAMPLING_SETTINGS, Task, model_settings, name_of, rules
from weft.planner.grouping.limits import GroupLimits
from weft.planner.grouping.stacks import padded

MOST_KINDS = 20_000  # combinations of structures and widths: a task of each takes about 50 us to check
STEPS = 255  # of a range of whole numbers: so many of its values are planned for
# What all trials have in common: they share a graph and its treatment, and what a row does not keep as a number.
COMMON = ("graph", "feature_norm", "precision", "objective", "metric", "split", "mode", "callbacks", *SAMPLING_SETTINGS)
SWITCHES = ("weight_decay", "dropout", "input_dropout", "attention_dropout", "label_smoothing")


@dataclass(frozen=True)
class TrialStack:
    """Trials of one structure, ``widest`` and with every number at its most; ``why`` it is a stack of its own."""

    key: Hashable
    widest: Task
    why: tuple[str, ...] = ()


def check_tunable(sweep: Sweep) -> list[Task]:
    """The kinds of trials that ``sweep`` has, one task each; a :class:`SpecError` for a sweep that cannot be tuned."""
    start = f"{f'sweep {sweep.name!r}' if sweep.name else 'sweep'}: "
    if sweep.samples is not None:
        raise SpecError(f"{start}samples={sweep.samples} draws members in advance; a tuner takes trials= instead")
    varying = {name for branch in sweep.space().branches for name in (*branch.fixed, *branch.varying)}
    for name in COMMON:
        if name in varying:
            raise SpecError(f"{start}{name} varies, and the trials of a tuner have it in common; give one value")
    tasks = list(_kinds(sweep, start))
    if len({task.has_own("optimizer") for task in tasks}) > 1:
        raise SpecError(f"{start}optimizers of torch and Weft's own do not go together with a tuner; give one kind")
    settings = {name for each in (sweep.settings, *sweep.explicit) for name in each}
    for name in settings.intersection(rules()):
        if name != "name" and not any(name in task.given for task in tasks):
            raise SpecError(f"{start}{name} has no effect: {tasks[0].why_ignored(name)}")
    for task in tasks:
        if task.callbacks:
            raise SpecError(f"{start}callbacks= do not go with a tuner: a row of a stack cannot begin anew with them")
        if task.sampled:
            raise SpecError(
                f"{start}sampled batches do not go with a tuner: trials begin at different epochs, and batches belong "
                "to an epoch; train with mode='full'"
            )
        if task.split == "all":
            raise SpecError(f"{start}split='all' does not go with a tuner: trials have one split in common")
    return tasks


def one_of_each(tasks: Sequence[Task]) -> list[Task]:
    """The first of ``tasks`` of every structure."""
    first: dict[Hashable, Task] = {}
    for task in tasks:
        first.setdefault(_structure(task), task)
    return list(first.values())


def trial_stacks(tasks: Sequence[Task], limits: GroupLimits, together: bool = False) -> list[TrialStack]:
    """The stacks for kinds of trials (:func:`check_tunable`): widths share one where padding is exact and pays.

    ``together``: where it is exact.
    """
    kinds: dict[Hashable, dict[int, Task]] = {}
    for task in tasks:
        kinds.setdefault(_structure(task), {}).setdefault(width(task), task)
    stacks = []
    for key, by_width in kinds.items():
        alike = list(by_width.values())
        every = list(range(len(alike)))
        all_in_one = together and padding_obstacle(alike[0]) is None
        for positions, why in [(every, [])] if all_in_one else padded(alike, every, limits):
            widest = max((alike[position] for position in positions), key=width)
            stacks.append(TrialStack(key, widest, tuple(why)))
    return sorted(stacks, key=lambda stack: width(stack.widest))


def each_kind(tasks: Sequence[Task]) -> list[TrialStack]:
    """A stack for every kind of trial, narrow ones first: :func:`stack_for` then finds the kind of a trial."""
    return sorted((TrialStack(_structure(task), task) for task in tasks), key=lambda stack: width(stack.widest))


def stack_for(task: Task, stacks: Sequence[TrialStack]) -> int:
    """The narrowest of ``stacks`` that ``task`` fits into; a :class:`SpecError` if there is none."""
    key = _structure(task)
    for index, stack in enumerate(stacks):
        has_all = all(getattr(stack.widest, name) or not getattr(task, name) for name in SWITCHES)
        if stack.key == key and width(stack.widest) >= width(task) and has_all and stack.widest.epochs >= task.epochs:
            return index
    raise SpecError(
        f"task {task.label!r}: the tuner chose settings that are not in the space of the sweep, which was planned for"
    )


def _structure(task: Task) -> Hashable:
    """Equal for tasks that can train in rows of one stack, one after another."""
    key: dict[str, Any] = {**stack_key(task), "decay": task.decay, "padded": padding_obstacle(task) is None}
    names = ("class_weights", "huber_delta", "plateau", "param_groups")  # a stack has tables of them
    return tuple(key.items()), *(identity(getattr(task, name)) for name in names)


def _kinds(sweep: Sweep, start: str) -> Iterator[Task]:
    """A task for every combination of structures and widths that is possible."""
    space, error, count = sweep.space(), None, 0
    built_with = model_settings()  # and ``model_args``, where a model is the user's own
    for branch in space.branches:
        of_branch = {**sweep.settings, **branch.fixed, **branch.varying}["model"]
        models = of_branch.values if isinstance(of_branch, Choice) else [of_branch]
        own = next((name_of(model) for model in models if traits_of(model) is None), None)
        values = {}
        for name, source in branch.varying.items():
            given = own is not None and (name in built_with or name.startswith(ARGS))
            shown = f"{start}{name}={source} is given to {own}" if given else ""
            values[name] = _planned(name, source, name in space.whole, shown)
        combinations = math.prod(map(len, values.values()))
        if combinations > MOST_KINDS:
            raise SpecError(
                f"{start}{combinations:,} combinations of structures and widths are more than {MOST_KINDS:,}; each "
                "structure has a stack of its own: give fewer values"
            )
        for chosen in itertools.product(*values.values()):
            try:
                yield sweep.trial({**branch.fixed, **dict(zip(values, chosen, strict=True))}, f"kind {count}")
                count += 1
            except SpecError as reason:
                error = reason
    if not count and error is not None:
        raise error


def _planned(name: str, source: Range | Choice, whole: bool, shown: str) -> list[Any]:
    """The values of a setting that are planned for: of a number one of every kind, else all.

    ``shown``: what an error says of a setting that a model of the user's own is built with, empty for others.
    """
    if shown:
        values = list(source.values) if isinstance(source, Choice) else source.listed(whole, MAX_MEMBERS)
        if not values:
            raise SpecError(f"{shown}, and each value has a stack of its own: give a list of values, or a step")
        return values
    if isinstance(source, Choice):
        values = list(source.values)
    else:
        shares = [step / STEPS for step in range(STEPS)] if whole and name not in MEMBER_NUMBERS else [0.0]
        values = list(dict.fromkeys(source.at(share, whole) for share in (*shares, 1.0)))
    if name not in MEMBER_NUMBERS:
        return values
    kinds: dict[Hashable, Any] = {}
    for value in values:
        kind = identity(_kind(name, value))
        numbers = isinstance(value, (int, float)) and isinstance(kinds.get(kind), (int, float))
        most = max if name in (*SWITCHES, "epochs") else min  # warmup=9 does not go with epochs=9
        kinds[kind] = most(value, kinds[kind]) if numbers else kinds.get(kind, value)
    return list(kinds.values())


def _kind(name: str, value: Any) -> Any:
    """Equal for values of a setting with which a step has the same parts."""
    kinds = {"optimizer": value, "schedule": value == "plateau", "input_dropout": bool(value)}
    if name == "accumulate":
        return isinstance(value, int) and value > 1
    return kinds.get(name, value is None)
