"""The spec of a command, read once and checked without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.run_options import RunOptions, options_of
from weft.core.search_space import Choice
from weft.core.spec_file import read_with_options
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.graph.catalog.listing import check_name

TUNE = ("tuner", "trials", "width")  # options that a section [tune] may give


def spec_of(path: Path, overrides: Sequence[str] = (), tuned: bool = False) -> Task | Sweep:
    """The task or sweep in the file; its graphs, where they are named, are known names.

    ``tuned``: whether the file may have a section [tune].
    """
    return _read(path, tuple(overrides), tuned, _stamp(path))[0]


def section_of(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The options of a run in the section [run] of the file."""
    return _read(path, tuple(overrides), False, _stamp(path))[1]


def tuned_spec_of(
    path: Path, overrides: Sequence[str], reader: str, given: Mapping[str, Any]
) -> tuple[Task | Sweep, RunOptions]:
    """What is in the file, and the options of a run of it: those ``given``, else those of its [run] and [tune]."""
    from weft.planner.tuning import Tuner

    work, section = _read(path, tuple(overrides), True, _stamp(path))
    table = section["tune"]
    settings = {name: value for name, value in table.items() if name not in TUNE}
    options = {name: table.get(name) if given[name] is None else given[name] for name in TUNE}
    if settings and options["tuner"] is None:
        raise SpecError(f"{path}: {next(iter(settings))} of [tune] would have no effect without a tuner")
    if settings:
        options["tuner"] = Tuner.of(options["tuner"], **settings)
    return work, RunOptions.of(**{**with_section(section, reader, given), **options})


def with_section(section: Mapping[str, Any], reader: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options ``given`` in the shell, and those of the ``section`` [run] of a spec that are not given there."""
    usual = {row.name: row.default for row in options_of(reader) if row.metadata["shell"]["help"]}
    mine = {name: value for name, value in section.items() if name in usual or reader == "queue"}
    return {**given, **{name: value for name, value in mine.items() if given.get(name) in (usual.get(name), None, [])}}


def _stamp(path: Path) -> object:
    """What changes with the file; None where there is none."""
    stamp = path.stat() if os.path.isfile(path) else None  # no error for a name that is too long
    return (stamp.st_mtime_ns, stamp.st_size, stamp.st_ino) if stamp else None


@lru_cache(maxsize=1)  # the answer before parsing and the command ask for the same file
def _read(path: Path, overrides: tuple[str, ...], tuned: bool, stamp: object) -> tuple[Task | Sweep, dict[str, Any]]:
    work, options = read_with_options(path, overrides, tuned)
    for graph in _words(work, "graph"):
        check_name(graph)
    for model in _words(work, "model"):
        file = model.rpartition(":")[0]
        if file.endswith(".py") and not os.path.isfile(file):
            raise SpecError(f"model={model!r}: no such file: {file}")
    return work, options


def _words(work: Task | Sweep, setting: str) -> list[str]:
    """What a task, or any task of a sweep, has for ``setting``, where that is a word."""
    found = work.settings.get(setting) if isinstance(work, Sweep) else getattr(work, setting)
    values = found.values if isinstance(found, Choice) else found
    return [value for value in (values if isinstance(values, (list, tuple)) else [values]) if isinstance(value, str)]
