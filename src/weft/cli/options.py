"""Options of commands: those that several share, and tables of options, that of a run among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from weft.core.run_options import options_of

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:N.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting: --set train.lr=0.02, --set model.hidden=[16,64]; repeat.",
    ),
]


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


FUSE = ShellOption(
    "fuse",
    bool,
    "Train tasks that can be fused as one group, or each by itself.",
    shown="backfill fuses, the others do not",
    flag="--fuse/--no-fuse",
)


def run_options(reader: str) -> tuple[ShellOption, ...]:
    """A shell option for every row of the table of :class:`RunOptions` that ``reader`` reads and a shell can give."""
    rows = []
    for row in options_of(reader):
        rule, shell = row.metadata["rule"], row.metadata["shell"]
        if shell["help"]:
            kind = rule.kind if rule.parse is None and rule.kind in (bool, int, float) else str
            flag = f"--{row.name}/--no-{row.name}" if kind is bool else ""
            kind, default = (list[str], None) if rule.kind is tuple else (kind, row.default)
            rows.append(ShellOption(row.name, kind, default=default, flag=flag, **shell))
    return tuple(rows)


def takes(*rows: ShellOption) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options ``rows``, whose values it takes as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for row in rows:
            flag = row.flag or f"--{row.name.replace('_', '-')}"
            info = typer.Option(flag, help=row.help, metavar=row.metavar, show_default=row.shown or True)
            annotation = Annotated[row.kind | None if row.default is None else row.kind, info]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(row.name, keyword, default=row.default, annotation=annotation))
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def shell_arguments(reader: str, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give ``values`` of the options that ``reader`` reads."""
    words = []
    for row in run_options(reader):
        value, name = values.get(row.name, row.default), row.name.replace("_", "-")
        if isinstance(value, (list, tuple)):
            words += [word for item in value for word in (f"--{name}", item)]
        elif value != row.default:
            words += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words
