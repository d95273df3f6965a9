"""The chart of a plan's memory: a picture or a page that needs nothing else."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.engine.charts import timeline_svg, write_timeline
from weft.planner.machine_profiles import profile
from weft.planner.report.plan_report import GroupEstimate, PlanReport, TaskEstimate

MIB = 2**20
GROUP = GroupEstimate(
    Plan(("a <b>",)), Cost(total_bytes=9 * MIB, seconds={"gpu": 1.0}), 10, True,
    timeline={"graph": (2 * MIB,) * 4, "activation": (0, MIB, 3 * MIB, MIB), "odd": (0, 0, 0, MIB)},
    phases=("forward", "forward", "backward", "update"),
)  # fmt: skip


def report(*groups):
    tasks = (TaskEstimate("a <b>", "gcn", "g", 10, 5, GROUP.cost, 0),)
    return PlanReport("my <plan>", profile("h200"), 10 * MIB, tasks, groups, graphs=("g",))


def points(svg):
    root = ElementTree.fromstring(svg)
    return [node.get("points").split() for node in root.iter("{http://www.w3.org/2000/svg}polygon")]


def test_a_polygon_for_every_kind_one_on_top_of_the_other():
    graph, activation, odd = points(timeline_svg("t", GROUP, 10 * MIB))
    assert len(graph) == len(activation) == len(odd) == 8
    heights = [float(point.split(",")[1]) for point in activation[:4]]
    assert heights[2] == min(heights)
    assert activation[4:][::-1] == graph[:4]


def test_it_says_the_peak_the_phases_and_the_budget():
    svg = timeline_svg("t <1>", GROUP, 10 * MIB)
    for part in ("peak 5.00 MiB", "forward", "backward", "budget 10.0 MiB", "t &lt;1&gt;", ">2.00 MiB<", ">8.00 MiB<"):
        assert part in svg
    assert "budget" not in re.sub(r"<style>.*?</style>", "", timeline_svg("t", GROUP, 1000 * MIB))


def test_a_page_has_every_group_and_the_words(tmp_path):
    write_timeline(report(GROUP, GROUP), tmp_path / "sub" / "plan.html")
    page = (tmp_path / "sub" / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "my &lt;plan&gt;" in page
    assert "<b>" not in page
    assert not re.search(r'(src|href)="(?!data:,)', page)


def test_a_picture_has_the_largest_group(tmp_path):
    larger = GroupEstimate(Plan(("large",)), Cost(total_bytes=99 * MIB), 1, True, phases=("forward",), timeline={})
    write_timeline(report(GROUP, larger), tmp_path / "plan.svg")
    assert "group 2: large" in (tmp_path / "plan.svg").read_text()


def test_other_kinds_of_files_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"must end in .html or .svg"):
        write_timeline(report(GROUP), tmp_path / "plan.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        write_timeline(report(GROUP), tmp_path / "file" / "plan.svg")
