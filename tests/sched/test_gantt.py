"""The Gantt chart is a well-formed picture with a bar per group and nothing from elsewhere."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.sched.queues import GIB, device, task
from weft.sched.gantt import gantt_svg, memory_steps, time_ticks
from weft.sched.policies import find_policy
from weft.sched.simulator import SimulatedGroup, simulate

SVG = "{http://www.w3.org/2000/svg}"


def runs():
    tasks = [task(f"<t{i}>", 1 + i, 5.0 + i, utilisation=0.3) for i in range(5)]
    return [simulate(find_policy(name), tasks, [device()], name=name) for name in ("base", "backfill")]


def test_a_bar_per_group():
    picture = ElementTree.fromstring(gantt_svg(runs()))
    bars = [one for one in picture.iter(f"{SVG}rect") if one.get("class") == "bar"]
    assert len(bars) == 10
    texts = " ".join(one.text or "" for one in picture.iter(f"{SVG}text"))
    for part in ("base: makespan", "backfill: makespan", "cuda:0 1", "26.0 GiB"):
        assert part in texts


def test_nothing_comes_from_elsewhere():
    assert gantt_svg(runs()).count("http") == 1  # the name space


def test_no_group_at_all():
    picture = ElementTree.fromstring(gantt_svg([simulate(find_policy("base"), [], [device()])]))
    assert not [one for one in picture.iter(f"{SVG}rect") if one.get("class") == "bar"]


def test_memory_over_time():
    groups = [SimulatedGroup("a", "d", 0, ("a",), GIB, 0.0, 5.0), SimulatedGroup("b", "d", 1, ("b",), GIB, 2.0, 5.0)]
    assert memory_steps(groups) == [(0.0, GIB), (2.0, 2 * GIB), (5.0, 0)]


@pytest.mark.parametrize(
    ("end", "ticks"), [(10.0, [0, 2, 4, 6, 8, 10]), (0.0, [0]), (0.55, [0, 0.1, 0.2, 0.3, 0.4, 0.5])]
)
def test_ticks_are_round(end, ticks):
    assert time_ticks(0.0, end) == pytest.approx(ticks)
