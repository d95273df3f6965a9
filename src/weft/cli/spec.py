"""What commands share: the options of a run out of their table, and the spec, read once and checked without torch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from weft.core.errors import SpecError
from weft.core.run_options import options_of
from weft.core.search_space import Choice
from weft.core.spec_file import read_spec
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.graph.catalog.listing import check_name


def spec_of(path: Path, overrides: Sequence[str] = ()) -> Task | Sweep:
    """The task or sweep in the file; its graphs, where they are named, are known names."""
    stamp = path.stat() if os.path.isfile(path) else None  # no error for a name that is too long
    key = (stamp.st_mtime_ns, stamp.st_size, stamp.st_ino) if stamp else None
    return _read(path, tuple(overrides), key)


@lru_cache(maxsize=1)  # the answer before parsing and the command ask for the same file
def _read(path: Path, overrides: tuple[str, ...], stamp: object) -> Task | Sweep:
    work = read_spec(path, overrides)
    for graph in _words(work, "graph"):
        check_name(graph)
    for model in _words(work, "model"):
        file = model.rpartition(":")[0]
        if file.endswith(".py") and not os.path.isfile(file):
            raise SpecError(f"model={model!r}: no such file: {file}")
    return work


def _words(work: Task | Sweep, setting: str) -> list[str]:
    """What a task, or any task of a sweep, has for ``setting``, where that is a word."""
    found = work.settings.get(setting) if isinstance(work, Sweep) else getattr(work, setting)
    values = found.values if isinstance(found, Choice) else found
    return [value for value in (values if isinstance(values, (list, tuple)) else [values]) if isinstance(value, str)]


# ---- Options of commands, as tables


@dataclass(frozen=True)
class ShellOption:
    """An option of a command: ``kind`` of its value, its ``help``, and what its ``default`` is called."""

    name: str
    kind: Any
    help: str
    metavar: str | None = None
    shown: str | None = None
    default: Any = None
    flag: str = ""


def run_options(reader: str) -> tuple[ShellOption, ...]:
    """A shell option for every row of the table of :class:`RunOptions` that ``reader`` reads and a shell can give."""
    rows = []
    for row in options_of(reader):
        rule, shell = row.metadata["rule"], row.metadata["shell"]
        if shell["help"]:
            kind = rule.kind if rule.parse is None and rule.kind in (bool, int, float) else str
            flag = f"--{row.name}/--no-{row.name}" if kind is bool else ""
            rows.append(ShellOption(row.name, kind, default=row.default, flag=flag, **shell))
    return tuple(rows)


def takes(*rows: ShellOption) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options ``rows``, whose values it takes as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        import typer  # commands that are answered at once do without

        signature = inspect.signature(command, eval_str=True)
        parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        for row in rows:
            flag = row.flag or f"--{row.name.replace('_', '-')}"
            info = typer.Option(flag, help=row.help, metavar=row.metavar, show_default=row.shown or True)
            annotation = Annotated[row.kind | None if row.default is None else row.kind, info]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(row.name, keyword, default=row.default, annotation=annotation))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def shell_arguments(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give ``values`` of the options of a run."""
    words = []
    for row in run_options("run"):
        value, name = values.get(row.name, row.default), row.name.replace("_", "-")
        if value != row.default:
            words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words
