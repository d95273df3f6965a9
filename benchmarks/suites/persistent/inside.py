"""Where the time of the kernel goes: phases timed inside of it, a wait alone, each phase as a launch of its own."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suites.persistent.steps import replayed
from weft.runtime.step.stack import Stack
from weft.weave.copies import zeros_triton
from weft.weave.merged_launch import collected, launch_alone
from weft.weave.persistent.kernel import PhasesLaunch, launch_phases
from weft.weave.persistent.phases import Phases
from weft.weave.persistent.step import PersistentStep

WAITS = 16
REPEATS = 20


def kernel_names(phases: Phases) -> list[str]:
    """``"kernel x programs"`` of all launches of each phase."""
    parts = [[f"{p.kernel.fn.__name__.strip('_')} x {p.programs}" for p in phase] for phase in phases]
    return [", ".join(one) for one in parts]


def microseconds_of_phases(stack: Stack, launch: PhasesLaunch) -> list[dict[str, Any]]:
    """For each phase of the step: work of the first program, and its wait for the others; medians."""
    step, counter = PersistentStep(stack, launch), torch.zeros(1, dtype=torch.int32).cuda()
    found = []
    for phases in step.collected():
        stamps = torch.zeros(REPEATS, 2 * len(phases), dtype=torch.int64).cuda()
        for row in stamps:
            launch_phases(phases, counter, launch, row)
        times = stamps[REPEATS // 2 :].diff(dim=1).float().median(0).values.tolist()
        for place, name in enumerate(kernel_names(phases)):
            waited = times[2 * place + 1] if 2 * place + 1 < len(times) else 0.0
            found.append({"work_us": times[2 * place] / 1e3, "wait_us": waited / 1e3, "kernels": name})
    return found


def microseconds_of_a_wait(launch: PhasesLaunch) -> float:
    """A phase without work: the difference of many of them and few, per phase."""
    counter, like = torch.zeros(1, dtype=torch.int32).cuda(), torch.zeros(64).cuda()
    with collected() as parts:
        zeros_triton(like)
    few, many = (replayed(lambda n=n: launch_phases([list(parts)] * n, counter, launch)) for n in (2, 2 + WAITS))
    return round((many - few) / WAITS * 1e3, 3)


def first_fault(stack: Stack, launch: PhasesLaunch) -> str:
    """Every phase as a kernel of its own, then every launch alone, with a synchronisation after each; what failed."""
    step, counter = PersistentStep(stack, launch), torch.zeros(1, dtype=torch.int32).cuda()
    for phases in step.collected():
        for place, (phase, names) in enumerate(zip(phases, kernel_names(phases), strict=True)):
            print(f"phase {place}: {names}", flush=True)  # the last line printed names what a fault stopped
            for part in phase:
                launch_alone(part)
            torch.cuda.synchronize()
            print("  launch by launch: done", flush=True)
            launch_phases([phase, phase], counter, launch)
            torch.cuda.synchronize()
            print("  as phases: done", flush=True)
    return "no phase alone"
