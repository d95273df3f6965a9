"""The two sides: the stack of one task, its step replayed, and the same as one kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.timing import record_graph, time_calls
from weft.core.plan import Plan
from weft.core.task import Task
from weft.runtime.group import GroupRun
from weft.runtime.step.stack import Stack
from weft.weave.persistent.kernel import PhasesLaunch
from weft.weave.persistent.step import PersistentStep

LAYERS = {"cora": 2}
INNER = 20  # steps per replayed graph: the launch of the graph itself is not what is measured
STEPS = 5  # that both sides are compared over


def stack_of(shape: str, model: str) -> Stack:
    """The stack of one task: hidden 64, dropout 0.5, cora 2 layers, others 4."""
    device = torch.device("cuda")
    graph = make_graph(shape, device)
    task = Task(graph=graph, model=model, hidden=64, dropout=0.5, layers=LAYERS.get(shape, 4), epochs=10_000)
    return GroupRun([task], graph, Plan(members=("a",), join="solo"), device).stacks[0]


def replayed(step: Callable[[], Any]) -> float:
    """Milliseconds of one step, replayed."""

    def several() -> None:
        for _ in range(INNER):
            step()

    graph, _ = record_graph(several, warmup=1)
    return time_calls(graph.replay, torch.device("cuda"), warmup=3, repeats=30).ms / INNER


def launched(stack: Stack) -> dict[str, Any]:
    """Launch by launch."""
    batch = stack.source.example()
    return {"ms": round(replayed(lambda: stack.train_step(batch)), 4)}


def checked(stack: Stack, launch: PhasesLaunch) -> tuple[PersistentStep, dict[str, Any]]:
    """The step as one kernel, compared with the stack's own steps; the state is as it was."""
    step = PersistentStep(stack, launch)
    begin = time.perf_counter()
    step.check()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    about = {"first_call_s": round(seconds, 2), "kernels": step.kernels, "phases": step.phases}
    return step, {**about, "launches": step.launches, "worst_loss": _worst(stack, step)}


def _worst(stack: Stack, step: PersistentStep) -> float:
    """The largest relative difference of the losses of some steps."""
    begin, batch = stack.state.snapshot(), stack.source.example()
    expected = torch.cat([stack.train_step(batch).clone() for _ in range(STEPS)])
    stack.state.restore(begin)
    found = torch.cat([step().clone() for _ in range(STEPS)])
    stack.state.restore(begin)
    return float(f"{((found - expected).abs() / expected.abs()).max():.2g}")


def persistent(stack: Stack, launch: PhasesLaunch) -> dict[str, Any]:
    """As one kernel: also its phases, and what compiling it (or loading it from disk) took."""
    step, about = checked(stack, launch)
    return {"ms": round(replayed(step), 4), **about}
