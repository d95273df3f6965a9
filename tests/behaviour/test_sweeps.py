"""Members of a sweep end with the numbers that each has alone."""

from __future__ import annotations

import pytest

import weft
from tests.behaviour import calls
from tests.behaviour.cases import graph
from tests.behaviour.plain_loop import assert_same_run

SWEEPS = {
    "rates and seeds": {"model": "gcn", "hidden": 8, "lr": [0.01, 0.05], "seed": range(3)},
    "widths that are padded": {"model": "sage", "hidden": [8, 12, 16]},
    "models": {"model": ["gcn", "gin", "sage"], "hidden": 8, "layers": [1, 2]},
    "attention with dropout": {"model": "gat", "hidden": 8, "heads": 2, "dropout": [0.0, 0.4], "seed": [0, 1]},
    "different ends": {"model": "gcn", "hidden": 8, "epochs": [3, 9], "norm": "batch"},
}


@pytest.mark.parametrize("name", SWEEPS)
def test_together_as_alone(name):
    sweep = weft.Sweep(graph(), **{"epochs": 8, **SWEEPS[name]})
    together = calls.run(sweep)
    assert {result.status for result in together} == {"finished"}
    for task, found in zip(sweep, together, strict=True):
        assert_same_run(found, calls.run(task))


def test_members_that_differ_in_numbers_share_a_step():
    together = calls.run(weft.Sweep(graph(), hidden=8, lr=[0.01, 0.05], seed=range(3), epochs=2))
    assert [plan.join for plan in together.plan] == ["stacked"]
    assert [len(plan.members) for plan in together.plan] == [6]


def test_the_best_member_is_the_one_with_the_best_validation():
    together = calls.run(weft.Sweep(graph(), hidden=8, lr=[1e-4, 0.05], seed=range(2), epochs=15))
    highest = max(result.metrics["val_accuracy"] for result in together)
    assert together.best().metrics["val_accuracy"] == highest
    assert together[together.ranking()[0]].name == together.best().name
    assert len(together.to_dicts()) == 4


def test_draws_are_the_same_for_the_same_seed():
    made = [weft.Sweep("demo", lr=weft.loguniform(1e-4, 1e-1), samples=5, sample_seed=3) for _ in range(2)]
    assert [task.lr for task in made[0]] == [task.lr for task in made[1]]
    assert all(1e-4 <= task.lr <= 1e-1 for task in made[0])


def test_several_graphs_in_one_sweep():
    found = calls.run(weft.Sweep([graph(), graph("weighted")], hidden=8, epochs=3, seed=range(2)))
    assert len(found) == 4
    assert {result.metrics["epochs_run"] for result in found} == {3}
    with pytest.raises(weft.WeftError, match="graph"):
        found.best()


def test_a_member_that_diverges_leaves_the_others_as_they_are():
    tasks = [
        weft.Task(graph=graph(), hidden=8, optimizer="sgd", lr=lr, epochs=8, name=name)
        for name, lr in (("calm", 0.05), ("wild", 1e30))
    ]
    together = calls.run(tasks)
    assert [result.status for result in together] == ["finished", "diverged"]
    assert_same_run(together["calm"], calls.run(tasks[0]))


def test_members_are_cancelled_by_name():
    control = weft.Control()

    def cancel(event):
        if event.kind == "progress":
            control.cancel("seed=1")

    together = calls.run(weft.Sweep(graph(), hidden=8, seed=range(2), epochs=3000), control=control, on_event=cancel)
    assert together["seed=1"].status == "cancelled"
    assert together["seed=0"].status == "finished"


def test_bad_members_are_pruned():
    sweep = weft.Sweep(graph(), hidden=8, lr=[1e-9, 0.01, 0.02, 0.05], epochs=40, dropout=0.0)
    pruned = calls.run(sweep, prune=weft.MedianPruner(warmup=10, every=5, least=2))
    assert pruned["lr=1e-09"].status == "pruned"
    assert pruned["lr=0.05"].status == "finished"
