"""Advice: the least change that fits, and nothing that does not exist."""

from __future__ import annotations

import pytest

from weft.core.cost import Cost
from weft.core.task import Task
from weft.planner.machine_profiles import PROFILES, profile
from weft.planner.report.plan_report import candidates, nearest, roomy_machines

GIB = 2**30


def cost_of(task: Task) -> Cost:
    """10 GiB that never shrink, and 1 GiB for every 8 features of a hidden layer, half of it in bf16."""
    half = 2 if task.precision == "bf16" else 1
    return Cost(total_bytes=10 * GIB + task.hidden * GIB // 8 // half)


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        (30, {"precision": "bf16"}),
        (26, {"precision": "bf16"}),
        (18, {"hidden": 64}),
        (12, {"hidden": 16}),
    ],
)
def test_the_least_change_that_fits(budget, changes):
    found = nearest(Task(graph="g", name="t", hidden=256), cost_of, budget * GIB)
    assert found.changes == changes
    assert found.tasks == ("t",)
    assert "task 't'" in found.words
    for key, value in changes.items():
        section = "model" if key == "hidden" else "train"
        assert f"--set {section}.{key}={value}" in found.words


def test_nothing_fits():
    assert nearest(Task(graph="g", hidden=256), cost_of, 9 * GIB) is None


def test_both_changes_where_one_is_not_enough():
    found = nearest(
        Task(graph="g", hidden=8), lambda task: Cost(total_bytes=cost_of(task).total_bytes - 10 * GIB), 300 * 2**20
    )
    assert found.changes == {"precision": "bf16", "hidden": 4}


def test_bf16_is_not_advised_where_it_would_be_emulated():
    task = Task(graph="g", hidden=64)
    assert all("precision" not in changes for changes in candidates(task, profile("v100-32g").has_bf16))
    assert nearest(task, cost_of, 14 * GIB, bf16=False).changes == {"hidden": 32}
    assert nearest(task, cost_of, 14 * GIB).changes == {"precision": "bf16"}


def test_candidates_exist():
    changes = candidates(Task(graph="g", hidden=64))
    assert changes[0] == {"precision": "bf16"}
    for change in changes:
        Task(graph="g", hidden=64).with_values(**change)
        assert set(change) <= {"precision", "hidden"}
    assert candidates(Task(graph="g", precision="bf16", layers=1)) == []


def widths(task: Task) -> list[int]:
    """The narrower layers that are tried."""
    return [changes["hidden"] for changes in candidates(task, bf16=False)]


def test_widths_keep_to_whole_heads_and_to_models_that_have_them():
    assert widths(Task(graph="g", hidden=64)) == [32, 16, 8, 4]
    assert widths(Task(graph="g", model="gat", hidden=24, heads=8)) == [8]
    assert widths(Task(graph="g", model=lambda i, o: None)) == []


def test_other_machines_that_have_the_room():
    names = roomy_machines(30 * GIB, PROFILES.values(), profile("rtx4090"))
    assert names == ["v100-32g", "a100-40g", "l40s", "a100-80g", "h100", "h200"]
    assert roomy_machines(10**15, PROFILES.values(), profile("h200")) == []
