"""Read tasks and sweeps from TOML files, with ``section.key=value`` overrides.

    graph = "cora"
    seed = [0, 1, 2]
    [model]
    name = "gcn"
    hidden = [16, 64]
    [train]
    lr = { loguniform = [1e-4, 1e-1] }
    [sweep]
    samples = 20
    [run]
    log = ["csv:metrics.csv"]

Sections only group: ``[model]`` and ``[train]`` flatten to the fields of :class:`weft.core.task.Task`, and
``[model.args]`` is its ``model_args``, as are other keys of ``[model]`` for a model of the user's own. A list, a
range to draw from, or ``[[task]]`` tables make it a :class:`weft.core.sweep.Sweep`. ``[run]`` has options of the
run, which are no part of a task: commands read them. ``[tune]``, with ``tuner``, ``trials``, ``width`` and
settings of the tuner, is for ``weft tune``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.run_options import options_of
from weft.core.search_space import Choice
from weft.core.sweep import Sweep, read_value, varies
from weft.core.task import ALIASES, ELSEWHERE, Task, may_have, meant, reject_unknown, rules
from weft.core.wording import did_you_mean, nearest_names

SECTIONS = ("model", "train")
RUN = "run"  # the section with options of a run, which commands read
PATHS = ("graph", "model", "optimizer", "schedule", "objective", "metric", "callbacks")  # what may name a file
SWEEP_KEYS = ("samples", "sample_seed")


def read_spec(path: str | Path, overrides: Iterable[str] = ()) -> Task | Sweep:
    """What the TOML file at ``path`` describes, with ``--set`` style ``overrides`` applied.

    A :class:`Task`, or a :class:`Sweep` where a setting has several values or there are ``[[task]]`` tables.
    """
    return read_with_options(Path(path), overrides)[0]


def read_with_options(
    path: Path, overrides: Iterable[str] = (), tuned: bool = False
) -> tuple[Task | Sweep, dict[str, Any]]:
    """What :func:`read_spec` reads, and the section ``[run]``: options of a run by name, which commands take.

    ``tuned``: also the section ``[tune]``, under that name: options of a tuned run, and settings of its tuner.
    """
    if os.path.isdir(path):  # no error for a name that is too long
        raise SpecError(f"{path} is a folder; expected a TOML file that describes a task or a sweep")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; expected a TOML file that describes a task or a sweep") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; beside a section [model] the model is its name=" if "overwrite" in str(error) else ""
        raise SpecError(f"{path}: not valid TOML: {error}{hint}") from None
    for override in overrides:
        _apply(data, override)
    section = data.get(RUN, {})
    if not isinstance(section, Mapping):
        raise SpecError(f"{path}: {RUN} = {section!r} must be a section, written [{RUN}]")
    options = [row.name for row in options_of("run") if row.metadata["shell"]["help"]]
    for name in section:
        if name not in options:
            raise SpecError(f"{path}: unknown option '{RUN}.{name}'{nearest_names(name, options)}")
    if "tune" in data and not tuned:
        raise SpecError(f"{path}: has a section [tune], which `weft tune` and `weft plan` read; leave it out otherwise")
    table = data.pop("tune", {})
    if not isinstance(table, dict):
        raise SpecError(f"{path}: tune = {table!r} must be a section, written [tune]")
    work = parse_spec(data, where=str(path), default_name=path.stem, folder=path.parent)
    return work, {**section, "tune": table} if tuned else dict(section)


def parse_spec(
    data: Mapping[str, Any], where: str = "spec", default_name: str | None = None, folder: Path | None = None
) -> Task | Sweep:
    """What parsed TOML ``data`` describes; ``where`` begins every complaint."""
    data = dict(data)
    if "splits" in data:  # as a Sweep calls them
        data["split"] = data.pop("splits")
    data.pop(RUN, None)  # how it is done: see read_with_options
    tables, options = data.pop("task", []), data.pop("sweep", {})
    listed = tables if isinstance(tables, list) else []
    models = [model for table in (data, *listed) for model in _models(table)]
    values = _read_values(_flatten(data, where, models), folder)
    if "graph" not in values:
        raise SpecError(f'{where}: no graph; add a line such as graph = "cora"')
    values.setdefault("name", default_name)
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise SpecError(f"{where}: task = {tables!r} must be tables, each written [[task]]")
    homes = ("", *SECTIONS)
    entries = [_read_values(_flatten(table, f"{where}, [[task]]", models, homes), folder) for table in tables]
    if not isinstance(options, Mapping):
        raise SpecError(f"{where}: sweep = {options!r} must be a section, written [sweep]")
    for key in options:
        if key not in SWEEP_KEYS:
            raise SpecError(f"{where}: unknown setting 'sweep.{key}'; known here: {', '.join(SWEEP_KEYS)}")
    if entries or options or any(varies(key, value) for key, value in values.items()):
        return Sweep(tasks=entries, **options, **values)
    return Task(**values)


def _read_values(values: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Values as :class:`Sweep` takes them: ranges to draw from, "none" as None, paths where they lead."""
    optional = {name for name, rule in rules().items() if rule.optional}
    result = {}
    for key, value in values.items():
        value = read_value(key, value)
        if key in optional:
            value = _each(value, lambda item: None if item == "none" else item)
        if key in PATHS and folder is not None:
            value = _each(value, lambda item: _in_folder(item, folder))
        result[key] = value
    return result


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` for one value, or for all of a list or a choice."""
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, Choice):
        return Choice(tuple(change(item) for item in value.values))
    return change(value)


def _apply(data: dict[str, Any], override: str) -> None:
    """Put one ``section.key=value`` into ``data``; the value is TOML, or a bare word taken as a string."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    most = 3 if parts[:2] == ["model", "args"] else 2
    if not equals or not all(parts) or len(parts) > most:
        raise SpecError(f"--set {override}: expected key=value, such as --set train.lr=0.02")
    if parts[0] == "model" and len(parts) == 1:
        parts = ["model", "name"]
    if parts[0] == "model" and isinstance(data.get("model"), (str, list)):
        data["model"] = {"name": data["model"]}
    if len(parts) < 3:  # of [model.args], names are the model's own
        parts[-1] = ALIASES.get(parts[-1], parts[-1])
    section: Any = data
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SpecError(f"--set {override}: {part} is a single value, not a section")
    for alias in [alias for alias in section if ALIASES.get(alias) == parts[-1] and len(parts) < 3]:
        del section[alias]
    try:
        section[parts[-1]] = tomllib.loads(f"value = {text.strip()}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        section[parts[-1]] = text.strip()  # --set model.name=gat, without the quotes that a shell would have eaten


def _models(table: Any) -> list[Any]:
    """What a spec, or one of its ``[[task]]`` tables, names as models."""
    model = table.get("model") if isinstance(table, Mapping) else None
    names = model.get("name", model.get("choice")) if isinstance(model, Mapping) else model
    if isinstance(names, Mapping):
        names = names.get("choice")
    return list(names) if isinstance(names, list) else [names]


def _flatten(
    data: Mapping[str, Any], where: str, models: Sequence[Any], homes: Sequence[str] = ("",)
) -> dict[str, Any]:
    """Settings by the names of a task's fields; ``homes``: the sections whose settings may also stand at the top.

    ``models``: those that may have arguments of their own in ``[model]``.
    """
    values: dict[str, Any] = {}

    def put(name: str, section: str, value: Any, anywhere: bool = False) -> None:
        may_be_argument = (section == "model" or anywhere) and any(may_have(model, name) for model in models)
        field = name if may_be_argument and not _section_of(name) else _field(name, section, where, anywhere)
        if field in values:
            raise SpecError(f"{where}: {field} is given twice, once as {name}; give it once")
        values[field] = value

    for key, value in data.items():
        is_choice = isinstance(value, Mapping) and set(value) == {"choice"}  # rather than the section [model]
        if key not in SECTIONS or (key == "model" and (isinstance(value, (str, list)) or is_choice)):
            put(key, next((home for home in homes if key in _fields(home)), ""), value, len(homes) > 1)
        elif not isinstance(value, Mapping):
            raise SpecError(f"{where}: {key} = {value!r} must be a section, written [{key}]")
        else:
            for name, item in value.items():
                put(name, key, item)
    return values


def _fields(section: str) -> dict[str, str]:
    """The names of settings in a section (at the top: ""), each with the field of a task that it is for."""
    extra = {"": {"graph": "graph", "model": "model"}, "model": {"name": "model", "args": "model_args"}}
    names = extra.get(section, {}) | {name: name for name, rule in rules().items() if rule.section == section}
    return names | {alias: name for alias, name in ALIASES.items() if name in names}


def _section_of(name: str) -> list[str]:
    """The sections that have a setting of this name: one, or none."""
    return [section for section in ("", *SECTIONS) if name in _fields(section)]


def _field(name: str, section: str, where: str, anywhere: bool) -> str:
    """The field for a setting; a :class:`SpecError` if there is none in the section (``anywhere``: in any)."""
    known = _fields(section)
    if name in known:
        return known[name]
    if anywhere:
        reject_unknown([name], where)
    shown = f"{section}.{name}" if section else name
    if shown == "model.model":  # at the top it would clash with the section
        raise SpecError(f"{where}: model.model is in the wrong place; in [model] the model is called name")
    for other in _section_of(name):
        place = f"in [{other}]" if other else "at the top, before the first section"
        raise SpecError(f"{where}: {shown} is in the wrong place; {name} belongs {place}")
    everything = {(f"{s}.{n}" if s else n): n for s in ("", *SECTIONS) for n in _fields(s) if n not in ALIASES}
    hint = "" if name in ELSEWHERE else did_you_mean(shown, everything) or did_you_mean(name, everything.values())
    raise SpecError(f"{where}: unknown setting {shown!r}; {hint or meant(shown, everything)}")


def _in_folder(value: Any, folder: Path) -> Any:
    """A path that exists only in the folder of the spec file, made to point there; anything else as it is."""
    if isinstance(value, Mapping) and "call" in value:  # a callback
        return {**value, "call": _in_folder(value["call"], folder)}
    if not isinstance(value, str) or not value:
        return value
    file = value.partition(":")[0] if value.endswith(".py") or ".py:" in value else value
    if not os.path.exists(file) and os.path.exists(folder / file) and ("/" in file or "." in file):
        return str(folder / value)
    return value
