"""One training step of a small graph: launch by launch in a CUDA graph, and as one kernel that stays on the device.

    python -m benchmarks.suites.persistent --shapes cora,pubmed --models gcn,sage,gin,gat

Both sides are the same launches of one task's step (hidden 64, dropout 0.5; cora 2 layers, others 4), replayed; the
update is included, evaluation is not. For the persistent side several numbers of programs and warps are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed, print_table
from benchmarks.harness.timing import time_calls
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.group import GroupRun
from weft.runtime.step.stack import Stack
from weft.weave.persistent.step import PersistentStep

LAYERS = {"cora": 2}
VARIANTS = ((128, 4), (256, 4), (128, 8), (256, 2), (512, 2))  # programs, warps
INNER = 20  # steps per replayed graph: the launch of the graph itself is not what is measured


def stack_of(graph: Graph, shape: str, model: str) -> Stack:
    """The stack of one task on ``graph``."""
    task = Task(graph=graph, model=model, hidden=64, dropout=0.5, layers=LAYERS.get(shape, 4), epochs=10_000)
    return GroupRun([task], graph, Plan(members=("a",), join="solo"), torch.device("cuda")).stacks[0]


def replayed(step: Callable[[], Any]) -> float:
    """Milliseconds of one step, replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(INNER):
            step()
    return time_calls(graph.replay, torch.device("cuda"), warmup=3, repeats=30).ms / INNER


def launched(stack: Stack) -> dict[str, Any]:
    """Launch by launch."""
    batch = stack.source.example()
    return {"ms": replayed(lambda: stack.train_step(batch))}


def persistent(stack: Stack, programs: int, warps: int) -> dict[str, Any]:
    """As one kernel: also its phases, and what compiling it took."""
    step = PersistentStep(stack, programs=programs, warps=warps)
    begin = time.perf_counter()
    step.check()
    compiling = time.perf_counter() - begin
    about = {"kernels": step.kernels, "phases": step.phases, "launches": step.launches}
    return {"ms": replayed(step), "first_call_s": round(compiling, 2), **about}


def main() -> None:
    """Measure and record."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="cora,pubmed")
    parser.add_argument("--models", default="gcn,sage,gin,gat")
    args = parser.parse_args()
    recorder = Recorder("persistent", args)
    if recorder.device.type != "cuda":
        raise SystemExit("this suite needs a GPU")
    for shape in listed(args.shapes):
        graph = recorder.prepare(f"graph {shape}", lambda shape=shape: make_graph(shape, recorder.device))
        for model in listed(args.models) if graph is not None else ():
            stack = stack_of(graph, shape, model)
            key = {"shape": shape, "model": model}
            recorder.cell({**key, "side": "launched"}, lambda stack=stack: launched(stack))
            for programs, warps in VARIANTS:
                side = f"{programs} x {warps}"
                recorder.cell({**key, "side": side}, lambda s=stack, p=programs, w=warps: persistent(s, p, w))
    columns = ("shape", "model", "side", "ms", "first_call_s", "phases", "launches", "status")
    recorder.save()
    print_table(columns, [[cell.get(name, "") for name in columns] for cell in recorder.cells])


if __name__ == "__main__":
    main()
