"""The one garbage collector of a process, paused from several threads."""

from __future__ import annotations

import gc
import threading

import pytest

from weft.core.startup import collects, gc_paused, let_collect, no_collections


@pytest.fixture(autouse=True)
def _collecting():
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("pause", [gc_paused, no_collections])
def test_a_pause_that_ends_in_another_thread_does_not_end_this_one(pause):
    begun, over = threading.Event(), threading.Event()

    def other() -> None:
        with pause():
            begun.set()
            assert over.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(10)
    with no_collections():  # a capture that begins while the other thread imports something
        over.set()
        thread.join(10)
        assert not gc.isenabled()
    assert gc.isenabled()


class Circle:
    """Only the collector lets go of it, which then lets other threads run."""

    def __init__(self, reached: threading.Event, go_on: threading.Event) -> None:
        self.itself, self.reached, self.go_on = self, reached, go_on

    def __del__(self) -> None:
        self.reached.set()
        self.go_on.wait(10)


def test_a_collection_of_another_thread_has_ended_when_a_pause_begins():
    reached, go_on, ended = threading.Event(), threading.Event(), []

    def collect() -> None:
        gc.collect()
        ended.append(True)

    Circle(reached, go_on)
    thread = threading.Thread(target=collect)
    thread.start()
    assert reached.wait(10)
    threading.Timer(0.1, go_on.set).start()
    with no_collections():
        assert go_on.is_set()
        thread.join(10)
    assert ended == [True]


def test_one_that_waits_for_the_pause_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr("weft.core.startup.MOST_SECONDS", 0.05)
    reached, go_on = threading.Event(), threading.Event()
    Circle(reached, go_on)
    thread = threading.Thread(target=gc.collect)
    thread.start()
    assert reached.wait(10)
    with no_collections():
        go_on.set()
    thread.join(10)


def test_a_pause_is_not_taken_for_how_the_process_was_found():
    with no_collections():
        assert collects()
        let_collect(False)
        assert not collects()
        let_collect(True)
        assert not gc.isenabled()  # not before the pause ends
    assert gc.isenabled()
    with no_collections():
        let_collect(False)
    assert not gc.isenabled()
    assert not collects()
