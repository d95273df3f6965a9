"""``weft run``: train the task or sweep of a spec file, or run a saved plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.cli.spec import spec_of
from weft.core.errors import SpecError
from weft.core.event import Event
from weft.core.spec_file import read_spec
from weft.core.startup import gc_paused
from weft.engine.control import Interrupted

if TYPE_CHECKING:
    from weft.core.plan import Plan
    from weft.core.sweep import Sweep
    from weft.core.task import Task
    from weft.engine.result import Result
    from weft.engine.sweep_result import SweepResult
    from weft.planner.report.plan_report import PlanReport

FAILED = 3  # exit code: every member of a sweep failed
PROGRESS = ("auto", "live", "plain", "json", "none")
MOST_TOLD = 8  # members that went wrong

Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile steps with Inductor, or never.",
        show_default="on a GPU, if predicted to pay off",
    ),
]
PLACES = "gpu, host (pinned), cached (host, the most used also on the GPU) or disk (a saved graph's files)."
Features = Annotated[
    str | None,
    typer.Option(help=f"Sampled training: where features are kept: {PLACES}", show_default="the first that fits"),
]
Topology = Annotated[
    str | None, typer.Option(help="Where edges are kept; the same choices.", show_default="the first that fits")
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Of the device, for the cache: 2GiB.", show_default="what the budget leaves"),
]
Divide = Annotated[
    str | None,
    typer.Option(
        metavar="elastic|fixed|SHARE",
        help="How sampled batches are divided between host and GPU; SHARE: of the GPU, 0 to 1.",
        show_default="elastic",
    ),
]
CachePolicy = Annotated[
    str | None,
    typer.Option(
        help="What the cache holds, by: degree, presampling, benefit.", show_default="degree, benefit for edges"
    ),
]
Weave = Annotated[
    bool | None,
    typer.Option(
        "--weave/--no-weave",
        help="Merge tasks of different structure into one step, or train them in turn.",
        show_default="concurrent on a GPU that they do not fill",
    ),
]


def run(
    spec: Annotated[
        Path,
        typer.Argument(
            help="TOML file that describes a task or a sweep, or a plan that `weft plan --out FILE.json` wrote.",
            metavar="SPEC.toml|PLAN.json",
        ),
    ],
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:N.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, result.json, weights, report.", show_default="runs/SPEC"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --progress json.")] = False,
    progress: Annotated[
        str,
        typer.Option(
            metavar="auto|live|plain|json|none",
            help="live: a table that is redrawn; plain: lines of text; json: a line per event.",
            show_default="live on a terminal, else json",
        ),
    ] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoints in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is in --out.")] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add the seeds, settings or epochs that the run in --out lacks.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting: --set train.lr=0.02, --set model.hidden=[16,64]; repeat.",
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(help="End members of a sweep that are not worth training on: median.", show_default="none"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Memory it may take, such as 24GiB.", show_default="what is free on the device"
        ),
    ] = None,
    weave: Weave = None,
    compile: Compile = None,
    gpus: Annotated[int | None, typer.Option(help="Split the graph over so many GPUs.", show_default="1")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Split the graph over this many processes on --device.", show_default="1")
    ] = None,
    features: Features = None,
    topology: Topology = None,
    cache: Cache = None,
    cache_policy: CachePolicy = None,
    division: Divide = None,
    order: Annotated[
        str, typer.Option(help="With --gpus or --ranks: renumber the nodes first: given, degree, bfs, rcm, metis.")
    ] = "given",
    peers: Annotated[
        str, typer.Option(help="With --gpus: memory that ranks read each other's rows from: ipc, symmetric, nvshmem.")
    ] = "auto",
    on: Annotated[
        str | None,
        typer.Option(metavar="ray|ray://HOST:PORT", help="Train on the nodes of a Ray cluster.", show_default="here"),
    ] = None,
) -> None:
    """Train the task or sweep in SPEC and write checkpoints, result.json, weights and a report to --out.

    A plan is run exactly as it was made, with the same groups and choices, or refused with the reason.

    A list in SPEC is a grid: every combination is trained, all of them together. Shows live progress on a
    terminal and prints JSON lines otherwise (--progress plain: lines of text). Ctrl-C finishes the epoch, saves a
    checkpoint and says how to resume.
    A run that is in --out already is kept: choose --resume, --extend or --overwrite, or answer the question on a
    terminal.

    Exit codes: 0 done, 2 a mistake in the spec or graph, 3 training failed (of a sweep: every member),
    4 it does not fit into --budget (of a plan: into what is free), 130 interrupted.
    """
    if on is not None:
        given = {
            "--resume": resume,
            "--extend": extend,
            "--prune": prune,
            "--weave": weave,
            "--compile": compile,
            "--gpus": gpus,
        }
        given |= {"--ranks": ranks, "--order": None if order == "given" else order}
        given |= {"--peers": None if peers == "auto" else peers}
        given |= {"--features": features, "--topology": topology, "--cache": cache, "--cache-policy": cache_policy}
        given |= {"--division": division}
        _run_on_cluster(on, spec, changes or [], given, device, out, overwrite, budget)
        return
    places = {"features": features, "topology": topology, "cache": cache, "cache_policy": cache_policy}
    places["division"] = division
    work = _read(spec, changes or [], places, weave=weave, compile=compile)  # a mistake is told before torch is loaded
    with gc_paused():
        from weft.engine.background_probe import is_wanted, start_probe
        from weft.engine.run import is_first_rank
        from weft.engine.run import run as train
        from weft.engine.sweep_result import SweepResult

    folder = out if out is not None else Path("runs") / spec.stem
    asked = {"--gpus": gpus, "--ranks": ranks}
    count, device = ranks_for(gpus, ranks, device)
    first = count == 1 or is_first_rank()
    shown = _progress(progress, json) if first else "none"
    live = shown in ("live", "plain")
    probes = shown == "live" and is_wanted()  # for a person at a terminal; scripts are left no process behind
    if shown == "live" and not resume and not overwrite and not extend:
        resume, overwrite = _ask(folder)
    try:
        result = train(
            work,
            device=device,
            out=folder,
            resume=resume,
            overwrite=overwrite,
            extend=extend,
            progress=True if shown == "live" else shown if shown == "plain" else False,
            on_event=_print_line if shown == "json" else None,
            prune=prune,
            budget=budget,
            weave=weave,
            compile=compile,
            ranks=count,
            **places,
            order=order,
            peers=peers,
        )
    except Interrupted as interruption:
        options = {"--device": None if device == "auto" or gpus else device, "--prune": prune, "--budget": budget}
        options |= {name: None if number is None else str(number) for name, number in asked.items()}
        options |= {f"--{name.replace('_', '-')}": place for name, place in places.items()}
        options |= {"--order": None if order == "given" else order, "--peers": None if peers == "auto" else peers}
        chosen = {"weave": weave, "compile": compile}
        flags = ["--extend" if extend else "--resume"]
        flags += [f"--{name}" if choice else f"--no-{name}" for name, choice in chosen.items() if choice is not None]
        _say_how_to_resume(interruption, spec, folder, changes or [], options, flags)
        raise typer.Exit(interruption.exit_code) from None
    if isinstance(result, SweepResult):
        _conclude_sweep(result, folder, live)
    elif live:
        _show_summary(result, folder)
    if probes and (told := start_probe(device)):
        print(told, file=sys.stderr)


def _run_on_cluster(
    on: str,
    spec: Path,
    changes: list[str],
    given: Mapping[str, object],
    device: str,
    out: Path | None,
    overwrite: bool,
    budget: str | None,
) -> None:
    """Train on a cluster; ``given``: options that a cluster cannot do."""
    asked = [name for name, value in given.items() if value]
    if asked:
        raise SpecError(f"{asked[0]} does not go with --on {on}: every node trains its share on one device")
    if spec.suffix == ".json":
        raise SpecError(f"{spec} is a plan for one machine; give the spec itself to --on {on}")
    from weft.cluster.ray import run_on_ray
    from weft.engine.sweep_result import SweepResult

    folder = out if out is not None else Path("runs") / spec.stem
    options = {"device": device, "out": folder, "overwrite": overwrite, "budget": budget}
    result = run_on_ray(read_spec(spec, changes), on, on_event=_print_line, **options)
    if isinstance(result, SweepResult):
        _conclude_sweep(result, folder, live=False)


def _read(
    spec: Path, changes: list[str], places: Mapping[str, str | None], **choices: bool | None
) -> Task | Sweep | PlanReport:
    """What SPEC holds: a task, a sweep or, in a JSON file, a plan, which has decided everything already."""
    if spec.suffix != ".json":
        return spec_of(spec, changes)
    from weft.engine.plan import read_plan

    asked = [f"--set {change}" for change in changes]
    asked += [f"--{'' if choice else 'no-'}{name}" for name, choice in choices.items() if choice is not None]
    asked += [f"--{name.replace('_', '-')} {place}" for name, place in places.items() if place is not None]
    if asked:
        raise SpecError(f"{asked[0]}: {spec} is a plan, which is run as it is; give that to `weft plan`")
    return read_plan(spec)


def _ask(folder: Path) -> tuple[bool, bool]:
    """Whether to resume or to overwrite a run that is in ``folder``; neither without a terminal to ask on."""
    from weft.engine.folder import holds_run

    if not holds_run(folder) or not sys.stdin.isatty():
        return False, False
    question = f"{folder} holds a run already. Resume it, overwrite it, or quit? [r/o/q]"
    answer = typer.prompt(question, default="q", show_default=False, err=True).strip().lower()
    return answer.startswith("r"), answer.startswith("o")


def _progress(asked: str, json: bool) -> str:
    """How to show what happens: ``live``, ``plain``, ``json`` or ``none``."""
    if asked not in PROGRESS:
        raise SpecError(f"--progress {asked}: must be one of {', '.join(PROGRESS)}")
    if json and asked not in ("auto", "json"):
        raise SpecError(f"--json and --progress {asked}: give one of the two")
    if json:
        return "json"
    return asked if asked != "auto" else "live" if sys.stdout.isatty() else "json"


def _print_line(event: Event) -> None:
    print(event.to_json(), flush=True)


def _say_how_to_resume(
    interruption: Interrupted,
    spec: Path,
    folder: Path,
    changes: list[str],
    options: Mapping[str, str | None],
    flags: list[str],
) -> None:
    command = ["weft", "run", str(spec), "--out", str(folder), *flags]
    for change in changes:
        command += ["--set", change]
    for name, value in options.items():
        command += [name, value] if value is not None else []
    print(f"weft: interrupted after epoch {interruption.epoch}; continue with:", file=sys.stderr)
    print(f"  {shlex.join(command)}", file=sys.stderr)


def _show_summary(result: Result, folder: Path) -> None:
    metrics, name = result.metrics, result.metrics["metric"]
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for heading in ("split", name.replace("_", " "), "loss"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split in ("train", "val", "test"):
        if f"{split}_{name}" in metrics:
            table.add_row(split, f"{metrics[f'{split}_{name}']:.4f}", f"{metrics[f'{split}_loss']:.4f}")
    console = Console()
    console.print(table)
    early = ", stopped early" if result.status == "stopped" else ""
    console.print(
        f"best epoch {metrics['best_epoch']} of {metrics['epochs_run']} run{early}; "
        f"{metrics['seconds']:.1f} s, {metrics['seconds_per_epoch'] * 1e3:.2f} ms per epoch",
        highlight=False,
    )
    _show_caches(console, [result.plan])
    console.print(f"report: {folder / 'report.html'}", highlight=False)


def _show_caches(console: Console, plans: Sequence[Plan]) -> None:
    from weft.engine.page import cache_words

    for words in dict.fromkeys(map(cache_words, plans)):
        if words:
            console.print(words, highlight=False)


def _conclude_sweep(result: SweepResult, folder: Path, live: bool) -> None:
    usable = any(member.metrics["best_epoch"] for member in result)
    if live:
        _show_sweep(result, folder)
    wrong = [member.message for member in result if member.status in ("diverged", "failed")]
    for message in wrong[:MOST_TOLD]:
        print(f"weft: {message}", file=sys.stderr)
    if len(wrong) > MOST_TOLD:
        print(f"weft: ... and {len(wrong) - MOST_TOLD} more, all in {folder / 'report.html'}", file=sys.stderr)
    if not usable:
        print("weft: error: every member of the sweep failed", file=sys.stderr)
        raise typer.Exit(FAILED)


def _show_sweep(result: SweepResult, folder: Path) -> None:
    console = Console()
    ends = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
    console.print(f"{len(result)} tasks: {ends}; {result.seconds:.1f} s", highlight=False)
    parts = result.by_graph()
    for graph, part in parts.items():
        where = f" on {escape(graph)}" if len(parts) > 1 else ""
        console.print(f"best{where}: {_best_words(part)}", highlight=False)
    _show_caches(console, result.plan)
    console.print(f"report: {folder / 'report.html'}", highlight=False)


def _best_words(result: SweepResult) -> str:
    """The best member on one graph, and its scores."""
    if not any(member.metrics["best_epoch"] for member in result):
        return "none: no member reached an evaluation"
    best, metric = result.best(), result.metric.partition("_")[2]
    values = {split: best.metrics.get(f"{split}_{metric}") for split in ("val", "test")}
    words = ", ".join(f"{split} {metric} {value:.4f}" for split, value in values.items() if value is not None)
    settings = result.best_settings()
    over_what = "seeds" if settings.splits == 1 else "splits"
    over_seeds = f"; best settings over {over_what}: {escape(str(settings))}" if len(settings.members) > 1 else ""
    return f"[bold]{escape(best.name)}[/] ({words}){over_seeds}"


def ranks_for(gpus: int | None, ranks: int | None, device: str) -> tuple[int, str]:
    """How many ranks ``--gpus`` or ``--ranks`` ask for, and on which device."""
    for name, number in (("--gpus", gpus), ("--ranks", ranks)):
        if number is not None and number < 1:
            raise SpecError(f"{name} {number}: must be at least 1")
    if gpus is None:
        return ranks or 1, device
    if ranks is not None:
        raise SpecError(f"--gpus {gpus} and --ranks {ranks}: --gpus starts one rank per GPU; give one of the two")
    if device not in ("auto", "cuda"):
        raise SpecError(f"--gpus {gpus} with --device {device}: give one of the two, or --ranks {gpus}")
    import torch

    there = torch.cuda.device_count()
    if gpus > there:
        instead = f"--ranks {gpus} --device {'cuda:0' if there else 'cpu'}"
        raise SpecError(f"--gpus {gpus}: this machine has {there} GPUs; {instead} lets ranks share what there is")
    return gpus, "cuda"
