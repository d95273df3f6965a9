"""``weft plan SPEC.toml``: predict memory and time of a spec file, before anything is allocated."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.format import check_file, write_file
from weft.cli.options import Changes, Json, run_options, takes
from weft.cli.spec import tuned_spec_of
from weft.core.errors import SpecError
from weft.core.event import finite
from weft.core.run_options import RunOptions
from weft.core.startup import gc_paused

DOES_NOT_FIT = 4


@takes(*run_options("plan"))
def plan(
    spec: Annotated[Path, typer.Argument(help="TOML file that describes a task or a sweep.", metavar="SPEC.toml")],
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="v100-32g, a100-40g, a100-80g, rtx4090, t4, a10, l40s, h100, h200, cpu, or a file of `weft probe`.",
            show_default="the one at hand",
        ),
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Also write the plan to a file, for `weft run FILE.json`.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Chart of the memory over a step: a page (.html) or a picture (.svg)."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also list the ways to train that were not chosen, and what each takes.")
    ] = False,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Gantt chart of the simulated schedule of host, bus and GPU: a page (.html) or a picture (.svg).",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Also predict a run over this many GPUs (on a CPU: ranks).", show_default="1")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="With --gpus: also say what an order of the nodes changes: degree, bfs, rcm, metis. Loads the graph."
        ),
    ] = None,
    changes: Changes = None,
    **given: Any,
) -> None:
    """Say what SPEC will take: peak memory and time of every task, groups, and the reason for every decision.

    Needs no GPU and starts none. Graphs of named shapes are not generated. A plan written with --out is run by
    `weft run FILE.json`: the same groups, in another process or on another machine with such a device.

    Exit codes: 0 it fits, 2 a mistake in the input, 4 it does not fit (the plan names the nearest that does).
    """
    if out is not None:
        if out.suffix != ".json":
            raise SpecError(f"--out {out}: must end in .json, by which `weft run` recognises plans")
        check_file(out)
    if gpus is not None and gpus < 1:
        raise SpecError(f"--gpus {gpus}: must be at least 1")
    RunOptions(order=order or "given")  # refuses an order that there is not
    if order is not None and gpus is None:
        raise SpecError(f"--order {order}: give --gpus as well; an order is of use over several GPUs only")
    # A mistake in it is said before torch is loaded.
    work, options = tuned_spec_of(spec, changes or [], "plan", given)
    for name, value in {"gpus": gpus, "out": out}.items():
        if value is not None and options.tuner is not None:
            raise SpecError(f"--{name} does not go with a tuner, whose trials are chosen while it runs on one device")
    with gc_paused():
        from weft.engine.charts import check_picture, write_schedules, write_timeline
        from weft.engine.plan import (
            effect_words,
            explanation,
            order_effects,
            over_the_whole_graph,
            schedules,
            shard_groups,
        )
        from weft.engine.plan import plan as make_plan

    if plot is not None:
        check_picture("--plot", plot)
    if simulate is not None:
        check_picture("--simulate", simulate)
    if gpus is not None and gpus > 1:
        work = over_the_whole_graph(work)
    report = make_plan(work, machine=machine, options=options)
    if out is not None:  # before printing: stdout may be closed (| head)
        write_file(out, report.to_json())
        if report.fits:
            print(f"run it as planned with: weft run {shlex.quote(str(out))}", file=sys.stderr)
    effects = [] if order is None or gpus is None else order_effects(report, gpus, order)
    counted = [after for _, after in effects] or None
    shards = [] if gpus is None else shard_groups(report, gpus, counted)
    if json:
        more = {"sharding": [estimate.to_dict() for estimate in shards]} if shards else {}
        if effects:
            more["order"] = [{"given": asdict(before), order: asdict(after)} for before, after in effects]
        print(jsonlib.dumps(finite({**report.to_dict(), **more}), allow_nan=False))
    else:
        print(report)
        if explain:
            print(explanation(report))
        for number, estimate in enumerate(shards, 1):
            print(f"\ngroup {number}, {estimate}")
            if effects:
                print(effect_words(*effects[number - 1]))
    if plot is not None:
        write_timeline(report, plot)
    if simulate is not None:
        write_schedules(schedules(report), simulate)
    fits = all(estimate.bytes_per_rank <= report.budget for estimate in shards) if shards else report.fits
    if not fits:
        raise typer.Exit(DOES_NOT_FIT)
