"""The report: round axis numbers, and pages that hold whatever they are given."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from tests.graphs_for_tests import tiny_graph
from weft.core.errors import DivergedError
from weft.core.task import Task
from weft.engine.charts import finite_points, line_chart, nice_ticks
from weft.engine.page import render_report
from weft.engine.run import run


@pytest.mark.parametrize("span", [(0.0, 1.0), (0.31, 0.87), (-3.0, 1e6), (0.5, 0.5), (0.0, 0.0), (1e-9, 3e-9)])
def test_ticks_are_round_and_cover_the_values(span):
    ticks = nice_ticks(*span)
    assert ticks[0] <= span[0] + 1e-12
    assert ticks[-1] >= span[1] - 1e-12
    assert 2 <= len(ticks) <= 12


def test_charts_leave_out_what_was_not_measured():
    svg = line_chart("loss", [('class="train"', finite_points([1.0, math.nan, 0.5, None]))], marked=3)
    assert svg.count("<polyline") == 1
    assert "nan" not in svg
    assert line_chart("loss", [('class="train"', finite_points([math.nan]))]) == ""


@pytest.mark.parametrize("count", [2, 7, 400, 401, 1000])
def test_long_lines_are_thinned_and_keep_their_ends(count):
    svg = line_chart("loss", [("", [(i, float(i)) for i in range(1, count + 1)])])
    points = re.search(r'points="([^"]*)"', svg).group(1).split()
    assert len(points) <= 401
    whole = line_chart("loss", [("", [(1, 1.0), (count, float(count))])])
    ends = re.search(r'points="([^"]*)"', whole).group(1).split()
    assert (points[0], points[-1]) == (ends[0], ends[-1])


class Balance(HTMLParser):
    """Counts tags that were opened and not closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


@pytest.mark.parametrize("epochs", [1, 2, 7])
def test_the_page_is_well_formed_and_escapes(epochs):
    task = Task(graph=tiny_graph(), hidden=4, epochs=epochs, eval_every=2, name="<b>&")
    page = render_report(run(task, progress=False))
    checker = Balance()
    checker.feed(page)
    assert checker.open == []
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page


def test_the_page_says_what_the_best_weights_are(tmp_path):
    graph = tiny_graph()
    page = render_report(run(Task(graph=graph, hidden=4, epochs=3), progress=False))
    assert "best on validation at epoch" in page
    page = render_report(run(Task(graph=graph.with_splits(train=graph.train), hidden=4, epochs=3), progress=False))
    assert "no validation nodes, so the weights are those of epoch 3" in page
    with pytest.raises(DivergedError):
        run(Task(graph=graph, optimizer="sgd", lr=1e30, epochs=3), progress=False, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "no epoch was usable" in page
    assert "nan" not in page.split("Settings")[0]
