"""Train a stack as a GPU would, its Triton kernels under the interpreter, and compare with separate runs on the CPU.

A program of its own, because the interpreter is chosen before Triton is imported: see test_kernels.py.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors, solo_plan
from weft.core.task import Task
from weft.ops.launch import backend
from weft.runtime.group import GroupRun

AS_IT_IS = backend.on_gpu.__code__
AS_ON_A_GPU = (lambda tensor: True).__code__


def start(tasks: list[Task], as_on_a_gpu: bool) -> GroupRun:
    """A run whose operators, while it trains, take every tensor for one on a GPU, or for what it is."""
    backend.on_gpu.__code__ = AS_ON_A_GPU if as_on_a_gpu else AS_IT_IS
    graph = tiny_graph()
    plan = replace(solo_plan(tasks[0], graph.stats(), "cpu"), members=tuple(map(str, range(len(tasks)))))
    return GroupRun(tasks, graph, plan, torch.device("cpu"))


def check(widths: tuple[int, int] = (8, 4), **settings: object) -> None:
    common = {"graph": "tiny", "heads": 2, "eps": 1e-3, "epochs": 2, "dropout": 0.5, **settings}
    (one, other), more = widths, {"seed": 2, "weight_decay": 0.1}
    tasks = [Task(**common, hidden=one, seed=1, lr=0.05), Task(**common, hidden=other, **more)]
    run = start(tasks, as_on_a_gpu=True)
    together = run.advance(2)
    for index, task in enumerate(tasks):
        alone = start([task], as_on_a_gpu=False)
        (progress,) = alone.advance(2)
        torch.testing.assert_close(
            torch.tensor(together[index].rows), torch.tensor(progress.rows), rtol=1e-4, atol=1e-5
        )
        tensors = best_tensors(run, index)
        for name, value in best_tensors(alone, 0).items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    import_module("weft.ops.dense.linear").MANY_ROWS = 0  # the kernels for many rows, on few
    torch.set_num_threads(1)
    check(model="gcn")
    check(model="sage", norm="batch", input_dropout=0.3)
    check(widths=(8, 8), model="gcn", norm="layer")
    print("equal")
