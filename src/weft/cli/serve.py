"""``weft serve``: a queue of trainings for a team, on the devices of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.core.errors import SpecError
from weft.core.units import parse_bytes


def serve(
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8787",
    db: Annotated[Path, typer.Option(metavar="FILE", help="The queue; runs are kept in FILE.runs.")] = Path("weft.db"),
    workers: Annotated[int, typer.Option(metavar="N", help="Groups that may run at once on each device.")] = 1,
    inference_workers: Annotated[
        int, typer.Option(metavar="N", help="Of the workers of each device, kept for inference tasks.")
    ] = 0,
    devices: Annotated[
        list[str] | None,
        typer.Option("--devices", metavar="NAME", help="cpu, cuda:0, ...; repeat.", show_default="every GPU, or cpu"),
    ] = None,
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
        typer.Option(metavar="FILE", help="Lines of 'USER TOKEN'.", show_default="FILE.token, made beside the queue"),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token; on loopback only.")] = False,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Policy that decides what starts; `weft queue simulate` compares them.")
    ] = "backfill",
    budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory per device for all tasks.", show_default="what is free"),
    ] = None,
    keep_graphs: Annotated[
        str, typer.Option(metavar="BYTES", help="Graphs that each worker keeps between groups, out of the budget.")
    ] = "512MiB",
    pool: Annotated[
        bool, typer.Option("--pool", help="Allocate --keep-graphs as one buffer, with the state of groups in it.")
    ] = False,
    mps: Annotated[
        bool, typer.Option("--mps/--no-mps", help="Start NVIDIA's MPS for several workers of a GPU, if installed.")
    ] = True,
    allow_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CALLABLE", help="A model of your own that tasks may name; MODULE:* for all; repeat."
        ),
    ] = None,
    graphs: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Graphs that tasks may name by path.")] = None,
    allow_downloads: Annotated[
        bool, typer.Option("--allow-downloads", help="Let tasks name graphs that are downloaded.")
    ] = False,
    quota: Annotated[int, typer.Option(metavar="N", help="Tasks per user that have not ended.")] = 10_000,
    checkpoint_seconds: Annotated[float, typer.Option(metavar="S", help="Between two checkpoints of a group.")] = 30.0,
    hang_seconds: Annotated[
        float, typer.Option(metavar="S", help="Seconds without progress after which a worker is ended.")
    ] = 900.0,
    drain_seconds: Annotated[float, typer.Option(metavar="S", help="For running groups to save at the end.")] = 60.0,
    keep_days: Annotated[
        float | None,
        typer.Option(metavar="D", help="Delete tasks that ended so long ago, with their files.", show_default="never"),
    ] = None,
) -> None:
    """Run the queue: take tasks over HTTP, train them on the devices of this machine, keep their results.

    Tasks are settings, never code: models are Weft's own, or import paths that --allow-model names. The queue survives
    kill -9 of any process: start the server again with the same --db. SIGTERM and Ctrl-C let running groups save a
    checkpoint first. The dashboard is at the address that is printed.
    """
    from weft.serve.options import ServeOptions, check_amount
    from weft.serve.server import check_devices, find_tokens, make_folder, parse_address
    from weft.serve.server import serve as run_server

    host, port = parse_address(bind)
    check_amount("drain_seconds", drain_seconds, zero=True)
    if keep_days is not None:
        check_amount("keep_days", keep_days, "days")
    if on is not None:
        devices = _devices_on(on, devices)
    options = ServeOptions(
        db=db.absolute(),
        devices=tuple(devices or ("auto",)),
        workers=workers,
        inference_workers=inference_workers,
        policy=policy,
        budget=None if budget is None else parse_bytes(budget),
        models=tuple(allow_model or ()),
        graphs=graphs,
        downloads=allow_downloads,
        quota=quota,
        keep_graphs=parse_bytes(keep_graphs, "keep_graphs"),
        pool=pool,
        mps=mps,
        checkpoint_seconds=checkpoint_seconds,
        hang_seconds=hang_seconds,
        keep_seconds=None if keep_days is None else keep_days * 86_400,
    )
    check_devices(options)
    make_folder(options.db.parent)
    tokens, file = find_tokens(options.db, token, no_auth, host)
    known = f"token in {file}" if file is not None else "no token is needed"
    told = f"weft: serving {db} at http://{bind} ({known})"
    run_server(options, host, port, tokens, drain_seconds, lambda: print(told, file=sys.stderr, flush=True))


def _devices_on(on: str, devices: list[str] | None) -> list[str]:
    """The devices of a cluster."""
    from weft.cluster.ray import connect, device_names, nodes_of

    if devices:
        raise SpecError(f"--devices {devices[0]} does not go with --on {on}: the cluster says what it has")
    ray, _ = connect(on)
    return list(device_names(nodes_of(ray)))
