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
    assert ">cancel</button>" in text
    assert "×4" in text  # four tasks joined, in the Gantt chart
    assert "memory over time" in text
