"""report.html is there while a sweep trains, and after it was interrupted."""

from __future__ import annotations

import os
import signal

import pytest

import weft
from weft.engine import folder as running_report
from weft.engine.control import Interrupted
from weft.engine.folder import RunningReport


def test_a_sweep_has_a_page_from_the_beginning_on(tmp_path, monkeypatch):
    monkeypatch.setattr(running_report, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(running_report, "SHARE", 1e9)
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


def test_the_page_is_written_rarely_and_never_ends_a_run():
    written = []
    report = RunningReport(written.append)
    for _ in range(3):
        report(list)
    assert len(written) == 1
    report(list, force=True)
    assert len(written) == 2

    def full(members):
        raise OSError(28, "No space left on device")

    RunningReport(full)(list)
