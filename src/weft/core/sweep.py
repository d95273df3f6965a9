"""Sweep: many trainings written as one, mostly on one graph; expands to Tasks, each with its own name."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from weft.core.errors import SpecError
from weft.core.search_space import Branch, Choice, Range, Space, from_table
from weft.core.settings import ARGS, Labels, Rule, describe, identity, plain_hop
from weft.core.task import (
    LOOP_SETTINGS,
    OPTIMIZER_GIVEN,
    OPTIMIZER_SETTINGS,
    SAMPLING_SETTINGS,
    Task,
    model_settings,
    plain_value,
    rules,
    with_model_args,
)

# ---- The values of a sweep's settings: which are lists or ranges, how they are frozen, compared and written as JSON.

TABLES = ("optimizer_args", "param_groups", "plateau")  # settings of which one value is a table
REPEATS = ("split", "seed")  # settings that repeat a training, rather than choose how it is done
ABSENT = object()  # the value of a setting that is not given


def is_grid(name: str, value: Any) -> bool:
    """Whether ``value`` lists several values of the setting ``name``; one value of betas or fanout is a list itself."""
    if name in ("betas", "fanout") and isinstance(value, (list, tuple)):
        return not value or all(isinstance(item, (list, tuple)) for item in value)
    if name == "class_weights" and isinstance(value, (list, tuple)):
        return not value or not all(isinstance(item, (int, float)) for item in value)
    if name == "callbacks":  # however many, they are called for every task
        return False
    return isinstance(value, (list, tuple, range))


def varies(name: str, value: Any) -> bool:
    """Whether ``value`` makes a sweep of a task: a list, or a range to draw from."""
    if name == "model_args" and isinstance(value, Mapping):
        return any(varies(key, item) for key, item in value.items())
    return isinstance(value, (Range, Choice)) or is_grid(name, value)


def read_value(name: str, value: Any) -> Any:
    """A value out of JSON or TOML: tables say how to draw, anything else is itself."""
    if name == "model_args" and isinstance(value, Mapping):
        return {key: read_value(key, item) for key, item in value.items()}
    if name in TABLES or not isinstance(value, Mapping):
        return value
    return from_table(name, value)


def with_args_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with each of ``model_args`` under a key of its own: ``model_args.width``."""
    args = settings.get("model_args", {})
    apart = {key: value for key, value in settings.items() if key != "model_args"}
    return apart | {f"{ARGS}{name}": value for name, value in args.items()}


def joined_args(values: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """The inverse. ``whole``: a tuple is one value, to be kept as the only one of a list."""
    args = {key.removeprefix(ARGS): value for key, value in values.items() if key.startswith(ARGS)}
    if whole:
        args = {name: (value,) if isinstance(value, (list, tuple, range)) else value for name, value in args.items()}
    joined = {key: value for key, value in values.items() if not key.startswith(ARGS)}
    return joined | ({"model_args": args} if args else {})


def setting_of(task: Task, key: str, absent: Any = None) -> Any:
    """The value of a setting by the name that :attr:`Sweep.varying` gives it; ``absent`` for a missing argument."""
    return task.model_args.get(key.removeprefix(ARGS), absent) if key.startswith(ARGS) else getattr(task, key)


def single(task: Task, key: str) -> Any:
    """The value of a setting for a sweep: a fan-out per relation, which looks like several, as the only one."""
    hops = [plain_hop(hop) for hop in task.fanout] if key == "fanout" and task.fanout else None
    return setting_of(task, key) if hops is None else [hops] if is_grid(key, hops) else hops


def gives(task: Task, key: str) -> bool:
    """Whether a task has a value for a setting: a model of the user's own has defaults of its own for the rest."""
    if key.startswith(ARGS):
        return key.removeprefix(ARGS) in task.model_args
    of_torch = key in OPTIMIZER_GIVEN and task.has_own("optimizer")  # which has defaults of its own
    if key in SAMPLING_SETTINGS or of_torch:  # setting the former selects sampled batches
        return key in task.given
    return key in task.given or task.traits is not None or key not in model_settings()


def frozen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every list, range and array as a tuple, so that equal sweeps compare equal."""
    args = settings.get("model_args", {})
    if not isinstance(args, Mapping):
        raise SpecError(f"sweep: model_args={args!r} must be a dict, such as model_args={{'width': [16, 32]}}")
    for key, value in settings.items():
        if isinstance(value, (set, frozenset, Iterator)):
            kind = type(value).__name__
            raise SpecError(f"sweep: {key} is a {kind}; give a list, which has an order and can be read again")
    return {key: _as_tuples(value) for key, value in settings.items()}


def seed_last(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Wherever split and seed were written, members that differ in them alone stand together, and names end so."""
    last = {key: settings[key] for key in REPEATS if key in settings}
    return {key: value for key, value in settings.items() if key not in last} | last


def _as_tuples(value: Any) -> Any:
    if hasattr(value, "tolist") and getattr(value, "ndim", None):  # arrays of numpy and torch
        value = value.tolist()
    if isinstance(value, Mapping):
        # A tensor among arguments of a model is one value, such as the degrees that PyG's PNA takes.
        return {key: item if hasattr(item, "requires_grad") else _as_tuples(item) for key, item in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple, range)) else value


def distinct(values: Iterable[Any]) -> int:
    """How many different values there are."""
    return len({identity(value) for value in values})


def as_plain(key: str, value: Any) -> Any:
    """``value`` as JSON has it."""
    if key == "graph" and isinstance(value, tuple):
        return [as_plain(key, item) for item in value]
    if key == "graph" and not isinstance(value, (str, Range, Choice)):
        return Task(graph=value).to_dict()["graph"]
    return plain_value(value)


# ---- All combinations of a sweep's settings as Tasks: the grid, the draws, and what is refused.

Combination = tuple[int, dict[str, Any]]  # the entry of ``tasks`` that it belongs to, and its settings
MOST_TASKS = 10_000  # more are a slip of the keyboard: seven lists of four values are 16,384
REDRAWS = 50  # attempts at a combination that was not drawn before


def overrides(entries: Any, label: str) -> Iterator[Mapping[str, Any]]:
    """The entries of ``tasks``, each a mapping; their settings are not checked."""
    if isinstance(entries, (Mapping, str)):
        raise SpecError(f"{label}: tasks={entries!r} must be a list of dicts, such as tasks=[{{'hidden': 16}}]")
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise SpecError(f"{label}: tasks has {entry!r}; expected a dict of settings, such as {{'hidden': 16}}")
        yield entry


def values_of(value: Any) -> list[Any]:
    """The values that a setting has in a sweep."""
    value = value.values if isinstance(value, Choice) else value
    return list(value) if isinstance(value, (list, tuple)) else [value]


def members_of(sweep: Sweep, label: str) -> list[Task]:
    """The members of a sweep, named by what varies; ``label`` begins the refusal of combinations that make no sense."""
    combinations = _combinations(sweep, label)
    # A name for every combination: what varies, short where that is enough to tell members apart, the second of a kind
    # with ``#2``; a name given in ``tasks`` stands for the settings given with it.
    chosen = [values for _, values in combinations]
    keys = seed_last({key: 0 for each in chosen for key in each if key != "name"})
    varying = [key for key in keys if distinct(each.get(key, ABSENT) for each in chosen) > 1]
    labels = Labels({key: [each[key] for each in chosen if key in each] for key in varying})
    entries = sweep.explicit or ({},)
    short, full = [], []
    for position, each in combinations:
        named = isinstance(each.get("name"), str) and each["name"]
        entry = with_args_apart(entries[position])
        fixed = {key for key, value in entry.items() if not varies(key, value)} if named else set()
        short.append(labels.name(each, [key for key in varying if key not in fixed], named or ""))
        full.append(labels.name(each, varying, named or ""))
    taken, same, names = Counter(short), Counter[str](), list[str]()
    for brief, whole in zip(short, full, strict=True):
        name = (brief if taken[brief] == 1 else whole) or describe(chosen[0]["model"])
        same[name] += 1
        names.append(name if same[name] == 1 else f"{name} #{same[name]}")
    tasks, seen = [], dict[tuple[Any, ...], str]()
    for name, (_, values) in zip(names, combinations, strict=True):
        task = Task(**joined_args({**values, "name": name}))
        twin = seen.setdefault(all_settings(task), task.label)
        if twin != task.label:
            raise SpecError(
                f"{label}: {twin!r} and {task.name!r} have the same settings; remove one of them, or give them "
                "different seeds"
            )
        tasks.append(task)
    # Drop settings that all tasks have but only some read: model=["gcn", "gat"], heads=4. What varies stays, and is
    # refused when the sweep is run: it would seem to have been tried.
    for name in (*model_settings(), *OPTIMIZER_SETTINGS, *LOOP_SETTINGS):
        ignored = [task.ignores(name) and name in task.given for task in tasks]
        if any(ignored) and not all(ignored) and distinct(getattr(task, name) for task in tasks) == 1:
            for index, task in enumerate(tasks):
                if ignored[index]:
                    tasks[index] = Task(**{key: getattr(task, key) for key in task.given if key != name})
    return tasks


def _combinations(sweep: Sweep, label: str) -> list[Combination]:
    """All combinations: the entry of ``tasks`` each belongs to, and its settings."""
    combinations: list[Combination] = []
    drawn_anywhere = False
    for position, entry in enumerate(sweep.explicit or ({},)):
        merged = seed_last({**with_args_apart(sweep.settings), **with_args_apart(entry)})
        grid = {key: list(value) for key, value in merged.items() if is_grid(key, value)}
        for key, values in grid.items():
            if not values:
                raise SpecError(f"{label}: {key}=[] has no values, so there is nothing to train; give at least one")
            (most, count) = Counter(map(identity, values)).most_common(1)[0]
            if count > 1:
                again = next(value for value in values if identity(value) == most)
                raise SpecError(
                    f"{label}: {key} lists {again!r} {count} times; every member must differ, so give it once"
                )
        drawn = {key: value for key, value in merged.items() if isinstance(value, (Range, Choice))}
        drawn_anywhere = drawn_anywhere or bool(drawn)
        sizes = [sweep.samples or 1 if drawn else 1, *map(len, grid.values())]
        count = len(combinations) + math.prod(sizes)
        if count > MOST_TASKS:
            shown = " x ".join(str(size) for size in sizes if size > 1)
            raise SpecError(
                f"{label}: {count:,} tasks ({shown}) are more than {MOST_TASKS:,}; "
                "shorten the lists, or draw from ranges with samples="
            )
        draws = _draws(sweep, drawn, label)
        for draw, *values in itertools.product(draws, *grid.values()):
            combinations.append((position, {**merged, **draw, **dict(zip(grid, values, strict=True))}))
    if sweep.samples is not None and not drawn_anywhere:
        raise SpecError(
            f"{label}: samples={sweep.samples}, but no setting is drawn; "
            "use weft.uniform, weft.loguniform or weft.choice, or leave samples out for the whole grid"
        )
    return combinations


def _draws(sweep: Sweep, drawn: Mapping[str, Range | Choice], label: str) -> list[dict[str, Any]]:
    """``samples`` different combinations of the drawn settings; a single empty one if nothing is drawn.

    Every setting has a stream of its own, so that adding one does not change what the others draw.
    """
    if not drawn or sweep.samples is None:  # of an open sweep there are no members
        return [{}]
    streams = {key: random.Random(f"{sweep.sample_seed}/{key}") for key in drawn}
    whole = {key for key, rule in rules().items() if rule.kind is int}
    draws: dict[tuple[str, ...], dict[str, Any]] = {}
    for _ in range(sweep.samples * REDRAWS):
        draw = {key: source.at(streams[key].random(), key in whole) for key, source in drawn.items()}
        draws.setdefault(tuple(map(repr, draw.values())), draw)
        if len(draws) == sweep.samples:
            return list(draws.values())
    shown = ", ".join(f"{key}={source}" for key, source in drawn.items())
    raise SpecError(
        f"{label}: samples={sweep.samples}, but {sweep.samples * REDRAWS:,} draws of {shown} gave only {len(draws)} "
        "different combinations; ask for fewer, or give lists for the whole grid"
    )


def first_drawn(sweep: Sweep) -> tuple[str, Range | Choice] | None:
    """A setting that is drawn, and what from; None if there is none."""
    for entry in (sweep.settings, *sweep.explicit):
        for key, value in with_args_apart(entry).items():
            if isinstance(value, (Range, Choice)):
                return key, value
    return None


def check_space(sweep: Sweep, label: str) -> None:
    """A :class:`SpecError` for a value of a setting that no trial could have, or if no drawn trial is possible."""
    space = sweep.space()
    for branch in space.branches:
        for key, source in branch.varying.items():
            whole = key in space.whole
            ends = source.values if isinstance(source, Choice) else (source.at(0.0, whole), source.at(1.0, whole))
            for value in ends if key in rules() else ():
                rules()[key].check(f"{label}: ", key, value)
    for number in range(REDRAWS):
        try:
            sweep.trial(space.draw(str(number)), label)
            return
        except SpecError:
            if number + 1 == REDRAWS:
                raise


def all_settings(task: Task) -> tuple[Any, ...]:
    """Equal for tasks with the same settings, whether they were given or are the usual ones; names do not count."""
    plain = [f.name for f in fields(Task) if f.name not in ("name", "model_args")]
    values = tuple(identity(getattr(task, name)) for name in plain)
    return values + tuple((name, identity(value)) for name, value in sorted(task.model_args.items()))


@dataclass(frozen=True, init=False)
class Sweep:
    """Every combination of ``settings``, which are those of :class:`Task`; all combinations are checked at once.

    A list, tuple or ``range`` is a grid, :func:`uniform`, :func:`loguniform` and :func:`choice` are drawn from
    ``samples`` times (the same draws for the same ``sample_seed``); each draw meets every combination of the grid.
    ``betas`` is a pair, so a grid of it is a list of pairs. ``tasks`` is a list of overrides for settings that
    belong together, ``tasks=[{"model": "gcn", "lr": 0.01}, {"model": "gat", "lr": 0.005}]``; an override may have
    lists and a ``name``. Each of them meets the rest of the grid. ``splits``: numbers of the graph's splits, or
    ``"all"``, another name for a grid of ``split``: scores are then means over them. A list or a range inside
    ``model_args`` varies like any other setting; a list that is one value stands in a list of its own.
    """

    settings: Mapping[str, Any]
    explicit: tuple[Mapping[str, Any], ...]
    samples: int | None
    sample_seed: int
    name: str | None

    def __init__(
        self,
        graph: Any = None,
        model: Any = "gcn",
        *,
        tasks: Iterable[Mapping[str, Any]] = (),
        samples: int | None = None,
        sample_seed: int = 0,
        name: str | None = None,
        splits: Any = None,
        **settings: Any,
    ) -> None:
        label = f"sweep {name!r}" if name else "sweep"
        if splits is not None:
            if "split" in settings:
                raise SpecError(f"{label}: splits={splits!r} and split={settings['split']!r}: give one of the two")
            settings["split"] = splits
        entries = list(overrides(tasks, label))
        models = [values_of(entry.get("model", model)) for entry in entries]
        settings = with_model_args(settings, itertools.chain(values_of(model), *models), label)
        explicit = map(with_model_args, entries, models, itertools.repeat(f"{label}, entry of tasks"))
        put = object.__setattr__
        put(self, "settings", frozen({"graph": graph, "model": model, **seed_last(settings)}))
        put(self, "explicit", tuple(map(frozen, explicit)))
        put(self, "samples", Rule(int, low=1, optional=True).check(f"{label}: ", "samples", samples))
        put(self, "sample_seed", Rule(int, low=0).check(f"{label}: ", "sample_seed", sample_seed))
        put(self, "name", Rule(str, optional=True).check(f"{label}: ", "name", name))
        members: list[Task] = []
        if samples is None and first_drawn(self) is not None:
            check_space(self, label)
        else:
            members = members_of(self, label)
        put(self, "_members", tuple(members))
        put(self, "_labels", Labels({"graph": [task.graph for task in members]}))

    @property
    def label(self) -> str:
        """What messages call this sweep."""
        return self.name or "sweep"

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The settings that differ between members, in the order in which they were given, seed last."""
        written = [key for entry in (self.settings, *self.explicit) for key in with_args_apart(entry)]
        given = seed_last(dict.fromkeys(written))
        members = self.tasks()
        values = {key: [setting_of(task, key) for task in members if not task.ignores(key)] for key in given}
        return tuple(key for key in given if key != "name" and distinct(values[key]) > 1)

    @cached_property
    def graphs(self) -> tuple[str, ...]:
        """What the graphs of the members are called, in the order in which they come up."""
        return tuple(dict.fromkeys(map(self.graph_of, self.tasks())))

    def graph_of(self, task: Task) -> str:
        """What the graph of a member is called: one of :attr:`graphs`, different for different graphs."""
        labels: Labels = self._labels  # type: ignore[attr-defined]
        return labels.word("graph", task.graph)

    def tasks(self) -> list[Task]:
        """The members, named by the settings that vary; later settings vary faster, the seed fastest.

        A :class:`SpecError` if settings are drawn and nothing says how often: such a sweep is a space for a tuner.
        """
        members: tuple[Task, ...] = self._members  # type: ignore[attr-defined]
        if not members and (drawn := first_drawn(self)) is not None:
            raise SpecError(
                f"{f'sweep {self.name!r}' if self.name else 'sweep'}: {drawn[0]}={drawn[1]} is drawn; say how often "
                "with samples=, give a list for a grid, or choose a tuner"
            )
        return list(members)

    def space(self) -> Space:
        """What a tuner draws trials from: every list as a choice of its values, every entry of ``tasks`` a branch."""
        shared, branches = with_args_apart(self.settings), []
        for entry in self.explicit or ({},):
            apart = with_args_apart(entry)
            merged = {key: value for key, value in seed_last({**shared, **apart}).items() if key != "name"}
            listed = {key: Choice(tuple(value)) for key, value in merged.items() if is_grid(key, value) and value}
            varying = {key: listed.get(key, value) for key, value in merged.items() if varies(key, value)}
            fixed = {key: value for key, value in apart.items() if key in merged and key not in varying}
            branches.append(Branch(fixed, varying))
        return Space(tuple(branches), frozenset(key for key, rule in rules().items() if rule.kind is int))

    def trial(self, settings: Mapping[str, Any], name: str) -> Task:
        """The task of a trial with ``settings`` out of :meth:`space`; what its model or optimizer does not read, goes.

        A trial draws the settings of all models, of which it has one.
        """
        shared = {key: value for key, value in with_args_apart(self.settings).items() if not varies(key, value)}
        task = Task(**joined_args({**shared, **settings, "name": name}))
        ignored = {key for key in task.given if task.ignores(key)}
        return Task(**{key: getattr(task, key) for key in task.given if key not in ignored}) if ignored else task

    @classmethod
    def of_trials(cls, tasks: Sequence[Task], name: str | None = None) -> Sweep:
        """The sweep that has exactly ``tasks``, which have names and may be equal otherwise."""
        sweep = cls.__new__(cls)
        entries = tuple(frozen({key: getattr(task, key) for key in sorted(task.given)}) for task in tasks)
        values = {"settings": {"graph": tasks[0].graph}, "explicit": entries, "samples": None, "sample_seed": 0}
        for key, value in {**values, "name": name, "_members": tuple(tasks)}.items():
            object.__setattr__(sweep, key, value)
        object.__setattr__(sweep, "_labels", Labels({"graph": [task.graph for task in tasks]}))
        return sweep

    def __len__(self) -> int:
        return len(self.tasks())

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; graphs and models given as objects become descriptions of them."""
        return {
            "name": self.name,
            **{key: as_plain(key, value) for key, value in self.settings.items()},
            "tasks": [{key: as_plain(key, value) for key, value in entry.items()} for entry in self.explicit],
            "samples": self.samples,
            "sample_seed": self.sample_seed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sweep:
        """The inverse of :meth:`to_dict`, for sweeps whose graphs and models have names."""
        own = ("name", "tasks", "samples", "sample_seed")
        settings = {key: read_value(key, value) for key, value in data.items() if key not in own}
        values = {key: data[key] for key in ("name", "samples", "sample_seed") if key in data}
        entries = [{key: read_value(key, value) for key, value in entry.items()} for entry in data.get("tasks", ())]
        return cls(tasks=entries, **values, **settings)

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task], name: str | None = None) -> Sweep:
        """The sweep that has exactly ``tasks``; those without a name get one from the settings that differ."""
        if not tasks:
            raise SpecError("no tasks: give at least one weft.Task")
        names = [field.name for field in fields(Task) if field.name not in ("name", "model_args")]
        names += list(dict.fromkeys(f"{ARGS}{key}" for task in tasks for key in task.model_args))
        shared = [key for key in names if distinct((setting_of(t, key, ABSENT), gives(t, key)) for t in tasks) == 1]
        usual, first = Task(graph="any"), tasks[0]
        chosen = [key for key in shared if gives(first, key)]
        if first.traits is not None:  # a named model has the usual value of a setting that is left out
            chosen = [key for key in chosen if key.startswith(ARGS) or getattr(first, key) != getattr(usual, key)]
        settings = joined_args({key: single(first, key) for key in chosen}, whole=True)
        given_keys = [[key for key in names if key not in shared and gives(task, key)] for task in tasks]
        entries = [
            {"name": task.name} | joined_args({key: single(task, key) for key in keys}, whole=True)
            for task, keys in zip(tasks, given_keys, strict=True)
        ]
        return cls(tasks=[{k: v for k, v in e.items() if k != "name" or v} for e in entries], name=name, **settings)


def as_work(work: Any, caller: str) -> Task | Sweep:
    """``work`` as a task or a sweep: a list of tasks becomes one; a :class:`SpecError` for anything else."""
    return work if isinstance(work, (Task, Sweep)) else Sweep.from_tasks(tasks_in(work, caller))


def tasks_in(work: Any, caller: str) -> list[Task]:
    """The tasks of a task, a sweep or a list; a :class:`SpecError` for anything else."""
    if isinstance(work, (Task, Sweep)):
        return [work] if isinstance(work, Task) else work.tasks()
    listed = isinstance(work, Iterable) and not isinstance(work, (str, bytes, Mapping))
    tasks = list(work) if listed else []
    wrong = [(index, item) for index, item in enumerate(tasks) if not isinstance(item, Task)]
    if tasks and not wrong:
        return tasks
    what = f"a list whose item {wrong[0][0]} is {wrong[0][1]!r}" if wrong else "an empty list" if listed else repr(work)
    raise SpecError(
        f"{caller} takes a weft.Task, a weft.Sweep or a list of tasks, not {what}; write weft.Task(graph=..., ...)"
    )
