"""What a worker of a GPU holds after a group: counted, given back, or a reason to replace it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from weft.core import startup as names
from weft.serve import worker_memory as kept_graphs
from weft.serve.groups import _unfit
from weft.serve.options import LEFTOVER_BYTES, ServeOptions
from weft.serve.worker_memory import KeptGraphs

MIB = 1 << 20


@pytest.fixture
def reserved(monkeypatch):
    """Bytes that the process has of a GPU: of graphs, and the rest."""
    held = {"graphs": 300 * MIB, "rest": 0}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: sum(held.values()))
    monkeypatch.setattr(kept_graphs, "give_back_memory", lambda device, gone: None)
    return held


@pytest.fixture
def kept(reserved, monkeypatch):
    found = KeptGraphs("cuda:0", 1 << 30)
    monkeypatch.setattr(found.store, "bytes_held", lambda: reserved["graphs"])
    monkeypatch.setattr(found.store, "clear", lambda: reserved.update(graphs=0))
    yield found
    names.leave_out_of_collections()


def test_workspaces_and_ends_of_segments_are_none_of_the_next_run(kept, reserved):
    reserved["rest"] = 200 * MIB
    assert kept.settle() == 200 * MIB == kept.store.around()
    assert reserved["graphs"] == 300 * MIB


def test_a_graph_on_its_way_is_no_leak(kept, reserved):
    assert kept.settle() == 0
    reserved["rest"] = 2 * LEFTOVER_BYTES
    with kept._fetching:
        assert kept.settle() == 0
    assert reserved["graphs"] == 300 * MIB


def test_graphs_make_way_if_more_stays_than_they_take(kept, reserved):
    reserved["rest"] = LEFTOVER_BYTES + 1
    assert kept.settle() == LEFTOVER_BYTES + 1
    assert reserved["graphs"] == 0


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_an_evicted_graph_held_is_found_though_it_was_left_out(kept, monkeypatch):
    kept.settle()
    circle, evicted = Circle(), []
    gone = weakref.ref(circle)
    monkeypatch.setattr(kept.store, "settle", lambda: bool(evicted))
    kept.settle()
    del circle
    kept.settle()
    assert gone() is not None  # left out, like all that there was
    evicted.append("a graph")
    kept.settle()
    assert gone() is None


def test_a_cpu_has_nothing_around_graphs():
    assert KeptGraphs("cpu", 1 << 30).settle() == 0


@pytest.mark.parametrize(
    ("device", "message", "words"),
    [
        ("cuda:0", {"kind": "memory", "leftover": 10 * MIB}, ""),  # it goes on: nothing was leaked
        ("cuda:0", {"kind": "memory", "leftover": 300 * MIB}, "left 300 MiB behind"),
        ("cuda:0", {"leftover": 300 * MIB}, "left 300 MiB behind"),
        ("cuda:0", {"kind": "failed", "leftover": None}, "no longer answers"),
        ("cpu", {"kind": "memory", "leftover": 0}, "ran out of memory"),
        ("cpu", {"leftover": 0}, ""),
    ],
)
def test_a_worker_is_replaced_only_for_what_stays_with_its_process(device, message, words):
    told = _unfit(SimpleNamespace(device=device), message)
    assert words in told
    assert bool(words) == bool(told)


def test_what_workers_hold_between_groups_is_set_aside(tmp_path):
    options = ServeOptions(tmp_path / "q.db", workers=3, keep_graphs=100 * MIB)
    assert options.reserved_of(8 << 30, 700 * MIB) == 2 << 30  # at most a quarter
    assert options.reserved_of(80 << 30, 700 * MIB) == 2400 * MIB
    assert options.reserved_of(80 << 30) == 300 * MIB
