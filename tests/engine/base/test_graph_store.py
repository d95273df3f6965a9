"""Graphs that a worker keeps between runs: shared with what is derived from them, evicted by use, never stale."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch

import weft
from weft.core.task import Task
from weft.engine import graphs as graph_store
from weft.engine.graphs import SEGMENT_ENDS, Graphs, GraphStore, bytes_of, sharing, state_of
from weft.graph.generate import citation
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.device.cuda_graph import no_capture

CPU = torch.device("cpu")


def saved(folder, name: str, nodes: int = 60, seed: int = 1) -> str:
    citation(nodes, 4 * nodes, 6, 3, seed=seed).save(folder / name, overwrite=True)
    return str(folder / name)


def place(store: GraphStore, name: str):
    graphs = Graphs(CPU, store=store)
    return graphs.on_device(Task(graph=name, model="gcn"))


def run_keeping(store: GraphStore, task: Task, **how):
    with sharing(store):
        return weft.run(task, **how)


def test_a_graph_is_found_once_and_shared_between_runs(tmp_path):
    store, path = GraphStore(CPU, 1 << 30, 1 << 30), saved(tmp_path, "one")
    first, second = place(store, path), place(store, path)
    assert first is second
    assert first.adj.gcn() is second.adj.gcn()


def test_a_graph_that_was_written_anew_is_read_anew(tmp_path):
    store, path = GraphStore(CPU, 1 << 30, 1 << 30), saved(tmp_path, "one")
    before, key = place(store, path), state_of(path)
    saved(tmp_path, "one", nodes=80)
    assert state_of(path) != key
    assert place(store, path).num_nodes == 80 != before.num_nodes


def test_the_least_recently_used_graph_is_evicted(tmp_path):
    paths = [saved(tmp_path, name) for name in "abc"]
    store = GraphStore(CPU, 0, 1 << 30)
    one = bytes_of(place(store, paths[0]), CPU)
    for path in (paths[1], paths[2], paths[0]):
        place(store, path)
    store.device_bytes = int(2.5 * one)
    store.settle()
    assert [store.holds(path) for path in paths] == [True, False, True]
    store.device_bytes = 0
    store.settle(in_use=[paths[2]])
    assert [store.holds(path) for path in paths] == [False, False, True]


def test_what_is_derived_counts(tmp_path):
    store, path = GraphStore(CPU, 1 << 30, 1 << 30), saved(tmp_path, "one")
    graph = place(store, path)
    before = store.bytes_held()
    graph.adj.gcn().transposed()
    store.settle()
    assert store.bytes_held() > before
    assert bytes_of(graph, CPU) == store.bytes_held()


def test_shared_storages_count_once():
    tensor = torch.zeros(1000)
    assert bytes_of({"a": tensor, "b": [tensor[:10], (tensor,)]}, CPU) == 4000
    assert bytes_of(Adjacency(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)), CPU) > 0


def test_the_cap_of_a_run_follows_the_graphs_of_others(tmp_path):
    one, two = saved(tmp_path, "one"), saved(tmp_path, "two")
    store, told = GraphStore(CPU, 1 << 30, 1 << 30), []
    place(store, one)
    others = store.bytes_held()
    with store.following([two], told.append):
        assert told == [others]
        place(store, two)
        store.settle()
        assert told[-1] == others  # what it brings itself is part of its own budget
        store.clear()
        assert told[-1] == 0
    place(store, one)
    assert told[-1] == 0


def test_a_run_is_not_charged_for_what_others_derived_from_its_graph(tmp_path):
    """A prediction for one model knows of the forms of that model alone."""
    path, reported = saved(tmp_path, "one"), []
    store = GraphStore(CPU, 1 << 30, 1 << 30)
    graph = place(store, path)
    graph.adj.gcn().transposed()
    store.settle()
    with store.following([path], reported.append):
        before = store.bytes_held()
        assert reported == [before]
        place(store, path).adj.mean().transposed()
        store.settle(in_use=[path])
        assert reported[-1] == before < store.bytes_held()  # what it derives itself is part of its own budget
    with store.following([path], reported.append):
        assert reported[-1] == store.bytes_held()  # and not of that of the next one


def test_a_graph_in_use_counts_for_what_else_is_fetched(tmp_path):
    """What a worker holds beyond the bytes of its group never exceeds what is reserved for it."""
    first, second = saved(tmp_path, "one"), saved(tmp_path, "two")
    store, graphs = GraphStore(CPU, 1 << 30, 1 << 30), Graphs(CPU)
    place(store, first)
    store.device_bytes = int(1.5 * store.bytes_held())
    bring = lambda: graphs.bring(Task(graph=second, model="gcn"))  # noqa: E731
    with store.following([first], lambda size: None):
        assert not store.prefetch(second, bring, store.bytes_held())
    store.clear()
    with store.following([first], lambda size: None):
        place(store, first)
        assert store.prefetch(second, bring, store.bytes_held())


def test_what_the_process_holds_before_a_run_is_none_of_it(tmp_path, monkeypatch):
    reserved, reported = [500], []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    store = GraphStore(torch.device("cuda"), 1 << 30, 1 << 30)
    with store.following([], reported.append):
        assert reported == [500]
        reserved[0] = 700  # what it allocates itself
        store.settle()
        assert reported[-1] == 500
    with store.following([], reported.append):
        assert reported[-1] == 700


def test_a_graph_takes_the_whole_segments_of_its_memory_pool(tmp_path, monkeypatch):
    """Asked for all pools at once: asked for one, torch frees the pool's number while it is in use."""
    sizes = [((0, 7), 20, 3), ((0, 7), 2, 1), ((0, 0), 64, 9), ((0, 8), 20, 2)]
    names = ("segment_pool_id", "total_size", "allocated_size")
    segments = [dict(zip(names, (number, total << 20, used << 20), strict=True)) for number, total, used in sizes]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(graph_store, "_own_pool", lambda device: nullcontext(SimpleNamespace(id=(0, 7))))
    store = GraphStore(CPU, 1 << 30, 1 << 30)
    graph = place(store, saved(tmp_path, "one"))
    assert store.bytes_held() == bytes_of(graph, CPU) + (18 << 20)
    store.settle()
    assert store.bytes_held() == bytes_of(graph, CPU) + (18 << 20)


def test_a_graph_is_prefetched_only_within_the_limit(tmp_path):
    path, told = saved(tmp_path, "one"), []
    store, graphs = GraphStore(CPU, 1 << 30, 1 << 30), Graphs(CPU)
    bring = lambda: graphs.bring(Task(graph=path, model="gcn"))  # noqa: E731
    with store.following([], told.append):
        assert not store.prefetch(path, bring, 2 << 30)
        assert store.prefetch(path, bring, 1000)
        assert not store.prefetch(path, bring, 1000)  # it is there
    assert told[1] == 1000 + SEGMENT_ENDS  # before it was fetched
    assert told[-1] == store.bytes_held() > 0


def test_runs_that_share_a_store_have_the_numbers_of_runs_that_do_not(tmp_path):
    path, store = saved(tmp_path, "one"), GraphStore(CPU, 1 << 30, 1 << 30)
    how = {"device": "cpu", "progress": False}
    for model in ("gcn", "sage", "gcn"):
        task = weft.Task(graph=path, model=model, hidden=4, epochs=4, layers=3, dropout=0.0)
        kept, own = run_keeping(store, task, **how), weft.run(task, **how)
        assert kept.history == own.history
    graph = place(store, path)
    assert graph.kept is not None


def test_a_first_aggregation_is_kept_with_its_graph(tmp_path):
    path, store = saved(tmp_path, "dense"), GraphStore(CPU, 1 << 30, 1 << 30)
    dense = place(store, path)
    dense = dense._changed(x=torch.rand(dense.num_nodes, 5))
    dense.save(path, overwrite=True)
    task = weft.Task(graph=path, model="gcn", hidden=4, epochs=2, dropout=0.0)
    run_keeping(store, task, device="cpu", progress=False)
    first = place(store, path).kept
    assert first
    tensors = dict(first)
    run_keeping(store, task.with_values(seed=5), device="cpu", progress=False)
    assert all(place(store, path).kept[key] is value for key, value in tensors.items())


def test_bytes_of_graphs_on_the_host_are_counted_between_groups_alone(tmp_path, monkeypatch):
    """Threads that prepare starts ask for graphs while a group trains on their tensors."""
    store, paths = GraphStore(CPU, 1 << 30, 1 << 30), [saved(tmp_path, name) for name in "ab"]
    graphs = [Graphs(on_host=True, store=store).summary(Task(graph=path, model="gcn")) for path in paths]
    counted = []
    monkeypatch.setattr(graph_store, "bytes_of", lambda thing, *_: counted.append(thing) or 7)
    for path in paths:
        Graphs(on_host=True, store=store).summary(Task(graph=path, model="gcn"))
    assert counted == []
    store.settle()
    assert [any(one is graph for one in counted) for graph in graphs] == [True, True]
    assert [kept.bytes for kept in store._host.values()] == [7, 7]


def test_nothing_is_pinned_by_another_thread_while_a_graph_is_captured(tmp_path, monkeypatch):
    """Pinning calls CUDA: a thread that prepares a start would break the capture of the one that trains."""
    store, path, done = GraphStore(torch.device("cuda"), 1 << 30, 1 << 30), saved(tmp_path, "one"), []
    monkeypatch.setattr(graph_store, "_pinned", lambda graph: done.append("pinned") or graph)
    task = Task(graph=path, model="gcn")
    thread = threading.Thread(target=lambda: Graphs(on_host=True, store=store).stats(task))
    with no_capture():  # the lock that a capture holds
        thread.start()
        thread.join(0.3)
        assert done == []
    thread.join(10)
    assert done == ["pinned"]


def test_a_run_and_a_thread_that_fetches_do_not_wait_for_each_other(tmp_path):
    store, paths = GraphStore(CPU, 1 << 30, 1 << 30), [saved(tmp_path, name) for name in "ab"]
    begun, fetched = threading.Event(), []

    def fetch() -> None:
        with no_capture():
            begun.set()
            fetched.append(store.prefetch(paths[1], lambda: weft.load(paths[1]), 1000))

    def make():
        thread.start()
        begun.wait(0.3)  # with only the store's lock taken here, it has that of captures now, and each waits
        return Graphs(CPU, store=store).bring(Task(graph=paths[0], model="gcn"))

    thread = threading.Thread(target=fetch, daemon=True)
    run = threading.Thread(target=lambda: store.placed(paths[0], make), daemon=True)
    run.start()
    run.join(10)
    assert not run.is_alive()
    thread.join(10)
    assert fetched == [True]


def test_who_fetches_does_not_tell_a_run_that_has_ended(tmp_path):
    """It would set the memory cap of a run after the next one has set its own."""
    store, path, told = GraphStore(CPU, 1 << 30, 1 << 30), saved(tmp_path, "one"), []
    counting, go_on = threading.Event(), threading.Event()

    def changed(others: int) -> None:
        told.append(others)
        if len(told) > 1:
            counting.set()
            assert go_on.wait(10)

    thread = threading.Thread(target=lambda: store.prefetch(path, lambda: weft.load(path), 1000))
    with store.following([], changed):
        thread.start()
        assert counting.wait(10)
        threading.Timer(0.2, go_on.set).start()
    assert go_on.is_set()  # the end of the run waited for the thread
    before = len(told)
    thread.join(10)
    assert len(told) == before
