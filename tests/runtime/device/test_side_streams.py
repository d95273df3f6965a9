"""Concurrent stacks: one after another the first time, concurrent afterwards, and reported to dry runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests import stacks
from tests.dry_runs import capture
from tests.graphs_for_tests import tiny_graph
from weft.core.task import Task
from weft.planner.grouping.groups import plan_as_one_group

MEMBERS = [{"model": "gcn", "seed": 1}, {"model": "gat", "seed": 2}, {"model": "gcn", "seed": 3}]


def mixed(graph, **changes):
    tasks = stacks.tasks_of(graph, MEMBERS, epochs=8)
    return stacks.start(tasks, graph, join="concurrent", stacks=((0, 2), (1,)), **changes)


def test_what_is_built_on_first_use_is_built_in_turn():
    graph = tiny_graph()
    run, at_once = mixed(graph), []

    def beside(steps):
        at_once.append(len(steps))
        for step in steps:
            step()

    run.run_steps = beside
    run.advance(4)
    assert at_once == [2] * 3  # the first of four epochs was in turn
    run.drop([0])
    run.advance(2)
    assert at_once == [2] * 4  # a smaller stack begins anew
    run.drop([1])
    run.advance(1)
    assert at_once == [2] * 4  # nobody is left to be beside


def test_members_train_as_alone():
    graph = tiny_graph()
    run = mixed(graph)
    looks = run.advance(8)
    for poll, own in zip(looks, MEMBERS, strict=True):
        (alone,) = stacks.start(stacks.tasks_of(graph, [own], epochs=8), graph).advance(8)
        assert torch.allclose(torch.tensor(poll.rows), torch.tensor(alone.rows), atol=1e-5, equal_nan=True)


def test_an_estimate_knows_the_streams():
    graph = tiny_graph()
    tasks = [Task(graph=graph, model=model, layers=2, hidden=8, name=model) for model in ("gcn", "gat")]
    plan = plan_as_one_group(tasks, graph.stats(), "cuda")
    assert plan.join == "concurrent"
    streams = {operator.stream for operator in capture(tasks, graph, plan=plan).program.operators}
    assert streams == {1, 2}
    woven = plan_as_one_group(tasks, graph.stats(), "cuda", weave="merged")
    assert woven.join == "woven"


@pytest.mark.parametrize("weave", [None, "merged"])
def test_an_estimate_knows_the_passes(weave):
    """Sparse features, whose product is an operator of Weft's own: no gradient is asked for inside of it."""
    graph = tiny_graph(sparse=True)
    tasks = [Task(graph=graph, model="gcn", layers=layers, hidden=8, name=f"gcn-{layers}") for layers in (2, 3)]
    plan = plan_as_one_group(tasks, graph.stats(), "cuda", weave=weave)
    shared = passes(capture(tasks, graph, plan=plan).program)
    alone = sum((passes(capture([task], graph).program) for task in tasks), Counter())
    if weave:  # one operator does the work of several, of other kinds as well
        assert min(shared["forward"], shared["backward"]) > 2
    else:
        assert shared == alone


def passes(program):
    """Launches of every pass over the sparse operators."""
    found = Counter()
    for operator in program.operators:
        if operator.name in ("weft.spmm", "weft.merged_call"):
            found[operator.phase] += 1
    return found
