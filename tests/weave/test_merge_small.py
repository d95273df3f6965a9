"""Small graphs: all kernels share launches, and a step has no more launches in a row than its deepest member."""

from __future__ import annotations

import pytest

from tests.graphs_for_tests import tiny_graph
from tests.weave.launch_counts import count_launches, longest_chain
from tests.weave.trainees import Trainee, assert_trains_as_alone
from weft.capture.meta_graph import META, meta_graph
from weft.capture.observer import watched_launches
from weft.core.task import Task
from weft.graph.catalog.shapes import make
from weft.ops.launch.backend import meta_means_gpu
from weft.planner.grouping.groups import plan_as_one_group
from weft.runtime.group import GroupRun
from weft.weave.merge import Woven
from weft.weave.step import Weaver, merged


@pytest.mark.parametrize("models", [("gcn", "gcn"), ("sage", "gin"), ("gat", "gatv2")], ids="-".join)
def test_members_train_as_alone(models):
    graph = tiny_graph()
    trainees = [Trainee(graph, model, 2 + place, tasks=2 + place, seed=place) for place, model in enumerate(models)]
    woven = assert_trains_as_alone(trainees, small=True)
    families = {fused.family for fused in woven.fused}
    assert {"passes", "update", "sums"} <= families  # on a CPU torch multiplies


def test_all_updates_are_one():
    trainees = [Trainee(tiny_graph(), "gcn", layers, tasks=2, seed=layers) for layers in (2, 3, 4)]
    woven = assert_trains_as_alone(trainees, small=True)
    launches = count_launches(woven)
    assert launches["merged_call_"] == 1
    assert launches["adam_"] == 0
    last = woven.fused[-1]
    assert [entry.operator for entry in last.entries] == ["adam_"] * 3


def woven_depths(layers: tuple[int, ...]) -> tuple[Woven, GroupRun]:
    """GCN of these depths as a GPU would train them, on a graph without data."""
    graph = make("pubmed", scale=0.02)
    tasks = [
        Task(graph=graph, model="gcn", layers=depth, hidden=64, epochs=4, seed=seed, name=f"{seed}")
        for seed, depth in enumerate(layers)
    ]
    plan = plan_as_one_group(tasks, graph.stats(), "cuda", weave="merged")
    with meta_means_gpu(), watched_launches(lambda *_: None):
        run = GroupRun(tasks, meta_graph(graph), plan, META, Weaver())
        for stack in run.stacks:
            stack.train_step(stack.source.example())
        return merged(run.stacks), run


def test_a_step_is_hardly_longer_than_its_deepest_member():
    """2, 2, 3 and 4 layers: the shallow ones' operators find room in the launches of the deep one."""
    woven, _ = woven_depths((2, 2, 3, 4))
    operators = sum(len(fused.entries) for fused in woven.fused)
    assert operators > 80
    assert {fused.family for fused in woven.fused} == {"spmm", "passes", "products", "sums", "update"}
    assert len(woven.fused) <= 27
    deep, _ = woven_depths((4, 4, 4, 4, 5))  # two stacks, one chain of five layers
    assert longest_chain(woven) < longest_chain(deep) <= 40
    assert longest_chain(woven) <= 32


def test_nobody_waits_for_sums():
    """They run on a stream of their own, and nothing but the update's gradient needs them."""
    woven, run = woven_depths((2, 3))
    sums = [fused for fused in woven.fused if fused.family == "sums"]
    assert 1 <= len(sums) <= 2
    for fused in sums:
        assert fused.node.meta["stream"] == 1 + len(run.stacks)
