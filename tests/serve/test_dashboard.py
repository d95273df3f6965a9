"""The dashboard in headless Chromium: it draws the queue, at the width of a desk and of a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import weft
from tests.serve.serving import TASK, ServeProcess

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PAGE = Path(weft.__file__).parent / "serve" / "static" / "dashboard.html"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"]


def test_the_page_needs_no_other_host():
    text = PAGE.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|src=|innerHTML", text)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = ServeProcess(tmp_path_factory.mktemp("dashboard"), "--no-auth", "--checkpoint-seconds", "0.5").start()
    client = weft.Client(process.url)
    done = client.submit(
        weft.Sweep("demo", model="gcn", hidden=8, epochs=150, lr=[0.01, 0.02], seed=range(2), name="s")
    )
    client.wait(done, 60)
    client.submit(weft.Task(**{**TASK, "epochs": 100_000, "name": "<b>long</b>"}), user="anna")
    client.submit(weft.Task(**{**TASK, "epochs": 90_000, "layers": 3, "name": "waits"}), user="ben")
    deadline = time.monotonic() + 60
    while not client.tasks("running") or "waits for a free worker" not in str(client.tasks()):
        assert time.monotonic() < deadline, client.tasks()
        time.sleep(0.1)
    yield process
    process.stop()


def chromium(url: str, *more: str) -> str:
    with tempfile.TemporaryDirectory() as home:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={home}", "--virtual-time-budget=6000", *more, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1200, 390])
def test_it_draws_the_queue(server, width):
    text = chromium(server.url + "/", f"--window-size={width},1400", "--dump-dom")
    assert 'id="all" hidden' not in text
    assert "&lt;b&gt;long&lt;/b&gt;" in text
    assert "<b>long</b>" not in text
    assert "waits for a free worker" in text
    assert text.count("<tr class") == 6
    assert 'data-sweep="s-1"' in text
    assert "4 tasks" in text
    assert ">cancel</button>" in text
    assert "×4" in text  # four tasks joined, in the Gantt chart
    assert "memory over time" in text
    assert "held by their workers, measured" in text
    assert "set aside for running groups, predicted" in text
    assert "kept by idle workers" in text
    assert "use over time" in text
    assert "running-score" in text  # of the task that trains


def rows_of(text: str) -> list[str]:
    """The tasks in the order of the table, by what their settings vary."""
    return re.findall(r"lr=[0-9.]+ seed=[0-9]", text[text.index('id="tasks"') :])


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_it_sorts_by_score_and_searches(server):
    tasks = weft.Client(server.url).tasks("done")
    ranked = [task["name"] for task in sorted(tasks, key=lambda task: -task["score"])]
    scores = {task["name"]: task["score"] for task in tasks}
    shown = rows_of(chromium(server.url + "/#sort=score&state=done", "--window-size=1280,1400", "--dump-dom"))
    assert shown[0] == ranked[0] or scores[shown[0]] == scores[ranked[0]]  # the best, in the row of the sweep
    assert [scores[name] for name in shown[1:]] == [scores[name] for name in ranked]
    text = chromium(server.url + "/#search=0.02+seed%3D1", "--window-size=1280,1400", "--dump-dom")
    assert set(rows_of(text)) == {"lr=0.02 seed=1"}
    text = chromium(server.url + "/#user=ben", "--window-size=1280,1400", "--dump-dom")
    assert text.count("<tr class") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_it_shows_one_task_and_lays_curves_over_each_other(server, width):
    task = weft.Client(server.url).tasks("done")[0]
    text = chromium(f"{server.url}/#task={task['id']}", f"--window-size={width},1400", "--dump-dom")
    details = text[text.index('id="details"') : text.index('id="search"')]
    for words in (
        "Settings",
        "hidden",
        "its group:",
        "too short to share",  # a reason of its plan
        ">report</button>",
        ">weights</button>",
        ">log</button>",
        f"s-1: {task['name']}",  # several sweeps have a seed=0
        "submitted",
    ):
        assert words in details
    [running] = weft.Client(server.url).tasks("running")
    text = chromium(f"{server.url}/#task={running['id']}", f"--window-size={width},1400", "--dump-dom")
    details = text[text.index('id="details"') : text.index('id="search"')]
    assert ">pause</button>" in details  # where the list has no room for it
    text = chromium(f"{server.url}/#curves=s-1", f"--window-size={width},1400", "--dump-dom")
    curve = text[text.index('id="curve"') : text.index('id="details"')]
    assert curve.count("<title>lr=") == 8  # four tasks, loss and score


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_it_counts_the_workers_of_ranks_and_offers_predictions(tmp_path):
    process = ServeProcess(tmp_path, "--no-auth", "--workers", "2").start()
    client = weft.Client(process.url)
    [trained] = client.wait(client.submit(weft.Task(**TASK)), 60)
    [asked] = client.wait([client.infer(trained["id"], nodes="test")], 60)
    client.submit(weft.Task(**{**TASK, "epochs": 100_000}), ranks=2)
    deadline = time.monotonic() + 60
    while not client.tasks("running"):
        assert time.monotonic() < deadline, client.tasks()
        time.sleep(0.1)
    text = chromium(f"{process.url}/#task={asked['id']}", "--window-size=1280,1400", "--dump-dom")
    process.stop()
    assert "on 2 ranks of cpu" in text
    assert "0 of 2 workers idle" in text
    assert "an inference task has no learning curve" in text
    details = text[text.index('id="details"') : text.index('id="search"')]
    assert all(f">{words}</button>" in details for words in ("predictions", "result", "log"))
    assert ">weights</button>" not in details
