"""One buffer of a device: tensors of their own, graphs and the state of groups in it, nothing left of what has gone."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core.task import Task
from weft.engine.graphs import GraphStore, bytes_of, sharing
from weft.engine.inference import predict, read_weights
from weft.engine.memory import HIGH, DevicePool, arrays_of, into_pool
from weft.graph.generate import citation
from weft.serve.worker_memory import KeptGraphs

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
MIB = 1 << 20
CPU = torch.device("cpu")
SETTINGS = {"model": "gcn", "hidden": 8, "epochs": 4}


class PoisonedPool(DevicePool):
    """Fills what is cleared with NaN, so that a tensor that outlives its owner is noticed."""

    def clear(self, owner):
        for block, _ in self._tensors.get(owner, []):
            self._bytes[block.offset : block.stop].fill_(0xFF)
        return super().clear(owner)


@pytest.fixture(params=DEVICES)
def pool(request):
    return PoisonedPool(torch.device(request.param), 8 * MIB)


def saved(folder, name: str, nodes: int = 60, seed: int = 1) -> str:
    citation(nodes, 4 * nodes, 6, 3, seed=seed).save(folder / name, overwrite=True)
    return str(folder / name)


def test_tensors_do_not_overlap_and_are_aligned(pool):
    made = [pool.carve("a", (3, n), torch.float32, HIGH if n % 2 else "low") for n in range(1, 40)]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
        assert tensor.data_ptr() % 512 == 0
        assert tensor.is_contiguous()
    assert [set(tensor.flatten().tolist()) for tensor in made] == [{float(n)} for n in range(39)]
    assert pool.carve("b", (9 * MIB,), torch.uint8) is None
    assert pool.held("b") == 0


def test_what_is_cleared_is_poisoned_and_used_again(pool):
    whole = pool.free
    tensor = pool.carve("a", (1000,), torch.float32).fill_(1.0)
    pool.clear("a")
    assert torch.isnan(tensor).all()
    assert pool.free == whole
    assert pool.carve("b", (1000,), torch.float32).data_ptr() == tensor.data_ptr()


def test_what_is_packed_keeps_its_values_under_the_same_names(pool):
    pool.carve("gone", (700,), torch.float32)
    one, two = torch.arange(600.0), torch.arange(5, dtype=torch.int64)
    found = pool.copy_in("next", {"one": one, "two": two})
    before = found["one"].data_ptr()
    pool.clear("gone")
    pool.pack("next")
    assert found["one"].data_ptr() < before
    assert torch.equal(found["one"].cpu(), one)
    assert torch.equal(found["two"].cpu(), two)
    pool.clear("next")
    assert torch.isnan(found["one"]).all()


def test_all_or_nothing(pool):
    tensors = {"small": torch.zeros(10), "large": torch.zeros(3 * MIB)}
    whole = pool.free
    assert pool.copy_in("a", tensors) is None
    assert pool.free == whole


@pytest.mark.parametrize("graph", ["demo", "planted:relations", "dense"])
def test_a_graph_in_a_pool_is_the_same_graph(pool, graph):
    given = citation(60, 240, 6, 3, seed=1) if graph == "dense" else weft.load(graph)
    found = into_pool(given, pool, "g")
    there, here = arrays_of(found), arrays_of(given)
    assert there.keys() == here.keys()
    for name, array in there.items():
        assert torch.equal(array.cpu(), here[name].cpu()), name
        assert array.untyped_storage().data_ptr() == pool.storage
    assert bytes_of(found, pool.device, pool.storage) == 0
    assert found.stats() == given.stats()


# ---- groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"model": "gat", "norm": "batch"}, {"lr": [0.01, 0.02], "hidden": [4, 8]}])
def test_a_run_in_a_pool_has_the_same_numbers_and_leaves_nothing(pool, tmp_path, settings):
    path, device = saved(tmp_path, "one"), str(pool.device)
    work = weft.Sweep(graph=path, **{**SETTINGS, **settings, "seed": [1, 2]})
    store = GraphStore(pool.device, pool.capacity, 1 << 30, pool)
    events = []
    with sharing(store):
        found = weft.run(work, device=device, progress=False, on_event=events.append)
    alone = weft.run(work, device=device, progress=False)
    for one, other in zip(found, alone, strict=True):
        assert one.history == other.history
        for name, tensor in one.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name])
    assert [owner for owner in pool.owners() if owner.startswith("group/")] == []
    assert store.holds(path)
    assert not any("pool" in event.data.get("message", "") for event in events)
    store.clear()
    assert pool.owners() == []


def test_the_state_of_a_group_lies_in_the_pool_while_it_trains(tmp_path):
    pool = PoisonedPool(CPU, 8 * MIB)
    store, held = GraphStore(CPU, 8 * MIB, 1 << 30, pool), []

    def look(event):
        held.append(sum(pool.held(owner) for owner in pool.owners() if owner.startswith("group/")))

    with sharing(store):
        weft.run(Task(graph=saved(tmp_path, "one"), **SETTINGS), device="cpu", progress=False, on_event=look)
    parameters = 6 * 8 + 8 + 8 * 3 + 3
    assert max(held) >= 4 * 4 * parameters  # weights, two moments, the best


def test_what_does_not_fit_lies_beside_the_pool_and_says_so(tmp_path, capfd):
    pool = DevicePool(CPU, 4096)
    store, notes = GraphStore(CPU, 8 * MIB, 1 << 30, pool), []
    with sharing(store):
        found = weft.run(
            Task(graph=saved(tmp_path, "one"), **SETTINGS), device="cpu", progress=False, on_event=notes.append
        )
    assert found.status == "finished"
    assert "does not fit into the worker's pool" in capfd.readouterr().out
    assert any("lie outside it" in event.data.get("message", "") for event in notes)


def test_graphs_are_evicted_for_others_but_never_from_a_run(tmp_path):
    paths = [saved(tmp_path, name, nodes=200, seed=n) for n, name in enumerate("abc")]
    size = into_pool(weft.load(paths[0]), probe := DevicePool(CPU, MIB), "g") and probe.held("g")
    pool = PoisonedPool(CPU, int(2.2 * size))
    store = GraphStore(CPU, 8 * MIB, 1 << 30, pool)
    first = store.placed(paths[0], lambda: weft.load(paths[0]))
    assert store.prefetch(paths[1], lambda: weft.load(paths[1]), size)
    assert store.prefetch(paths[2], lambda: weft.load(paths[2]), size)
    assert [store.holds(path) for path in paths] == [True, False, True]  # the first is in use, though it is the oldest
    assert torch.equal(first.x, weft.load(paths[0]).x)
    store.settle()
    store.prefetch(paths[1], lambda: weft.load(paths[1]), size)
    assert not store.holds(paths[0])


# ---- fetched ahead -------------------------------------------------------------------------------------------


def test_weights_that_were_fetched_ahead_give_the_same_answer(tmp_path):
    task = Task(graph="demo", **SETTINGS)
    weft.run(task, device="cpu", progress=False, out=tmp_path)
    weights = tmp_path / "model.safetensors"
    expected = predict(task, weights, device="cpu").logits
    kept = KeptGraphs("cpu", 8 * MIB, pooled=True)
    kept.fetch("", str(weights))
    assert kept.store.take_weights(str(weights)).keys() == read_weights(weights).keys()
    with sharing(kept.store):
        found = predict(task, weights, device="cpu").logits
    assert torch.equal(found, expected)
    assert kept.store.take_weights(str(weights)) is None
    kept.store.clear()
    assert kept.store.pool.owners() == []


def test_weights_that_nobody_came_for_make_way(tmp_path):
    store = GraphStore(CPU, MIB, 1 << 30, DevicePool(CPU, MIB))
    for name in ("one", "two"):
        (tmp_path / name).touch()
        assert store.fetch_weights(str(tmp_path / name), lambda: {"w": torch.ones(100)})
    assert store.take_weights(str(tmp_path / "one")) is None
    assert len(store.pool.owners()) == 1
