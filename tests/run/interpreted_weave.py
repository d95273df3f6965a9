"""Train a woven group as a GPU would, its generated kernels under the interpreter, and compare with separate stacks.

A program of its own, because the interpreter is chosen before Triton is imported: see test_weave.py.
"""

from __future__ import annotations

import torch
from tiny import tiny_graph

from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops import backend
from weft.ops.multi_launch import generate
from weft.run.group import GroupRun

AS_IT_IS = backend.on_gpu.__code__
AS_ON_A_GPU = (lambda tensor: True).__code__
EPOCHS = 2


def trained(tasks: list[Task], join: str, as_on_a_gpu: bool) -> GroupRun:
    """The group after some epochs; its operators take every tensor for one on a GPU, or for what it is."""
    backend.on_gpu.__code__ = AS_ON_A_GPU if as_on_a_gpu else AS_IT_IS
    stacks = tuple((place,) for place in range(len(tasks)))
    plan = Plan(members=tuple(map(str, stacks)), join=join, stacks=stacks)
    run = GroupRun(tasks, tiny_graph(), plan, torch.device("cpu"))
    run.advance(EPOCHS)
    return run


def check(*kinds: dict) -> None:
    common = {"graph": "tiny", "hidden": 4, "epochs": EPOCHS, "dropout": 0.5, "eps": 1e-3, "eval_every": EPOCHS}
    tasks = [Task(**common, **kind, seed=seed) for seed, kind in enumerate(kinds)]
    woven, apart = trained(tasks, "woven", True), trained(tasks, "stacked", False)
    assert woven.woven is not None, woven.notes
    assert woven.woven.table.fused
    assert generate.cache_info().currsize, "no kernel was generated"
    for mine, theirs in zip(woven.stacks, apart.stacks, strict=True):
        for name, tensor in theirs.state.tensors().items():
            torch.testing.assert_close(
                mine.state.tensors()[name], tensor, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(
        {"model": "gcn", "layers": 2},
        {"model": "sage", "layers": 2, "aggregator": "max"},
        {"model": "gin", "layers": 3},
    )
    check({"model": "gat", "layers": 2, "heads": 2}, {"model": "gat", "layers": 1, "out_heads": 2})
    print("equal")
