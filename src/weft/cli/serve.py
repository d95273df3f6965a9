"""``weft serve``: a queue of trainings for a team, on the devices of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.options import FUSE, ShellOption, takes
from weft.core.errors import SpecError
from weft.core.units import parse_bytes

SERVED = (
    ShellOption("workers", int, "Groups that may run at once on each device.", "N", default=1),
    ShellOption("inference_workers", int, "Of the workers of each device, kept for inference tasks.", "N", default=0),
    ShellOption("devices", list[str], "cpu, cuda:0, ...; repeat.", "NAME", "every GPU, or cpu"),
    ShellOption(
        "policy",
        str,
        "Policy that decides what starts; `weft queue simulate` compares them.",
        "NAME",
        default="backfill",
    ),
    FUSE,
    ShellOption("budget", str, "Memory per device for all tasks.", "BYTES", "what is free"),
    ShellOption(
        "keep_graphs",
        str,
        "Graphs that each worker keeps between groups, out of the budget.",
        "BYTES",
        default="512MiB",
    ),
    ShellOption(
        "mps",
        bool,
        "Start NVIDIA's MPS for several workers of a GPU, if installed.",
        default=True,
        flag="--mps/--no-mps",
    ),
    ShellOption(
        "models",
        list[str],
        "A model of your own that tasks may name; MODULE:* for all; repeat.",
        "MODULE:CALLABLE",
        flag="--allow-model",
    ),
    ShellOption("graphs", Path, "Graphs that tasks may name by path.", "FOLDER"),
    ShellOption(
        "downloads", bool, "Let tasks name graphs that are downloaded.", default=False, flag="--allow-downloads"
    ),
    ShellOption("quota", int, "Tasks per user that have not ended.", "N", default=10_000),
    ShellOption(
        "max_priority", int, "Highest priority that a user may give; the operator may give any.", "N", default=0
    ),
    ShellOption("time_limit", float, "Seconds that a task may run in all.", "S", "none"),
    ShellOption(
        "user_time_limit",
        float,
        "Seconds that tasks of one user may run in 24 hours; then their next tasks wait.",
        "S",
        "none",
    ),
    ShellOption("checkpoint_seconds", float, "Between two checkpoints of a group.", "S", default=30.0),
    ShellOption("hang_seconds", float, "Seconds without progress after which a worker is ended.", "S", default=900.0),
)

app = typer.Typer(
    invoke_without_command=True,
    subcommand_metavar="[backup ...]",
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
@takes(*SERVED)
def serve(
    context: typer.Context,
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8787",
    db: Annotated[Path, typer.Option(metavar="FILE", help="The queue; runs are kept in FILE.runs.")] = Path("weft.db"),
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray|ray://HOST:PORT",
            help="Train on the nodes of a Ray cluster, which must see FILE.runs.",
            show_default="this machine",
        ),
    ] = None,
    token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines of 'USER TOKEN'.", show_default="FILE.token, made next to the queue"),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token; on loopback only.")] = False,
    drain_seconds: Annotated[float, typer.Option(metavar="S", help="For running groups to save at the end.")] = 60.0,
    keep_days: Annotated[
        float | None,
        typer.Option(metavar="D", help="Delete tasks that ended so long ago, with their files.", show_default="never"),
    ] = None,
    **given: Any,
) -> None:
    """Run the queue: take tasks over HTTP, train them on the devices of this machine, keep their results.

    Tasks are settings, never code: models are Weft's own, or import paths that --allow-model names. The queue survives
    kill -9 of any process: start the server again with the same --db. SIGTERM and Ctrl-C let running groups save a
    checkpoint first. The dashboard is at the address that is printed.
    """
    if context.invoked_subcommand is not None:
        return
    from weft.serve.options import ServeOptions, check_option
    from weft.serve.server import check_devices, find_tokens, make_folder, parse_address
    from weft.serve.server import serve as run_server

    host, port = parse_address(bind)
    check_option("drain_seconds", drain_seconds)
    check_option("keep_days", keep_days)
    devices = given.pop("devices")
    if on is not None:
        if devices:
            raise SpecError(f"--devices {devices[0]} does not go with --on {on}: the cluster says what it has")
        from weft.cluster.ray import connect, device_names, nodes_of

        ray, _ = connect(on)
        devices = device_names(nodes_of(ray))
    budget, keep_graphs = given.pop("budget"), given.pop("keep_graphs")
    options = ServeOptions(
        db=db.resolve(),  # the folder of runs goes with the file, whatever name it was given by
        devices=tuple(devices or ("auto",)),
        budget=None if budget is None else parse_bytes(budget),
        keep_graphs=parse_bytes(keep_graphs, "keep_graphs"),
        keep_seconds=None if keep_days is None else keep_days * 86_400,
        models=tuple(given.pop("models") or ()),
        **given,
    )
    check_devices(options)
    make_folder(options.db.parent)
    tokens, file = find_tokens(options.db, token, no_auth, host)
    known = f"token in {file}" if file is not None else "no token is needed"
    sentence = f"weft: serving {db} at http://{bind} ({known})"
    run_server(options, host, port, tokens, drain_seconds, lambda: print(sentence, file=sys.stderr, flush=True))


@app.command()
def backup(
    db: Annotated[Path, typer.Argument(metavar="DB", help="The queue, as --db names it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The copy; it must not be there yet.")],
) -> None:
    """Copy the queue DB to the new file OUT, also while a server runs, and check the copy.

    The copy has every task as of now; the folder DB.runs, with weights and logs, is not part of it.
    """
    from weft.serve.queue_db import back_up

    print(f"{out}: {back_up(db.resolve(), out)} tasks, checked")
