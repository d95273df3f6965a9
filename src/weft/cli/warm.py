"""``weft warm [SPEC.toml]``: compile kernels ahead, on all cores, so that no run has to wait for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.spec import spec_of
from weft.core.errors import SpecError
from weft.core.lazy.names import gc_paused
from weft.core.models import BUILT_IN
from weft.core.task import Task

if TYPE_CHECKING:
    from weft.engine.planning.estimator import Estimator

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
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: --set model.hidden=64; repeat."),
    ] = None,
) -> None:
    """Compile the GPU kernels that SPEC needs into Triton's cache. A run compiles what it lacks by itself.

    Without SPEC: the five models, two layers of 16 and three of 64, on graphs of the size of Cora, Pubmed and
    ogbn-arxiv.

    Exit codes: 0 done, 2 a mistake in the input.
    """
    if changes and spec is None:
        raise SpecError(f"--set {changes[0]}: needs a SPEC whose settings it overrides")
    tasks = _common() if spec is None else _tasks(spec, changes or [])
    with gc_paused():
        from weft.engine.base.graph_cache import Graphs
        from weft.engine.planning.estimator import Estimator
        from weft.ops.launch.backend import have_triton
    if not have_triton():
        raise SpecError("Triton is not installed: there are no kernels to compile; pip install triton")
    machine, number, limits = _target(arch)
    estimator = Estimator(machine, graphs=Graphs(), limits=limits)
    total = sum(_warm(part, estimator, number, processes) for part in _groups(tasks, estimator))
    print(f"compiled {total} kernels for sm_{number}" if total else f"nothing to compile for sm_{number}")


def _tasks(spec: Path, changes: list[str]) -> list[Task]:
    work = spec_of(spec, changes)
    return [work] if isinstance(work, Task) else work.tasks()


def _common() -> list[Task]:
    sizes = ({"hidden": 16, "layers": 2, "dropout": 0.5}, {"hidden": 64, "layers": 3})
    return [
        Task(graph=shape, model=model, name=f"{model}-{shape}-{size['hidden']}", **size)
        for shape in COMMON_SHAPES
        for model in BUILT_IN
        for size in sizes
    ]


def _target(arch: int | None):  # type: ignore[no-untyped-def]
    """The machine to plan for, the number of its architecture, and its limits if it is here."""
    import torch

    from weft.engine.base.machines import machine_with
    from weft.ops.launch.device_limits import limits_of
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


def _groups(tasks: list[Task], estimator: Estimator):  # type: ignore[no-untyped-def]
    """Tasks with the plan of every group, as a run would make it."""
    from weft.planner.grouping.groups import group

    named = {task.label: task for task in tasks}
    for plan in group(tasks, estimator.stats, "cuda", machine=estimator.machine):
        yield [named[name] for name in plan.members], plan


def _warm(part, estimator: Estimator, arch: int, processes: int | None) -> int:  # type: ignore[no-untyped-def]
    from weft.engine.planning.warm_kernels import warm_kernels

    tasks, plan = part
    several = f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""

    def told(done: int, total: int) -> None:
        print(f"\r{tasks[0].label}{several}: {done} of {total} kernels", end="", file=sys.stderr, flush=True)

    count = warm_kernels(tasks, plan, estimator, arch, told, processes)
    if count:
        print(file=sys.stderr)
    return count
