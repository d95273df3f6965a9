"""Train a woven group as a GPU would, its generated kernels under the interpreter, and compare with separate stacks.

A program of its own, because the interpreter is chosen before Triton is imported: see test_weave.py.
"""

from __future__ import annotations

import torch

from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.ops.launch import backend
from weft.runtime.group import GroupRun
from weft.weave.merged_launch import generate
from weft.weave.step import Weaver

AS_IT_IS = backend.on_gpu.__code__
AS_ON_A_GPU = (lambda tensor: True).__code__
NODES = 18


def small_graph() -> Graph:
    """Few nodes, since the interpreter visits every one; a node without edges among them, and a hub."""
    random = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(1, NODES, (20,), generator=random) for _ in range(2))
    spokes = torch.arange(2, NODES)
    edges = torch.cat([src, spokes]), torch.cat([dst, torch.ones_like(spokes)])
    x, y = torch.randn(NODES, 5, generator=random), torch.arange(NODES) % 3
    return Graph.from_edges(*edges, NODES, x=x, y=y, directed=False, name="small").random_split(train=9, val=4)


def trained(tasks: list[Task], join: str, as_on_a_gpu: bool) -> GroupRun:
    """The group after some epochs; its operators take every tensor for one on a GPU, or for what it is."""
    backend.on_gpu.__code__ = AS_ON_A_GPU if as_on_a_gpu else AS_IT_IS
    stacks = tuple((place,) for place in range(len(tasks)))
    plan = Plan(members=tuple(map(str, stacks)), join=join, stacks=stacks)
    run = GroupRun(tasks, small_graph(), plan, torch.device("cpu"), Weaver())
    run.advance(tasks[0].epochs)
    return run


def check(epochs: int, *kinds: dict) -> None:
    common = {"graph": "small", "hidden": 4, "epochs": epochs, "dropout": 0.5, "eps": 1e-3, "eval_every": epochs}
    tasks = [Task(**common, **kind, seed=seed) for seed, kind in enumerate(kinds)]
    woven, apart = trained(tasks, "woven", True), trained(tasks, "stacked", False)
    assert woven.merged is not None, woven.notes
    assert woven.merged.woven.fused
    assert generate.cache_info().currsize, "no kernel was generated"
    for mine, theirs in zip(woven.stacks, apart.stacks, strict=True):
        for name, tensor in theirs.state.tensors().items():
            torch.testing.assert_close(
                mine.state.tensors()[name], tensor, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(
        2,
        {"model": "gcn", "layers": 2},
        {"model": "sage", "layers": 2, "aggregator": "max"},
        {"model": "gin", "layers": 3},
    )
    check(2, {"model": "gcn", "layers": 2, "norm": "batch"}, {"model": "sage", "layers": 2, "norm": "layer"})
    # One epoch: attention's kernels take the interpreter ten times as long.
    check(1, {"model": "gat", "layers": 2, "heads": 2}, {"model": "gat", "layers": 1, "out_heads": 2})
    print("equal")
