"""The scaffold that all charts stand on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from weft.engine.charts import Frame, head, linear, package_file, path, thinned

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


@pytest.mark.parametrize("count", [0, 1, 7, 160, 161, 1000])
def test_thinned_lines_keep_their_ends(count):
    points = [(i, float(i)) for i in range(count)]
    kept = thinned(points, 160)
    assert len(kept) <= 161
    assert (not points and not kept) or (kept[0], kept[-1]) == (points[0], points[-1])


def test_paths():
    assert path([(0, 1), (1, 0)], float, float) == "0.0,1.0 1.0,0.0"


def test_styles_and_script_are_package_data():
    for name in ("page.css", "sweep.css", "sweep.js"):
        assert len(package_file(name)) > 1000
    assert package_file("page.css") in head("a title")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]["weft"]
    assert "engine/static/*" in data
