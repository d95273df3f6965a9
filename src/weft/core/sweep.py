"""Sweep: many trainings written as one, mostly on one graph; expands to Tasks, each with its own name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings.field_rule import Rule
from weft.core.settings.grid.combinations import Written, members_of, overrides
from weft.core.settings.grid.values import (
    ABSENT,
    as_plain,
    distinct,
    frozen,
    gives,
    joined_args,
    matters,
    read_value,
    seed_last,
    setting_of,
    with_args_apart,
)
from weft.core.settings.value_names import ARGS, Labels
from weft.core.task import Task, reject_unknown


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
        reject_unknown(settings, label)
        put = object.__setattr__
        put(self, "settings", frozen({"graph": graph, "model": model, **seed_last(settings)}))
        put(self, "explicit", tuple(overrides(tasks, label)))
        put(self, "samples", Rule(int, low=1, optional=True).check(label, "samples", samples))
        put(self, "sample_seed", Rule(int, low=0).check(label, "sample_seed", sample_seed))
        put(self, "name", Rule(str, optional=True).check(label, "name", name))
        written = Written(self.settings, self.explicit, self.samples, self.sample_seed, label)
        put(self, "_members", tuple(members_of(written)))
        put(self, "_labels", Labels({"graph": [task.graph for task in self.tasks()]}))

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
        """The members, named by the settings that vary; later settings vary faster, the seed fastest."""
        members: tuple[Task, ...] = self._members  # type: ignore[attr-defined]
        return list(members)

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
        given = {key: data[key] for key in ("name", "samples", "sample_seed") if key in data}
        entries = [{key: read_value(key, value) for key, value in entry.items()} for entry in data.get("tasks", ())]
        return cls(tasks=entries, **given, **settings)

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task], name: str | None = None) -> Sweep:
        """The sweep that has exactly ``tasks``; those without a name get one from the settings that differ."""
        if not tasks:
            raise SpecError("no tasks: give at least one weft.Task")
        names = [field.name for field in fields(Task) if field.name not in ("name", "model_args")]
        names += list(dict.fromkeys(f"{ARGS}{key}" for task in tasks for key in task.model_args))
        shared = [key for key in names if distinct((setting_of(t, key, ABSENT), gives(t, key)) for t in tasks) == 1]
        usual, first = Task(graph="any"), tasks[0]
        chosen = [key for key in shared if gives(first, key) and matters(first, key, usual)]
        settings = joined_args({key: setting_of(first, key) for key in chosen}, whole=True)
        own = [[key for key in names if key not in shared and gives(task, key)] for task in tasks]
        entries = [
            {"name": task.name} | joined_args({key: setting_of(task, key) for key in keys}, whole=True)
            for task, keys in zip(tasks, own, strict=True)
        ]
        return cls(tasks=[{k: v for k, v in e.items() if k != "name" or v} for e in entries], name=name, **settings)
