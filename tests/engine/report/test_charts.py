"""The scaffold that all charts stand on, and the Gantt chart of queues."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from tests.sched.queues import GIB, device, task
from weft.engine.charts import Frame, head, linear, package_file, path, queue_svg
from weft.sched.policies import find_policy
from weft.sched.simulator import SimulatedGroup, simulate

FRAME = Frame(width=100, height=50, left=10, right=5, top=4, bottom=6)


def test_scales_reach_the_edges_of_the_plot():
    assert [FRAME.across(1, 3)(epoch) for epoch in (1, 2, 3)] == [10, 52.5, 95]
    assert [FRAME.up(0, 2)(value) for value in (0, 2)] == [44, 4]
    assert linear(1, 1, 0, 10)(1) == 0  # one value alone has a place as well


def test_elements_are_escaped_and_placed():
    grid = FRAME.grid([0.0, 1.0], FRAME.up(0, 1), lambda value: f"<{value:g}>")
    assert grid.count('class="grid"') == 2
    assert "&lt;1&gt;" in grid
    svg = FRAME.svg('a "b"', [grid], 'class="lines"')
    assert svg.startswith('<svg class="lines" viewBox="0 0 100 50" role="img" aria-label="a &quot;b&quot;">')
    assert FRAME.svg("a", []).startswith("<svg viewBox=")


def test_paths():
    assert path([(0, 1), (1, 0)], float, float) == "0.0,1.0 1.0,0.0"


def test_styles_and_script_are_package_data():
    for name in ("page.css", "sweep.css", "sweep.js"):
        assert len(package_file(name)) > 1000
    assert package_file("page.css") in head("a title")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]["weft"]
    assert "engine/static/*" in data


SVG = "{http://www.w3.org/2000/svg}"


def runs():
    tasks = [task(f"<t{i}>", 1 + i, 5.0 + i, utilisation=0.3) for i in range(5)]
    return [simulate(find_policy(name), tasks, [device()], name=name) for name in ("base", "backfill")]


def test_a_bar_per_group():
    picture = ElementTree.fromstring(queue_svg(runs()))
    bars = [one for one in picture.iter(f"{SVG}rect") if one.get("class") == "bar"]
    assert len(bars) == 10
    texts = " ".join(one.text or "" for one in picture.iter(f"{SVG}text"))
    for part in ("base: makespan", "backfill: makespan", "cuda:0 1", "26.0 GiB"):
        assert part in texts


def test_nothing_comes_from_elsewhere():
    assert queue_svg(runs()).count("http") == 1  # the name space


def test_no_group_at_all():
    picture = ElementTree.fromstring(queue_svg([simulate(find_policy("base"), [], [device()])]))
    assert not [one for one in picture.iter(f"{SVG}rect") if one.get("class") == "bar"]


def test_memory_over_time_and_round_ticks():
    groups = [SimulatedGroup("a", "d", 0, ("a",), GIB, 0.0, 5.0), SimulatedGroup("b", "d", 1, ("b",), GIB, 2.0, 10.0)]
    picture = ElementTree.fromstring(queue_svg([replace(runs()[0], groups=groups)]))
    (memory,) = [one for one in picture.iter(f"{SVG}polygon") if one.get("class") == "memory"]
    heights = [float(point.split(",")[1]) for point in memory.get("points").split()]
    levels = sorted(set(heights), reverse=True)
    assert [levels.index(height) for height in heights] == [0, 0, 1, 1, 2, 2, 1, 1, 0]
    texts = [one.text for one in picture.iter(f"{SVG}text")]
    assert [one for one in texts if one in ("0", "2.00 s", "4.00 s", "6.00 s", "8.00 s", "10.0 s")] == texts[1:7]
