"""How tasks of different structure share a device is a setting, and changes no number of any of them."""

from __future__ import annotations

import pytest

import weft
from weft.graph.generate import citation

FIXED = {"graph": "demo", "hidden": 8, "epochs": 4, "dropout": 0.3}
WHOLE = [weft.Task(model=m, layers=n, name=f"{m}-{n}", **FIXED) for m, n in (("gcn", 2), ("gcn", 3), ("gat", 2))]
BATCHES = {**FIXED, "mode": "sampled", "fanout": [4, 3], "batch": 64}
SAMPLED = [weft.Task(model=m, name=m, seed=i, **BATCHES) for i, m in enumerate(("sage", "gcn", "gat"))]


def trained(tasks, **options):
    result = weft.run(tasks, device="cpu", progress=False, options=weft.RunOptions(**options))
    return result, {member.name: member.history["loss"] + member.history["val_loss"] for member in result}


@pytest.fixture(scope="module")
def alone():
    return {task.name: trained([task])[1][task.name] for task in (*WHOLE, *SAMPLED)}


@pytest.mark.parametrize(
    ("weave", "joins"),
    [
        (None, ["solo"] * 3),
        ("off", ["solo"] * 3),
        ("merged", ["woven"]),
    ],
)
def test_every_way_to_join_has_the_numbers_of_separate_runs(weave, joins, alone):
    result, found = trained(WHOLE, weave=weave)
    assert [plan.join for plan in result.plan] == joins
    assert not any("not as one step" in why for plan in result.plan for why in plan.why)
    for name, numbers in found.items():
        assert numbers == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_sampled_structures_train_on_shared_batches_with_the_numbers_of_separate_runs(alone):
    result, found = trained(SAMPLED)
    assert [plan.join for plan in result.plan] == ["in turn"]
    for name, numbers in found.items():
        assert numbers == pytest.approx(alone[name], rel=1e-6, abs=1e-7), name


def test_backward_sums_that_are_pushed_along_a_directed_graph_have_the_numbers_of_separate_runs(tmp_path):
    graph = citation(300, 1800, 12, 3, directed=True, seed=1)
    graph.save(tmp_path / "graph")
    tasks = [task.with_values(graph=str(tmp_path / "graph")) for task in WHOLE[:2]]
    apart, pushed = trained(tasks, weave="off")[1], trained(tasks, weave="merged+push")[1]
    assert pushed != trained(tasks, weave="merged")[1], "nothing was pushed"
    for name, numbers in pushed.items():
        assert numbers == pytest.approx(apart[name], rel=1e-4, abs=1e-5), name
    report = weft.plan(tasks, "cpu", options=weft.RunOptions(weave="merged+push"))
    (tmp_path / "plan.json").write_text(report.to_json())
    planned = weft.run(weft.read(tmp_path / "plan.json"), progress=False)
    assert [plan.join for plan in planned.plan] == ["woven+push"]
