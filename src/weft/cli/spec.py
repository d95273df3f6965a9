"""What commands share: the options of a run out of their table, and the spec, read once and checked without torch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
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


# ---- Options of a run


def takes_run_options(reader: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every row of the table of :class:`RunOptions` that ``reader`` reads.

    The command takes their values as keywords.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        import typer  # commands that are answered at once do without

        signature = inspect.signature(command, eval_str=True)
        parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        for one in options_of(reader):
            rule, shell = one.metadata["rule"], one.metadata["shell"]
            if shell is None:
                continue
            name = one.name.replace("_", "-")
            kind = rule.kind if rule.parse is None and rule.kind in (bool, int, float) else str
            info = typer.Option(
                f"--{name}/--no-{name}" if kind is bool else f"--{name}",
                help=shell.text,
                metavar=shell.metavar,
                show_default=shell.default or True,
            )
            annotation = Annotated[kind | None if rule.optional else kind, info]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(one.name, keyword, default=one.default, annotation=annotation))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def shell_arguments(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give ``values``, as :func:`takes_run_options` reads them."""
    words = []
    for one in options_of("run"):
        value, name = values.get(one.name, one.default), one.name.replace("_", "-")
        if value != one.default:
            words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words
