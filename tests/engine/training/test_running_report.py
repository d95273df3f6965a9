"""report.html is there while a sweep trains, and after it was interrupted."""

from __future__ import annotations

import os
import signal

import pytest

import weft
from weft.engine import folder, job
from weft.engine.control import Interrupted


def test_a_sweep_has_a_page_from_the_beginning_on(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(job, "REPORT_SHARE", 1e9)
    pages = []

    def look(event):
        if event.kind == "progress":
            pages.append((tmp_path / "report.html").read_text())

    sweep = weft.Sweep("demo", model=["gcn", "gat"], hidden=8, epochs=30)
    weft.run(
        sweep, device="cpu", out=tmp_path, progress=False, on_event=look, options=weft.RunOptions(checkpoint_every=0.0)
    )
    assert any('class="running"' in page for page in pages)
    assert 'class="waiting"' in pages[0]
    final = (tmp_path / "report.html").read_text()
    assert 'class="running"' not in final
    assert 'class="waiting"' not in final


@pytest.mark.parametrize("several", [True, False])
def test_an_interrupt_leaves_a_page(tmp_path, several):
    sent = []

    def interrupt(event):
        if event.kind == "progress" and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    work = {"graph": "demo", "hidden": 4, "epochs": 100_000}
    work = weft.Sweep(**work, seed=[0, 1]) if several else weft.Task(**work)
    with pytest.raises(Interrupted):
        weft.run(work, device="cpu", out=tmp_path, progress=False, on_event=interrupt)
    page = (tmp_path / "report.html").read_text()
    assert "<polyline" in page or "<path" in page
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("full", [False, True])
def test_the_page_is_written_rarely_and_never_ends_a_run(tmp_path, monkeypatch, full):
    written, write = [], folder.write_text

    def count(path, text):
        written.append(path.name)
        if full and len(written) == 1:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(folder, "write_text", count)
    options = weft.RunOptions(checkpoint_every=0.0)  # a page may be written with each of them
    sweep = weft.Sweep("demo", hidden=4, epochs=40, seed=[0, 1])
    weft.run(sweep, device="cpu", out=tmp_path, progress=False, options=options)
    assert written == ["report.html"] * 2, "one at the beginning, one at the end"
    assert (tmp_path / "report.html").exists()
