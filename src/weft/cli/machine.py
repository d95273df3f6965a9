"""``weft probe``: measure this machine, and correct its predictions by measured runs."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.format import write_file
from weft.cli.options import Changes, Device, Json
from weft.cli.spec import spec_of
from weft.core.errors import SpecError
from weft.core.machine import Machine, Processor
from weft.core.models import BUILT_IN
from weft.core.startup import gc_paused
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds
from weft.engine.home import home, step_store


def probe(
    out: Annotated[Path | None, typer.Option(help="Also write the machine to this JSON file.")] = None,
    device: Device = "auto",
    json: Json = False,
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
    from weft.engine.machine import choose_device, keep_probe  # loads torch, which --help can do without
    from weft.engine.probe import probe as measure
    from weft.engine.process_state import MOST_BUSY, LoadSample

    begin, before = time.perf_counter(), LoadSample.now()
    measured = measure(choose_device(device))
    after = LoadSample.now()
    file = keep_probe(measured)
    if out is not None:
        write_file(out, measured.to_json())
    print(measured.to_json() if json else describe(measured))
    print(f"measured in {time.perf_counter() - begin:.1f} s, kept in {file}", file=sys.stderr)
    if before and after and after.others(before) > MOST_BUSY * after.cores:
        taken = f"{after.others(before):.1f} of {after.cores} cores"
        print(f"other processes took {taken} meanwhile: measure again once the machine is idle", file=sys.stderr)


def _learn(folders: list[Path], machine: str | None) -> None:
    from weft.engine.learning import learn
    from weft.engine.machine import find_machine

    there = find_machine(machine)
    lesson = learn(folders, there)
    for skipped in lesson.skipped:
        print(f"skipped {skipped}", file=sys.stderr)
    if not lesson.observations:
        listed = ", ".join(str(folder) for folder in folders)
        raise SpecError(f"--learn {listed}: no result.json of a finished run that could be learned from")
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
            f"  bus             {_rate(machine.bus_bandwidth('host', 'gpu:0'))} to the device, "
            f"{_rate(machine.bus_bandwidth('gpu:0', 'host'))} back",
            f"  kernel          {show_seconds(machine.launch_seconds)} from Python, "
            f"{show_seconds(machine.replay_seconds)} replayed",
            f"  CUDA context    {show_bytes(machine.context_bytes)}",
        ]
    lines += [f"  host            {machine.host.cores} cores, {show_bytes(machine.host.memory_bytes)}"]
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


# ---- ``weft warm [SPEC.toml]``: compile kernels ahead, on all cores, so that no run has to wait for them.

COMMON_SHAPES = ("shape:cora", "shape:pubmed", "shape:ogbn-arxiv")  # without SPEC: every model on each of them


def warm(
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of a task or sweep. Without one: common models and sizes.", metavar="[SPEC.toml]"
        ),
    ] = None,
    arch: Annotated[
        int | None, typer.Option(help="Compute capability to compile for, such as 90.", show_default="the GPU's here")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Processes at once.", show_default="one per core")] = None,
    changes: Changes = None,
) -> None:
    """Compile the GPU kernels that SPEC needs into Triton's cache. A run compiles what it lacks by itself.

    Without SPEC: the five models, two layers of 16 and three of 64, on graphs of the size of Cora, Pubmed and
    ogbn-arxiv.

    Exit codes: 0 done, 2 a mistake in the input.
    """
    if changes and spec is None:
        raise SpecError(f"--set {changes[0]}: needs a SPEC whose settings it overrides")
    if spec is None:
        sizes = ({"hidden": 16, "layers": 2, "dropout": 0.5}, {"hidden": 64, "layers": 3})
        tasks = [
            Task(graph=shape, model=model, name=f"{model}-{shape}-{size['hidden']}", **size)
            for shape in COMMON_SHAPES
            for model, traits in BUILT_IN.items()
            for size in sizes
            if not traits.relational  # these graphs have no relations
        ]
    else:
        work = spec_of(spec, changes or [])
        tasks = [work] if isinstance(work, Task) else work.tasks()
    with gc_paused():
        from weft.engine.estimator import Estimator
        from weft.engine.graphs import Graphs
        from weft.engine.run_planner import warm_kernels
        from weft.ops.launch.backend import have_triton
        from weft.planner.grouping.groups import group
    if not have_triton():
        raise SpecError("Triton is not installed: there are no kernels to compile; pip install triton")
    machine, number, limits = _target(arch)
    estimator = Estimator(machine, graphs=Graphs(), limits=limits)
    total, by_name = 0, {task.label: task for task in tasks}
    for plan in group(tasks, estimator.stats, "cuda", machine=machine):  # as a run would make them
        members = [by_name[name] for name in plan.members]
        several = f" and {len(members) - 1} more" if len(members) > 1 else ""

        def show(done: int, count: int, label: str = members[0].label + several) -> None:
            print(f"\r{label}: {done} of {count} kernels", end="", file=sys.stderr, flush=True)

        compiled = warm_kernels(members, plan, estimator, number, show, processes)
        total += compiled
        if compiled:
            print(file=sys.stderr)
    print(f"compiled {total} kernels for sm_{number}" if total else f"nothing to compile for sm_{number}")


def _target(arch: int | None):  # type: ignore[no-untyped-def]
    """The machine to plan for, the number of its architecture, and its limits if it is here."""
    import torch

    from weft.engine.machine import machine_with
    from weft.ops.launch.backend import limits_of
    from weft.planner.machine_profiles import profile

    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(device)
        here = 10 * major + minor
        if arch in (None, here):
            return machine_with(device), here, limits_of(device)
    if arch is None:
        raise SpecError("there is no GPU here; --arch 90 compiles for another machine's, into this one's cache")
    return profile("h200"), arch, None


# ---- ``weft cache``: what is remembered between processes to save time, and ``--clear`` to remove it.


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; the next runs make it again.")] = False,
    json: Json = False,
) -> None:
    """What is remembered between processes: captured steps, which make the second plan of a structure quick.

    What was measured of machines is not in it: `weft probe` shows and replaces that.
    """
    steps = step_store()
    if clear:
        try:
            freed = steps.clear()
        except OSError as error:
            raise SpecError(f"{error.filename} cannot be removed: {error.strerror}") from None
        print(f"removed {show_bytes(freed)} from {home()}")
        return
    entries = [entry for entry in steps.entries() if entry.path.name.endswith(".gz")]
    total = sum(entry.bytes for entry in entries)
    if json:
        print(jsonlib.dumps({"steps": len(entries), "bytes": total, "path": str(steps.folder)}))
    else:
        print(f"{len(entries)} captured steps, {show_bytes(total)}")
        print(f"in {home()}; `weft cache --clear` removes them")
