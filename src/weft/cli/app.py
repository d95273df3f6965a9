"""The commands of ``weft`` and their parser."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weft.cli import remote
from weft.cli.data import app as data
from weft.cli.job import job
from weft.cli.machine import cache, probe, warm
from weft.cli.plan import plan
from weft.cli.predict import export, predict
from weft.cli.queue import app as queue
from weft.cli.run import run, tune
from weft.cli.runs import compare, ls
from weft.cli.serve import app as serve
from weft.core.version import __version__

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="weft",
    help="Train many graph neural networks at once, safely and at hardware speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which folds the lines of a docstring anew
    context_settings=HELP,
)
for command in (run, tune, plan, job, ls, compare, predict, export, probe, warm, cache):
    app.command()(command)
for name in ("submit", "watch", "show", "cancel", "pause", "resume", "logs", "fetch", "report"):
    app.command()(getattr(remote, name))
queue.command("list")(remote.list_tasks)
queue.command("sweeps")(remote.list_sweeps)
queue.command("show")(remote.show)
app.add_typer(data, name="data")
app.add_typer(queue, name="queue")
app.add_typer(serve, name="serve")


@queue.callback(invoke_without_command=True)
def _queue(context: typer.Context) -> None:
    """The queue of a server: without a command, its tasks."""
    if context.invoked_subcommand is None:
        remote.list_tasks()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


def parser() -> Any:
    """The parser of all commands, whose help shows no ``<bool>`` after flags: they take no value."""
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for option in command.get_params(typer.Context(command, **HELP)):
            if getattr(option, "is_flag", False):
                option.metavar = ""
    return commands[0]
