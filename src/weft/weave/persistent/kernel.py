"""One kernel for many phases: every program takes its share of a phase, waits for all others, and goes on.

Between two launches a device drains and fills again, which takes longer than the work of a phase on a small graph. Here
the programs stay, and a counter in memory tells them when a phase is complete. All of them must be on the device at the
same time, or they would wait for ever: the launch is a cooperative one, which the driver refuses otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.triton_lang import tl, triton
from weft.weave.merged_launch import (
    Branch,
    Launch,
    arguments_of,
    body_lines,
    compiled,
    full_name,
    launch_alone,
    options_of,
    parameters_of,
    scope_of,
)
from weft.weave.persistent.phases import Phases

LIMIT = 4000  # arguments of one launch: since CUDA 12.1 there is room for 32,764 bytes


@triton.jit
def wait_for_all(counter, programs):
    """Return when every one of ``programs`` (a power of two) has come here as often as this one.

    The counter is a multiple of ``programs`` before and after; it only grows, and that it starts again from the least
    number after the largest does no harm.
    """
    tl.debug_barrier()  # what the other threads of this program wrote is written
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    goal = (arrived | (programs - 1)) + 1
    now = arrived + 1
    while now - goal < 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@dataclass(frozen=True)
class PhasesLaunch:
    """Launch parameters: programs (a power of two) and, unless the kernels' own decide, warps, stages, registers.

    All programs are on the device at once, and every phase gets what the neediest one takes: with 255 registers per
    thread 8 warps fit on a multiprocessor of an H200, with 128 twice as many, and sums over edges wait for memory.
    """

    programs: int
    warps: int | None = None
    stages: int | None = None
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.programs < 1 or self.programs & (self.programs - 1):
            raise InputError(f"a persistent kernel of {self.programs} programs: a power of two is needed")

    def options(self, parts: Sequence[Launch]) -> dict[str, Any]:
        """Triton's options of the launch of ``parts``."""
        own = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        return options_of(parts) | {name: value for name, value in own.items() if value is not None}


def launch_phases(phases: Phases, counter: Tensor, launch: PhasesLaunch, stamps: Tensor | None = None) -> None:
    """Run the launches of one phase after those of another, all in one kernel.

    ``counter``: one int32 on the device, zero before the first of the kernels of as many programs that share it.
    Raises :class:`weft.core.errors.InputError` for more arguments than fit into a launch. ``stamps``, int64
    ``[2 * phases]``, gets the nanosecond at which the first program began each phase and was through with its share of
    it; the wait for the others is what is left until the next phase begins.
    """
    parts = [part for phase in phases for part in phase]
    if len(parts) == 1 and stamps is None:
        launch_alone(parts[0])
        return
    shapes, values = [], _Values()
    for phase in phases:
        branches, total, arguments = arguments_of(phase)
        shapes.append((branches, values.names([total, *arguments])))
    if len(values.given) > LIMIT:
        raise InputError(f"a persistent kernel of {len(values.given)} arguments; at most {LIMIT} fit into a launch")
    options, programs = launch.options(parts), launch.programs
    if counter.is_cuda:
        options["launch_cooperative_grid"] = True
    kernel = generate(tuple(shapes), len(values.given), stamps is not None)
    kernel[(programs,)](counter, programs, *(() if stamps is None else (stamps,)), *values.given, **options)


class _Values:
    """The arguments of a launch, each once."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self._places: dict[Any, int] = {}

    def names(self, values: list[Any]) -> tuple[int, ...]:
        """The places of ``values`` among all arguments."""
        return tuple(self._place(value) for value in values)

    def _place(self, value: Any) -> int:
        key = _key(value)
        if key not in self._places:
            self._places[key] = len(self.given)
            self.given.append(value)
        return self._places[key]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype
    return type(value), value


@cache
def generate(shapes: tuple[tuple[tuple[Branch, ...], tuple[int, ...]], ...], arguments: int, stamped: bool) -> Any:
    """The kernel of these phases, written; each phase has its branches and the places of its arguments."""
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "wait_for_all": wait_for_all}
    if stamped:
        from triton.language.extra.cuda import globaltimer

        scope["globaltimer"] = globaltimer
    scope |= {f"phase{place}": _phase(branches) for place, (branches, _) in enumerate(shapes)}
    return compiled(source_of([places for _, places in shapes], arguments, stamped), "persistent_kernel", scope)


@cache
def _phase(branches: tuple[Branch, ...]) -> Any:
    """The function that runs program ``pid`` of a phase."""
    names = ", ".join(parameters_of(branches))
    lines = ["@triton.jit", f"def phase(pid, {names}):", *body_lines(branches)]
    kernels = ", ".join(full_name(branch.kernel) for branch in branches)
    return compiled("\n".join(lines) + "\n", "phase", scope_of(branches), kernels)


def source_of(places: list[tuple[int, ...]], arguments: int, stamped: bool = False) -> str:
    """The text of the kernel: a loop over the programs of each phase, and a wait between two of them."""
    names = ", ".join(f"a{place}" for place in range(arguments))
    stamps = "stamps, " if stamped else ""
    lines = ["@triton.jit", f"def persistent_kernel(counter, programs, {stamps}{names}):"]
    lines += ["    first = tl.program_id(0)"]
    for phase, (total, *given) in enumerate(places):
        body = [f"    for pid in range(first, a{total}, programs):"]
        body += [f"        phase{phase}(pid, {', '.join(f'a{place}' for place in given)})"]
        lines += ["    wait_for_all(counter, programs)"] if phase else []
        lines += [_stamp(2 * phase), *body, _stamp(2 * phase + 1)] if stamped else body
    return "\n".join(lines) + "\n"


def _stamp(place: int) -> str:
    return f"    tl.store(stamps + {place}, globaltimer(), mask=first == 0)"
