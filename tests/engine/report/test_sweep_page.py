"""The report of a sweep: it says who won, holds whatever it is given, and works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from tests.engine.sweeps import made
from weft.core.search_space import loguniform, uniform
from weft.core.sweep import Sweep
from weft.engine.page import render_sweep_report

GRID = Sweep("cora", hidden=[16, 64], lr=[0.1, 0.2], dropout=[0.3, 0.6], seed=[0, 1], name="mine")
VOID = ("meta", "link", "line", "polyline", "circle", "rect")


def score(task):
    return 0.3 + task.lr + task.hidden / 1000 + task.seed / 1000


PAGES = {
    "one": lambda: made(Sweep("cora"), score),
    "grid": lambda: made(GRID, score, broken=["hidden=16 lr=0.1 dropout=0.3 seed=0"]),
    "two hundred": lambda: made(
        Sweep("cora", model=["gcn", "sage"], lr=loguniform(1e-4, 0.1), dropout=uniform(0, 0.8), samples=100), score
    ),
    "two graphs": lambda: made(Sweep(["cora", "pubmed"], lr=[0.1, 0.2], seed=[0, 1]), score),
    "all diverged": lambda: made(Sweep("cora", lr=[0.1, 0.2]), score, broken=["lr=0.1", "lr=0.2"]),
    "hostile": lambda: made(
        Sweep(
            "cora", tasks=[{"name": "</script><img src=x onerror=alert(1)>", "lr": 0.1}, {"name": "<b>&\"'", "lr": 0.2}]
        ),
        score,
    ),
}


class Balance(HTMLParser):
    """Counts tags that were opened and not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("kind", PAGES)
def test_pages_are_well_formed_and_self_contained(kind):
    page = render_sweep_report(PAGES[kind]())
    checker = Balance()
    checker.feed(page)
    assert checker.open == []
    assert "img" not in checker.seen
    assert not re.search(r"https?://|src=\"|url\(", page)
    data = re.findall(r'<script class="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert sum(len(json.loads(one)["tasks"]) for one in data) == len(PAGES[kind]())
    assert not re.search(r'points="[^"]*nan', page)


def test_every_graph_has_a_section_and_a_winner_of_its_own():
    sweep = Sweep(["cora", "pubmed"], lr=[0.1, 0.2], seed=[0, 1], name="two")
    page = render_sweep_report(made(sweep, lambda task: 0.9 - task.lr if task.graph == "cora" else task.lr))
    assert "two: 8 trainings on cora, pubmed" in page
    assert re.findall(r'<div class="big">(.*?)</div>', page) == ["lr=0.1", "lr=0.2"]
    first, second = page.split("<section")[1:]
    assert '<h1 class="graph">cora ' in first
    assert '<h1 class="graph">pubmed ' in second
    assert first.count('<tr data-i="') == second.count('<tr data-i="') == 4
    assert '<td><a href="#graph-1">pubmed</a></td><td>4</td><td>lr=0.2</td><td>val accuracy 0.2000</td>' in page


def test_the_winner_and_why():
    page = render_sweep_report(PAGES["grid"]())
    assert '<div class="big">hidden=64 lr=0.2 dropout=0.3</div>' in page
    assert "lr=0.2 was best on average" in page
    assert "dropout made no clear difference" in page
    assert "task &#x27;hidden=16 lr=0.1 dropout=0.3 seed=0&#x27;: loss became nan at epoch 1" in page
    assert page.count('<tr data-i="') == 16
    assert "No member reached an evaluation" in render_sweep_report(PAGES["all diverged"]())


def test_lines_that_leave_the_plot_are_counted_at_its_edge():
    result = made(GRID, score)
    cut = [member.history for member in result.tasks[:3]]
    for history in cut:
        history["val_accuracy"][0] = -0.5
        history["loss"][5] = 1e9
    page = render_sweep_report(result)
    assert re.search(r"▾ \d+ lines below 0\.\d", page)
    assert re.search(r"▴ 3 lines above \d", page)
    whole = made(Sweep("cora", lr=[0.1, 0.2]), score)
    for member in whole.tasks:
        member.history["val_accuracy"] = [0.5] * 12
    assert " lines below " not in render_sweep_report(whole)


# ---- in a browser ------------------------------------------------------------------------------------

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=3000", "--dump-dom",
]  # fmt: skip

LISTEN = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(event.message));
console.error = console.warn = (...words) => faults.push(words.join(" "));
</script>"""

USE = """<script>
const found = {};
const rows = () => [...document.querySelectorAll(".members tbody tr")].map((row) => row.dataset.i);
const heading = (name) => [...document.querySelectorAll(".members th")].find((th) => th.textContent === name);
found.before = rows();
heading("val accuracy").click();
found.ascending = rows();
heading("val accuracy").click();
found.descending = rows();
const svg = document.querySelector("svg.lines");
const best = [...svg.querySelectorAll("polyline.best")].pop();
if (best) {
  const [x, y] = best.getAttribute("points").split(" ")[0].split(",").map(Number);
  const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  const at = { clientX: box.left + x * scale, clientY: box.top + y * scale, bubbles: true };
  svg.dispatchEvent(new MouseEvent("mousemove", at));
  found.lit = [...document.querySelectorAll(".on")].map((node) => node.dataset.i);
  found.tip = document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
  svg.dispatchEvent(new MouseEvent("mouseleave"));
  found.dark = document.querySelectorAll(".on").length;
}
document.querySelector(".members tbody tr").click();
found.pinned = document.querySelectorAll("tr.pin").length;
found.colours = new Set([...document.querySelectorAll("polyline.m")].map((n) => getComputedStyle(n).stroke)).size;
found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.faults = faults;
document.body.innerHTML = "";
const out = document.createElement("pre");
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>"""


def in_browser(page, folder):
    """Open ``page``, use it as a reader would, and return what was seen."""
    page = page.replace("<head>", "<head>" + LISTEN).replace("</body>", USE + "</body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'page.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    text = re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL).group(1)
    return json.loads(text.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("kind", PAGES)
def test_in_a_browser(kind, tmp_path):
    result = PAGES[kind]()
    seen = in_browser(render_sweep_report(result), tmp_path)
    assert seen["faults"] == []
    assert seen["wide"] <= 0, "no sideways scrolling"
    assert seen["pinned"] == 1
    if kind == "two graphs":
        return
    ranked = [] if kind == "all diverged" else [str(i) for i in result.ranking()]
    scored = len(ranked)
    assert seen["descending"][len(result) - scored :] == ranked or seen["descending"][:scored] == ranked
    assert sorted(seen["ascending"]) == sorted(seen["before"])
    if kind not in ("all diverged", "one"):
        assert seen["tip"].startswith(result[int(seen["lit"][0])].name)
        assert set(seen["lit"]) <= {str(i) for i in result.settings_table()[0].positions}
        assert len(set(seen["lit"])) == 1
        assert len(seen["lit"]) >= 4, "in the table and in every chart"
        assert seen["dark"] == 0
        assert seen["colours"] > 1


MEASURE = """<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const inner = frame.contentDocument, seen = { headings: [] };
  const sizes = [...inner.querySelectorAll("svg text")].map((text) =>
    parseFloat(frame.contentWindow.getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a);
  seen.smallest = Math.min(...sizes);
  const text = (cell) => {
    const range = inner.createRange();
    range.selectNodeContents(cell);
    return range.getBoundingClientRect();
  };
  for (const th of inner.querySelectorAll(".settings th")) {
    const column = [...inner.querySelectorAll(`.settings td:nth-child(${th.cellIndex + 1})`)];
    const cells = column.filter((td) => td.textContent);
    if (!cells.length || !th.textContent) continue;
    const [a, b] = [text(th), text(cells[0])];
    seen.headings.push(Math.min(Math.abs(a.left - b.left), Math.abs(a.right - b.right)));
  }
  seen.wide = inner.documentElement.scrollWidth - inner.documentElement.clientWidth;
  document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_on_a_telephone_labels_are_readable_and_headings_stand_over_their_columns(tmp_path):
    result = PAGES["grid"]()
    (tmp_path / "report.html").write_text(render_sweep_report(result), encoding="utf-8")
    frame = '<iframe src="report.html" style="width:390px;height:3000px"></iframe>'
    (tmp_path / "page.html").write_text(f"<body>{frame}{MEASURE}</body>", encoding="utf-8")
    flags = [*FLAGS, "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *flags, f"file://{tmp_path / 'page.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    seen = json.loads(re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL).group(1))
    assert seen["smallest"] >= 9, "pixels"
    assert len(seen["headings"]) >= 4
    assert max(seen["headings"]) < 2, "pixels between the edges of a heading and its column"
    assert seen["wide"] <= 0, "no sideways scrolling"
