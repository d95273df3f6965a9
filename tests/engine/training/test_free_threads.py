"""Threads by what is free: fewer beside other processes, more when they are gone, never more than torch was given."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.engine import process_state as module
from weft.engine.process_state import FreeThreads, LoadSample
from weft.planner.grouping.step_options import free_threads


@pytest.mark.parametrize(
    ("most", "cores", "others", "count"),
    [(2, 2, 0.0, 2), (2, 2, 0.2, 2), (2, 2, 1.0, 1), (2, 2, 3.0, 1), (4, 8, 5.0, 3), (4, 8, 0.0, 4), (1, 8, 0.0, 1)],
)
def test_a_thread_needs_a_core(most, cores, others, count):
    assert free_threads(most, cores, others) == count


@pytest.fixture
def machine(monkeypatch):
    """A machine of two cores on which others take as many of them as the test says."""
    state = {"now": 0.0, "all": 0.0, "others": 0.0}

    def pass_time(seconds, others):
        state["now"] += seconds
        state["all"] += seconds * others

    monkeypatch.setattr(module.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(LoadSample, "now", classmethod(lambda cls: cls(state["now"], 0.0, state["all"], 2)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield pass_time
    torch.set_num_threads(before)


def test_threads_go_and_come_back(machine):
    threads = FreeThreads()
    machine(0.1, 2.0)
    assert threads.choose() is None, "too little was seen"
    machine(0.2, 1.5)
    assert threads.choose() == "1 of 2 threads: other processes take 1.7 of 2 cores"
    assert torch.get_num_threads() == 1
    machine(0.5, 0.0)
    assert threads.choose() is None
    machine(0.6, 0.0)
    assert threads.choose() == "2 of 2 threads: other processes take 0.0 of 2 cores"
    assert torch.get_num_threads() == 2


def test_a_number_of_threads_that_the_user_said_stays(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = FreeThreads()
    machine(5.0, 2.0)
    assert threads.choose() is None
    assert torch.get_num_threads() == 2


def test_one_thread_stays_one(machine):
    torch.set_num_threads(1)
    threads = FreeThreads()
    machine(5.0, 0.0)
    assert threads.choose() is None
    assert torch.get_num_threads() == 1


def test_a_run_says_it_once_and_gives_the_threads_back(machine, monkeypatch):
    machine(1.0, 2.0)
    notes, looks = [], iter(range(1000))
    busy = lambda cls: cls(float(10 * next(looks)), 0.0, 0.0, 2)  # noqa: E731
    monkeypatch.setattr(LoadSample, "now", classmethod(busy))
    monkeypatch.setattr(LoadSample, "others", lambda self, before: 1.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e6)
    monkeypatch.setattr("weft.planner.grouping.step_options.WORK_FOR_THREADS", 0)

    def listen(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    task = weft.Task(graph=tiny_graph(), model="gcn", hidden=4, epochs=3)
    weft.run(task, device="cpu", progress=False, on_event=listen)
    assert [note for note in notes if "threads" in note] == ["1 of 2 threads: other processes take 1.0 of 2 cores"]
    assert torch.get_num_threads() == 2


def test_what_others_take_is_without_this_process():
    look = LoadSample.now()
    if look is None:
        pytest.skip("the system does not say")
    assert look.cores >= 1
    later = LoadSample(look.time + 2.0, look.process + 1.0, look.all + 4.0, look.cores)
    assert later.others(look) == pytest.approx(1.5)
