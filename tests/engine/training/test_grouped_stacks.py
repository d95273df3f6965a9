"""What the grouping puts into one stack, the run stacks: no group falls apart, and nobody's numbers change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.core.task import Task
from weft.graph.generate import citation
from weft.planner.grouping.groups import group
from weft.runtime.group import GroupRun
from weft.weave.step import Weaver

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph():
    return citation(40, 160, 6, 3, seed=1)


def settings_of_tasks():
    """Settings that matter to a stack, and some that only look so."""
    return st.fixed_dictionaries(
        {
            "model": st.sampled_from(["gcn", "sage", "gin", "gat"]),
            "layers": st.sampled_from([1, 2]),
            "hidden": st.sampled_from([4, 8]),
            "heads": st.sampled_from([2, 4]),
            "aggregator": st.sampled_from(["mean", "max"]),
            "norm": st.sampled_from([None, "batch", "layer"]),
            "dropout": st.sampled_from([0.0, 0.4]),
            "input_dropout": st.sampled_from([None, 0.2]),
            "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "weight_decay": st.sampled_from([0.0, 1e-3]),
            "decay": st.sampled_from(["all", "first"]),
            "metric": st.sampled_from(["auto", "accuracy", "f1_macro"]),
            "objective": st.sampled_from(["auto", "multiclass"]),
            "epochs": st.sampled_from([2, 3]),
        }
    )


@given(chosen=st.lists(settings_of_tasks(), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_stack_falls_apart(chosen, graph):
    tasks = [Task(graph=graph, name=f"t{i}", seed=i, **own) for i, own in enumerate(chosen)]
    named = {task.label: task for task in tasks}
    for plan in group(tasks, graph.stats(), "cpu"):
        members = [named[name] for name in plan.members]
        run = GroupRun(members, graph, plan, CPU)
        assert run.notes == []
        assert len(run.stacks) == len(plan.stack_members)
        run.advance(1)


def test_members_are_as_they_are_alone(graph):
    tasks = [Task(graph=graph, name=f"t{i}", seed=i, lr=0.01 * (i + 1), hidden=4 * (i + 1), epochs=4) for i in range(3)]
    (plan,) = group(tasks, graph.stats(), "cpu")
    together = GroupRun(tasks, graph, plan, CPU, Weaver()).advance(4)
    for task, progress in zip(tasks, together, strict=True):
        (own,) = group([task], graph.stats(), "cpu")
        (alone,) = GroupRun([task], graph, own, CPU).advance(4)
        assert torch.tensor(progress.rows) == pytest.approx(torch.tensor(alone.rows), rel=1e-4, abs=1e-5)
