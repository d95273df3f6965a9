"""How many tasks fill a device, by rule."""

from __future__ import annotations

from dataclasses import replace

from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.cost.rule import hidden_bytes
from weft.planner.grouping.limits import GroupLimits, fitting_size
from weft.planner.machine_profiles import profile

STATS = GraphStats("g", 60_000, 240_000, 64)
TASK = Task(graph="g", hidden=16)


def sized(cache):
    machine = profile("cpu")
    return fitting_size(TASK, GroupLimits(STATS, "cpu", replace(machine, host=replace(machine.host, l2_bytes=cache))))


def test_a_cache_that_holds_the_rows_of_all_does_not_limit_them():
    row = hidden_bytes(TASK, STATS)
    plenty = sized(1 << 40)
    assert plenty.tasks > 1
    assert "launches" in plenty.why
    assert sized(plenty.tasks * row) == plenty
    less = sized(plenty.tasks * row - 1)
    assert less.tasks == plenty.tasks - 1
    assert less.why == f"the rows of {less.tasks} tasks fill the cache (by rule, not measured)"
