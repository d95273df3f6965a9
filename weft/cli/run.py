"""``weft run SPEC.toml``: train what a spec file describes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.core.event import Event
from weft.core.spec import read_spec
from weft.core.task import Task
from weft.engine.interrupt import Interrupted
from weft.engine.result import Result
from weft.engine.train import run as train


def run(
    spec: Annotated[Path, typer.Argument(help="TOML file that describes the task.", metavar="SPEC.toml")],
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:N.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, result.json, weights, report.", show_default="runs/SPEC"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout, on a terminal too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: --set train.lr=0.02; repeat."),
    ] = None,
) -> None:
    """Train the task in SPEC and write checkpoints, result.json, weights and a report to --out.

    Shows live progress on a terminal and prints JSON lines otherwise. Ctrl-C finishes the epoch, saves a
    checkpoint and says how to resume.

    Exit codes: 0 done, 2 a mistake in the spec or graph, 3 training failed, 130 interrupted.
    """
    task = read_spec(spec, changes or [])
    folder = out if out is not None else Path("runs") / spec.stem
    live = sys.stdout.isatty() and not json
    try:
        result = train(
            task,
            device=device,
            out=folder,
            resume=resume,
            progress=live,
            on_event=None if live else _print_line,
        )
    except Interrupted as interruption:
        _say_how_to_resume(interruption, spec, device, folder, changes or [])
        raise typer.Exit(interruption.exit_code) from None
    if live:
        _show_summary(task, result, folder)


def _print_line(event: Event) -> None:
    print(event.to_json(), flush=True)


def _say_how_to_resume(interruption: Interrupted, spec: Path, device: str, folder: Path, changes: list[str]) -> None:
    command = ["weft", "run", str(spec), "--out", str(folder), "--resume"]
    if device != "auto":
        command += ["--device", device]
    for change in changes:
        command += ["--set", change]
    print(f"weft: interrupted after epoch {interruption.epoch}; continue with:", file=sys.stderr)
    print(f"  {shlex.join(command)}", file=sys.stderr)


def _show_summary(task: Task, result: Result, folder: Path) -> None:
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
    console.print(f"report: {folder / 'report.html'}", highlight=False)
