"""``weft probe``: measure this machine, and correct its predictions by measured runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.files import write_file
from weft.core.errors import SpecError
from weft.core.machine import Machine
from weft.core.machine.processor import Processor
from weft.core.units import show_bytes, show_seconds
from weft.engine.probing.machine_load import MOST_BUSY, Look

if TYPE_CHECKING:
    import torch


def probe(
    out: Annotated[Path | None, typer.Option(help="Also write the machine to this JSON file.")] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:N.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="The machine as JSON on stdout.")] = False,
    learn_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--learn", metavar="RUNS", help="Do not measure: learn from the results of runs in this folder; repeat."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="With --learn: the machine that ran them.", show_default="this one"),
    ] = None,
) -> None:
    """Measure what this machine copies, gathers, multiplies and launches, for `weft plan` to use.

    With a GPU, its host and the bus between them are measured too. Takes some seconds. What it finds is kept for
    this host (see WEFT_HOME) and used by every later plan; --out writes a file that `weft plan --machine FILE`
    takes elsewhere.
    """
    if learn_from:
        _learn(learn_from, machine)
        return
    if machine is not None:
        raise SpecError(f"--machine {machine} goes with --learn; without it, this machine is measured")
    from weft.engine.base.device import choose_device  # loads torch, which --help can do without
    from weft.engine.base.machines import keep_probe

    begin, before = time.perf_counter(), Look.here()
    found = measure(choose_device(device))
    after = Look.here()
    kept = keep_probe(found)
    if out is not None:
        write_file(out, found.to_json())
    print(found.to_json() if json else describe(found))
    print(f"measured in {time.perf_counter() - begin:.1f} s, kept in {kept}", file=sys.stderr)
    if before and after and after.others(before) > MOST_BUSY * after.cores:
        taken = f"{after.others(before):.1f} of {after.cores} cores"
        print(f"other processes took {taken} meanwhile: measure again once the machine is idle", file=sys.stderr)


def measure(device: torch.device) -> Machine:
    """What ``device`` and its host can do, measured."""
    from weft.engine.base.probe import probe

    return probe(device)


def _learn(folders: list[Path], machine: str | None) -> None:
    from weft.engine.base.machines import find_machine
    from weft.engine.planning.learn_times import learn

    there = find_machine(machine)
    lesson = learn(folders, there)
    for skipped in lesson.skipped:
        print(f"skipped {skipped}", file=sys.stderr)
    if not lesson.observations:
        places = ", ".join(str(folder) for folder in folders)
        raise SpecError(f"--learn {places}: no result.json of a finished run that could be learned from")
    print(f"learned from {len(lesson.observations)} runs on {there.name}: typical error {lesson.before:.0%} before, "
          f"{lesson.after:.0%} after")  # fmt: skip
    for name, factor in sorted(lesson.calibration.factors.items()):
        print(f"  {name:<10} {factor:.2f} times the roofline")


def describe(machine: Machine) -> str:
    """The machine in lines for people."""
    lines = [
        f"{machine.name}: {show_bytes(machine.memory_bytes)} on {machine.device}, cache {show_bytes(machine.l2_bytes)}",
        *_rate_lines(machine.primary),
    ]
    if machine.devices:
        lines += [
            f"  bus             {_rate(machine.h2d_bandwidth)} to the device, {_rate(machine.d2h_bandwidth)} back",
            f"  kernel          {show_seconds(machine.launch_seconds)} from Python, "
            f"{show_seconds(machine.replay_seconds)} replayed",
            f"  CUDA context    {show_bytes(machine.context_bytes)}",
        ]
    lines += [f"  host            {machine.cores} cores, {show_bytes(machine.host_bytes)}"]
    if machine.devices and machine.host.flops:
        lines += _rate_lines(machine.host)
    disk = machine.link("disk", "disk", "host")
    return "\n".join([*lines, *([f"  disk            {_rate(disk.bytes_per_second)} read"] if disk else [])])


def _rate_lines(part: Processor) -> list[str]:
    return [
        f"  copy            {_rate(part.copy_bandwidth)}",
        f"  gather          {_rates(part.gather)} from memory",
        f"                  {_rates(part.l2_gather)} from the cache",
        "  products        " + ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in part.flops.items()),
        f"  operator call   {show_seconds(part.op_seconds)} of torch's, "
        f"{show_seconds(part.custom_op_seconds)} of Weft's",
    ]


def _rate(rate: float) -> str:
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def _rates(rates: tuple[tuple[int, float], ...]) -> str:
    return ", ".join(f"{_rate(rate)} ({width} B rows)" for width, rate in rates)
