"""What is begun beside other work, and objects that are made while a run starts."""

from __future__ import annotations

import gc
import threading

import pytest
import torch  # noqa: F401  (a pause inside which torch is imported keeps what it made for good)

from weft.core import startup as names
from weft.core.startup import gc_paused, start_in_background


def test_it_runs_beside_the_caller():
    here, there = threading.Event(), threading.Event()

    def work() -> None:
        there.set()
        assert here.wait(10)

    thread = start_in_background(work, "start")
    assert there.wait(10)  # while it has not ended yet
    assert thread.is_alive()
    assert thread.name == "start"
    assert thread.daemon
    here.set()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_is_left_to_who_needs_it(capfd):
    def work() -> None:
        raise RuntimeError("no device")

    start_in_background(work, "start").join(10)
    assert capfd.readouterr().err == ""


@pytest.fixture
def _frozen_again():
    yield
    names.leave_out_of_collections()


@pytest.mark.usefixtures("_frozen_again")
@pytest.mark.parametrize("interpreters_own", [0, 375])  # Python 3.12 begins with some that are frozen
def test_what_a_pause_made_is_old_afterwards(monkeypatch, interpreters_own):
    gc.unfreeze()  # whoever froze objects in this process
    monkeypatch.setattr(names._Collector, "frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: interpreters_own)
    with gc_paused():
        made = [[number] for number in range(1000)]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert not any(id(one) in young for one in made)


def test_what_is_left_out_of_collections_is_not_counted_again(monkeypatch):
    def count():
        raise AssertionError("walks through all objects that are frozen, which takes longer than a small task's start")

    frozen = []
    monkeypatch.setattr(names._Collector, "frozen", False)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append(False))
    monkeypatch.setattr(gc, "get_freeze_count", count)
    names.leave_out_of_collections()
    with gc_paused():
        pass
    assert frozen == [True]
    assert gc.isenabled()
