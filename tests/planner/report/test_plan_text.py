"""A report in words: the answer first, every decision with its reason, alike groups once."""

from __future__ import annotations

import json
from dataclasses import replace

from weft.core.cost import Cost
from weft.core.plan import Plan
from weft.planner.machine_profiles import profile
from weft.planner.report.plan_report import GroupEstimate, PlanReport, Suggestion, TaskEstimate

GIB = 2**30
COST = Cost(
    peak_bytes=3 * GIB, reserved_bytes=4 * GIB, total_bytes=5 * GIB, bytes={"activation": 2 * GIB, "graph": GIB},
    seconds={"gpu": 0.002}, families={"spmm": 0.0015, "matmul": 0.0005}, phases={"forward": 0.002},
)  # fmt: skip


def report(groups: int = 1, members: int = 2, budget: int = 24 * GIB, **changes) -> PlanReport:
    """``groups`` equal groups of ``members`` tasks each."""
    names = [[f"t{g}-{m}" for m in range(members)] for g in range(groups)]
    estimates = [
        GroupEstimate(
            Plan(tuple(inside), "stacked", "cuda", why=("because",)), COST, 200, COST.total_bytes <= budget,
            at_peak=("2.00 GiB activation",), advice=("less",), unknown=("aten.odd",), note="scaled",
        )
        for inside in names
    ]  # fmt: skip
    tasks = [TaskEstimate(name, "gcn", "g", 200, 1234, COST, g) for g, inside in enumerate(names) for name in inside]
    return PlanReport(
        "sweep", profile("h200"), budget, tuple(tasks), tuple(estimates), graphs=("g (9 nodes)",), **changes
    )


def test_the_answer_comes_first():
    lines = str(report()).splitlines()
    assert lines[0] == "sweep: 2 tasks in 1 group on g (9 nodes)"
    assert lines[1] == "machine   h200 (profile)"
    assert lines[2] == "memory    5.00 GiB of 24.0 GiB: fits"
    assert lines[3] == "time      400 ms for all epochs of all tasks"


def test_parts_reasons_and_doubts_are_there():
    text = " ".join(str(report()).split())  # wherever lines were folded
    for part in (
        "activations 2.00 GiB, graph 1.00 GiB",
        "the allocator keeps another 1.00 GiB idle",
        "aggregation 75%, products 25%",
        "2.00 ms, 1.00 ms per task; 200 epochs 400 ms",
        "at the peak: 2.00 GiB activation",
        "to lower it: less",
        "- because",
        "no cost is known for aten.odd",
        "- scaled",
    ):
        assert part in text, part


def test_alike_groups_are_told_once():
    text = str(report(groups=5))
    assert "groups 1, 2, 3, 4, 5 (5 alike, each): 2 tasks" in text
    assert text.count("- because") == 1


def test_alike_tasks_share_a_line():
    lines = [line for line in str(report(groups=2, members=5)).splitlines() if "1,234" in line]
    assert len(lines) == 2
    assert lines[0].startswith("t0-0 and 4 alike ")


def test_long_sweeps_are_cut():
    text = str(report(groups=30, members=1))
    assert "... and 18 more" in text


def test_what_does_not_fit_says_so_and_what_would():
    nearest = Suggestion({"precision": "bf16"}, "with precision='bf16' it takes 1 GiB", COST)
    found = report(budget=GIB, nearest=(nearest,), notes=("a remark",))
    assert not found.fits
    text = str(found)
    assert "5.00 GiB of 1.00 GiB: does not fit" in text
    assert "does not fit into 1.00 GiB" in text
    assert "nearest plan that fits\n  - with precision='bf16' it takes 1 GiB" in text
    assert text.endswith("notes\n  - a remark")


def test_measured_machines_are_told_from_profiles():
    assert "h200 (measured)" in str(replace(report(), machine=replace(profile("h200"), measured=True)))


def test_it_is_data():
    data = json.loads(json.dumps(report(groups=2).to_dict()))
    assert data["fits"] is True
    assert data["peak_bytes"] == 5 * GIB
    assert data["run_seconds"] == 0.8
    assert data["groups"][1]["plan"]["why"] == ["because"]
    assert data["tasks"][3]["group"] == 1
    assert data["groups"][0]["cost"]["epoch_seconds"] == 0.002


def test_many_groups_are_summed_up():
    whole = report(groups=30, members=1, budget=40 * GIB)
    groups = tuple(
        replace(group, cost=replace(COST, total_bytes=(index + 1) << 30)) for index, group in enumerate(whole.groups)
    )
    text = str(replace(whole, groups=groups))
    assert [line for line in text.splitlines() if line.startswith("group ")] == [
        f"group {index}: 1 task, stacked, on cuda" for index in range(19, 31)
    ]
    assert "... and 18 smaller groups of 18 tasks: 1.00 GiB to 18.0 GiB each" in text
