"""All combinations of a sweep's settings as Tasks: the grid, the draws, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings.grid.member_names import Combination, member_names
from weft.core.settings.grid.values import distinct, frozen, is_grid, joined_args, seed_last, with_args_apart
from weft.core.settings.search_space import Choice, Range
from weft.core.settings.value_names import identity
from weft.core.task import LOOP_SETTINGS, OPTIMIZER_SETTINGS, Task, model_settings, reject_unknown, rules

MOST_TASKS = 10_000  # more are a slip of the keyboard: seven lists of four values are 16,384
REDRAWS = 50  # attempts at a combination that was not drawn before


@dataclass(frozen=True)
class Written:
    """A sweep as it was written: its settings, the entries of ``tasks``, and how often ranges are drawn from."""

    settings: Mapping[str, Any]
    explicit: tuple[Mapping[str, Any], ...]
    samples: int | None
    sample_seed: int
    label: str


def overrides(entries: Any, label: str) -> Iterator[dict[str, Any]]:
    """The entries of ``tasks``, checked and frozen."""
    if isinstance(entries, (Mapping, str)):
        raise SpecError(f"{label}: tasks={entries!r} must be a list of dicts, such as tasks=[{{'hidden': 16}}]")
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise SpecError(f"{label}: tasks has {entry!r}; expected a dict of settings, such as {{'hidden': 16}}")
        reject_unknown(entry, f"{label}, entry of tasks")
        yield frozen(entry)


def members_of(sweep: Written) -> list[Task]:
    """The members of a sweep, named by what varies; combinations that make no sense are refused."""
    combinations = _combinations(sweep)
    names = member_names(sweep.explicit, combinations)
    tasks = []
    for name, (_, values) in zip(names, combinations, strict=True):
        tasks.append(Task(**joined_args({**values, "name": name})))
    _refuse_twins(tasks, sweep.label)
    return _without_ignored(tasks)


def _without_ignored(tasks: list[Task]) -> list[Task]:
    """Tasks without the settings that all of them have but only some read: ``model=["gcn", "gat"], heads=4``.

    What varies stays where it is, and is refused when the sweep is run: it would seem to have been tried.
    """
    for name in (*model_settings(), *OPTIMIZER_SETTINGS, *LOOP_SETTINGS):
        ignored = [task.ignores(name) and name in task.given for task in tasks]
        if any(ignored) and not all(ignored) and distinct(getattr(task, name) for task in tasks) == 1:
            pairs = zip(tasks, ignored, strict=True)
            tasks = [_without(task, name) if ignores else task for task, ignores in pairs]
    return tasks


def _without(task: Task, name: str) -> Task:
    return Task(**{key: getattr(task, key) for key in task.given if key != name})


def _combinations(sweep: Written) -> list[Combination]:
    """All combinations: the entry of ``tasks`` each belongs to, and its settings."""
    label = sweep.label
    found: list[Combination] = []
    drawn_anywhere = False
    for position, entry in enumerate(sweep.explicit or ({},)):
        merged = seed_last({**with_args_apart(sweep.settings), **with_args_apart(entry)})
        grid = {key: list(value) for key, value in merged.items() if is_grid(key, value)}
        for key, values in grid.items():
            _check_grid(key, values, label)
        drawn = {key: value for key, value in merged.items() if isinstance(value, (Range, Choice))}
        drawn_anywhere = drawn_anywhere or bool(drawn)
        draws = _draws(sweep, drawn)
        _refuse_too_many(len(found), [len(draws), *map(len, grid.values())], label)
        for draw, *values in itertools.product(draws, *grid.values()):
            found.append((position, {**merged, **draw, **dict(zip(grid, values, strict=True))}))
    if sweep.samples is not None and not drawn_anywhere:
        raise SpecError(
            f"{label}: samples={sweep.samples}, but no setting is drawn; "
            "use weft.uniform, weft.loguniform or weft.choice, or leave samples out for the whole grid"
        )
    return found


def _check_grid(key: str, values: Sequence[Any], label: str) -> None:
    if not values:
        raise SpecError(f"{label}: {key}=[] has no values, so there is nothing to train; give at least one")
    (value, count) = Counter(map(identity, values)).most_common(1)[0]
    if count > 1:
        again = next(each for each in values if identity(each) == value)
        raise SpecError(f"{label}: {key} lists {again!r} {count} times; every member must differ, so give it once")


def _draws(sweep: Written, drawn: Mapping[str, Range | Choice]) -> list[dict[str, Any]]:
    """``samples`` different combinations of the drawn settings; one without any where nothing is drawn.

    Every setting has a stream of its own, so that adding one does not change what the others draw.
    """
    if not drawn:
        return [{}]
    label = sweep.label
    if sweep.samples is None:
        key, source = next(iter(drawn.items()))
        raise SpecError(f"{label}: {key}={source} is drawn; say how often with samples=, or give a list for a grid")
    streams = {key: random.Random(f"{sweep.sample_seed}/{key}") for key in drawn}
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for _ in range(sweep.samples * REDRAWS):
        draw = {key: source.at(streams[key].random(), _whole(key)) for key, source in drawn.items()}
        found.setdefault(tuple(map(repr, draw.values())), draw)
        if len(found) == sweep.samples:
            return list(found.values())
    shown = ", ".join(f"{key}={source}" for key, source in drawn.items())
    raise SpecError(
        f"{label}: samples={sweep.samples}, but {sweep.samples * REDRAWS:,} draws of {shown} gave only {len(found)} "
        "different combinations; ask for fewer, or give lists for the whole grid"
    )


def _whole(key: str) -> bool:
    rule = rules().get(key)
    return rule is not None and rule.kind is int


def _refuse_too_many(before: int, sizes: Sequence[int], label: str) -> None:
    count = before + math.prod(sizes)
    if count > MOST_TASKS:
        shown = " x ".join(str(size) for size in sizes if size > 1)
        raise SpecError(
            f"{label}: {count:,} tasks ({shown}) are more than {MOST_TASKS:,}; "
            "shorten the lists, or draw from ranges with samples="
        )


def all_settings(task: Task) -> tuple[Any, ...]:
    """Equal for tasks with the same settings, whether they were given or are the usual ones; names do not count."""
    plain = [f.name for f in fields(Task) if f.name not in ("name", "model_args")]
    values = tuple(identity(getattr(task, name)) for name in plain)
    return values + tuple((name, identity(value)) for name, value in sorted(task.model_args.items()))


def _refuse_twins(tasks: Sequence[Task], label: str) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for task in tasks:
        values = all_settings(task)
        if values in seen:
            raise SpecError(
                f"{label}: {seen[values]!r} and {task.name!r} have the same settings; remove one of them, or "
                "give them different seeds"
            )
        seen[values] = task.label
