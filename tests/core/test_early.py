"""Modules that are imported beside other work."""

from __future__ import annotations

import sys

from weft.core.lazy.early import import_early


def test_it_is_there_for_whoever_imports_it_next(tmp_path, monkeypatch):
    (tmp_path / "slow_one.py").write_text("import time\ntime.sleep(0.2)\nvalue = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    thread = import_early("slow_one")
    assert thread is not None
    import slow_one  # waits for the thread's

    assert slow_one.value == 3
    thread.join()
    assert import_early("slow_one") is None
    sys.modules.pop("slow_one")


def test_an_error_is_left_to_who_needs_it(tmp_path, monkeypatch):
    (tmp_path / "broken_one.py").write_text("raise ImportError('no')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    thread = import_early("broken_one")
    assert thread is not None
    thread.join()
    assert "broken_one" not in sys.modules
