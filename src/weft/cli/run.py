"""``weft run``: train the task or sweep of a spec file, or run a saved plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.format import aligned
from weft.cli.options import Changes, run_options, shell_arguments, takes
from weft.cli.spec import spec_and_section, spec_of, tuned_spec_of, with_section
from weft.core.errors import SpecError
from weft.core.run_options import TUNERS, RunOptions
from weft.core.spec_file import read_with_options
from weft.core.startup import gc_paused
from weft.core.wording import option
from weft.engine.control import Interrupted

if TYPE_CHECKING:
    from weft.core.event import Event
    from weft.core.plan import Plan
    from weft.core.sweep import Sweep
    from weft.core.task import Task
    from weft.engine.result import Result
    from weft.engine.sweep_result import SweepResult
    from weft.planner.report.plan_report import PlanReport

FAILED = 3  # exit code: every member of a sweep failed
PROGRESS = ("auto", "live", "plain", "json", "none")
MOST_TOLD = 8  # members that went wrong
Out = Annotated[
    Path | None, typer.Option(help="Folder for checkpoints, result.json, weights, report.", show_default="runs/SPEC")
]
Progress = Annotated[
    str,
    typer.Option(
        metavar="|".join(PROGRESS),
        help="live: a table that is redrawn; plain: lines of text; json: a line per event.",
        show_default="live on a terminal, else plain",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the checkpoints in --out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run that is in --out.")]


@takes(*run_options("run"))
def run(
    spec: Annotated[
        Path,
        typer.Argument(
            help="TOML file that describes a task or a sweep, or a plan that `weft plan --out FILE.json` wrote.",
            metavar="SPEC.toml|PLAN.json",
        ),
    ],
    out: Out = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --progress json.")] = False,
    progress: Progress = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add the seeds, settings or epochs that the run in --out lacks.")
    ] = False,
    changes: Changes = None,
    gpus: Annotated[int | None, typer.Option(help="Split the graph over so many GPUs.", show_default="1")] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray|ray://HOST:PORT", help="Train on the nodes of a Ray cluster.", show_default="here"),
    ] = None,
    **given: Any,
) -> None:
    """Train the task or sweep in SPEC and write checkpoints, result.json, weights and a report to --out.

    A plan is run exactly as it was made, with the same groups and choices, or refused with the reason.

    A list in SPEC is a grid: every combination is trained, all of them together. Shows live progress on a
    terminal and lines of text otherwise, both on stderr, then a summary on stdout; --json prints a line of JSON per
    event instead. Ctrl-C finishes the epoch, saves a
    checkpoint and says how to resume.
    A run that is in --out already is kept: choose --resume, --extend or --overwrite, or answer the question on a
    terminal.

    Exit codes: 0 done, 2 a mistake in the spec or graph, 3 training failed (of a sweep: every member),
    4 it does not fit into --budget (of a plan: into what is free), 130 interrupted.
    """
    folder = out if out is not None else Path("runs") / spec.stem
    shown = _progress(progress, json)
    if on is not None:
        for name, value in {"resume": resume, "extend": extend}.items():
            if value:
                raise SpecError(f"--{name} does not go with --on {on}: every node trains its share on one device")
        if spec.suffix == ".json":
            raise SpecError(f"{spec} is a plan for one machine; give the spec itself to --on {on}")
        from weft.cluster.ray import run_on_ray

        work, section = read_with_options(spec, changes or [])
        options = over_gpus(gpus, with_section(section, "run", given))
        result = run_on_ray(work, on, out=folder, overwrite=overwrite, options=options, **_display(shown))
        _conclude(result, folder, shown)
        return
    section = {} if spec.suffix == ".json" else spec_and_section(spec, changes or [])[1]
    options = over_gpus(gpus, with_section(section, "run", given))
    work = _read(spec, changes or [], options)  # mistakes are reported before torch is loaded
    with gc_paused():
        from weft.engine.run import run as train

    if options.ranks > 1:
        from weft.dist.launch import is_first_rank

        shown = shown if is_first_rank() else "none"
    flags = {"resume": resume, "overwrite": overwrite, "extend": extend}
    more = [word for change in changes or () for word in ("--set", change)]
    more += shell_arguments("run", given) + ([] if gpus is None else ["--gpus", str(gpus)])
    _train(partial(train, work, options=options), flags, folder, shown, ["weft", "run", str(spec)], more)


@takes(*run_options("tune"), *run_options("run"))
def tune(
    spec: Annotated[
        Path, typer.Argument(help="TOML file of a sweep, whose lists and ranges are the space.", metavar="SPEC.toml")
    ],
    out: Out = None,
    progress: Progress = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    changes: Changes = None,
    **given: Any,
) -> None:
    """Search the space of SPEC with a tuner: trials train together, and others take the place of those that end.

    Tuner, number of trials and settings of the tuner may stand in a section [tune] of SPEC. Ctrl-C saves a checkpoint;
    --resume continues with the same trials and numbers. Exit codes are those of `weft run`.
    """
    folder = out if out is not None else Path("runs") / spec.stem
    shown = _progress(progress, json=False)
    work, options = tuned_spec_of(spec, changes or [], "run", given)  # mistakes are reported before torch is loaded
    if options.tuner is None:
        raise SpecError(f"{option('tuner')} says who chooses the trials: {', '.join(TUNERS)}; it may stand in [tune]")
    with gc_paused():
        from weft.engine.run import run as train

    more = [word for change in changes or () for word in ("--set", change)]
    more += shell_arguments("tune", given) + shell_arguments("run", given)
    flags = {"resume": resume, "overwrite": overwrite}
    _train(partial(train, work, options=options), flags, folder, shown, ["weft", "tune", str(spec)], more)


def _train(
    train: Callable[..., Any], flags: dict[str, bool], folder: Path, shown: str, command: list[str], more: list[str]
) -> None:
    """Train and show what came of it; ``command`` and ``more``: the words that continue it, around its folder."""
    if shown == "live" and not any(flags.values()):
        flags["resume"], flags["overwrite"] = _ask(folder)
    try:
        result = train(out=folder, **flags, **_display(shown))
    except Interrupted as interruption:
        command += ["--out", str(folder), "--extend" if flags.get("extend") else "--resume", *more]
        print(f"weft: interrupted after epoch {interruption.epoch}; continue with:", file=sys.stderr)
        print(f"  {shlex.join(command)}", file=sys.stderr)
        raise typer.Exit(interruption.exit_code) from None
    _conclude(result, folder, shown)


def _display(shown: str) -> dict[str, Any]:
    """What a run is given so that it shows itself as ``shown``: ``progress`` and ``on_event``."""
    progress = {"live": True, "plain": "plain"}.get(shown, False)

    def print_event(event: Event) -> None:
        if event.kind != "rows":  # progress says how far it is; every epoch is in the journal
            print(event.to_json(), flush=True)

    return {"progress": progress, "on_event": print_event if shown == "json" else None}


def _conclude(result: Result | SweepResult, folder: Path, shown: str) -> None:
    from weft.engine.sweep_result import SweepResult

    live = shown in ("live", "plain")
    if isinstance(result, SweepResult):
        usable = any(member.metrics["best_epoch"] for member in result)
        if live:
            ends = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
            print(f"{len(result)} tasks: {ends}; {result.seconds:.1f} s")
            parts = result.by_graph()
            for graph, part in parts.items():
                where = f" on {graph}" if len(parts) > 1 else ""
                print(f"best{where}: {_best_words(part)}")
            _show_files(result.plan, folder)
        wrong = [member.message for member in result if member.status in ("diverged", "failed")]
        for message in wrong[:MOST_TOLD]:
            print(f"weft: {message}", file=sys.stderr)
        if len(wrong) > MOST_TOLD:
            print(f"weft: ... and {len(wrong) - MOST_TOLD} more, all in {folder / 'report.html'}", file=sys.stderr)
        if not usable:
            print("weft: error: every member of the sweep failed", file=sys.stderr)
            raise typer.Exit(FAILED)
    elif live:
        _show_summary(result, folder)


def _read(spec: Path, changes: list[str], options: RunOptions) -> Task | Sweep | PlanReport:
    """What SPEC holds: a task, a sweep or, in a JSON file, a plan, which has decided everything already."""
    if spec.suffix != ".json":
        return spec_of(spec, changes)
    from weft.engine.loading import read_plan

    decided = [f"--set {change}" for change in changes]
    decided += [option(name, value) for name, value in options.for_plan.items() if name != "budget"]
    if decided:
        raise SpecError(f"{decided[0]}: {spec} is a plan, which is run as it is; give that to `weft plan`")
    return read_plan(spec)


def _ask(folder: Path) -> tuple[bool, bool]:
    """Whether to resume or to overwrite a run that is in ``folder``; neither without a terminal to ask on."""
    from weft.engine.folder import holds_run

    if not holds_run(folder) or not sys.stdin.isatty():
        return False, False
    question = f"{folder} holds a run already. Resume it, overwrite it, or quit? [r/o/q]"
    answer = typer.prompt(question, default="q", show_default=False, err=True).strip().lower()
    return answer.startswith("r"), answer.startswith("o")


def _progress(choice: str, json: bool) -> str:
    """How to show what happens: ``live``, ``plain``, ``json`` or ``none``."""
    if choice not in PROGRESS:
        raise SpecError(f"--progress {choice}: must be one of {', '.join(PROGRESS)}")
    if json and choice not in ("auto", "json"):
        raise SpecError(f"--json and --progress {choice}: give one of the two")
    if json:
        return "json"
    return choice if choice != "auto" else "live" if sys.stdout.isatty() else "plain"


def _show_summary(result: Result, folder: Path) -> None:
    metrics, name = result.metrics, result.metrics["metric"]
    rows = [("split", name.replace("_", " "), "loss")]
    for split in ("train", "val", "test"):
        if f"{split}_{name}" in metrics:
            rows.append((split, f"{metrics[f'{split}_{name}']:.4f}", f"{metrics[f'{split}_loss']:.4f}"))
    print("\n".join(aligned(rows, right=range(1, 3))))
    early = ", stopped early" if result.status == "stopped" else ""
    print(
        f"best epoch {metrics['best_epoch']} of {metrics['epochs_run']} run{early}; "
        f"{metrics['seconds']:.1f} s, {metrics['seconds_per_epoch'] * 1e3:.2f} ms per epoch"
    )
    _show_files([result.plan], folder)


def _show_files(plans: Sequence[Plan], folder: Path) -> None:
    from weft.engine.page import cache_words

    print(*filter(None, dict.fromkeys(map(cache_words, plans))), f"report: {folder / 'report.html'}", sep="\n")


def _best_words(result: SweepResult) -> str:
    """The best settings on one graph by their mean over seeds, and the best single training."""
    if not any(member.metrics["best_epoch"] for member in result):
        return "none: no member reached an evaluation"
    best, metric = result.best(), result.metric.partition("_")[2]
    values = {split: best.metrics.get(f"{split}_{metric}") for split in ("val", "test")}
    words = ", ".join(f"{split} {metric} {value:.4f}" for split, value in values.items() if value is not None)
    settings, single = result.best_settings(), f"{best.name} ({words})"
    return f"{settings}; best single training: {single}" if len(settings.members) > 1 else single


def over_gpus(gpus: int | None, given: Mapping[str, Any]) -> RunOptions:
    """The options of a run; ``gpus``: one rank per GPU."""
    if gpus is None:
        return RunOptions.of(**given)
    if gpus < 1:
        raise SpecError(f"--gpus {gpus}: must be at least 1")
    if given["ranks"] != 1:
        raise SpecError(
            f"--gpus {gpus} and --ranks {given['ranks']}: --gpus starts one rank per GPU; give one of the two"
        )
    if given["device"] not in ("auto", "cuda"):
        raise SpecError(f"--gpus {gpus} with --device {given['device']}: give one of the two, or --ranks {gpus}")
    import torch

    there = torch.cuda.device_count()
    if gpus > there:
        instead = f"--ranks {gpus} --device {'cuda:0' if there else 'cpu'}"
        raise SpecError(f"--gpus {gpus}: this machine has {there} GPUs; {instead} lets ranks share what there is")
    return RunOptions.of(**{**given, "ranks": gpus, "device": "cuda"})
