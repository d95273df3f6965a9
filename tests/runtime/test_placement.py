"""Where things lie on a machine without a GPU: memory, files, and a cache before files; the same bits from each."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.batches import CacheChoice
from weft.batches.cache import choose_cache
from weft.batches.placement import is_mapped, place_graph
from weft.batches.sampled import Sampling
from weft.core.errors import InputError
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.runtime.group import GroupRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph():
    return citation(num_nodes=400, num_edges=3000, num_features=12, num_classes=4, seed=1)


@pytest.fixture(scope="module")
def saved(graph, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "graph"
    graph.save(folder)
    return weft.load(folder)


def run_of(graph, placement: DataPlacement, **sampling) -> GroupRun:
    task = Task(graph="g", model="sage", hidden=8, dropout=0.3, epochs=3, lr=0.02)
    make = Sampling(**{"fanout": (5, 3), "batch": 32, "placement": placement, **sampling})
    return GroupRun([task], graph, Plan(("0",), placement=placement), CPU, make_source=make)


def losses(run: GroupRun) -> list[float]:
    return [row[0] for row in run.advance(3)[0].rows]


ROWS = 4 * 400 + 60 * 48  # bytes of a cache of 60 rows
PLACEMENTS = {
    "disk": DataPlacement("disk", "disk"),
    "cached": DataPlacement("cached", "host", cache_bytes=ROWS),
    "presampled": DataPlacement("cached", "disk", cache_bytes=ROWS, policy="presampling"),
    "benefit": DataPlacement("cached", "host", cache_bytes=ROWS, policy="benefit"),
    "layers": DataPlacement("host", "host", evaluation="layers", chunk_edges=100),
    "layers, disk": DataPlacement("disk", "disk", evaluation="layers", chunk_edges=100),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_same_bits_from_everywhere(graph, saved, name):
    expected = run_of(graph, DataPlacement("host", "host"))
    mine = run_of(saved, PLACEMENTS[name])
    assert losses(mine) == losses(expected)
    assert torch.equal(mine.stacks[0].state.flat, expected.stacks[0].state.flat)
    rows, others = (one.poll()[0].rows for one in (mine, expected))
    assert rows[-1] == pytest.approx(others[-1], rel=1e-4)


@pytest.mark.parametrize("name", ["cached", "presampled", "benefit"])
def test_hits_are_counted(saved, name):
    run = run_of(saved, PLACEMENTS[name])
    run.advance(3)
    reads = run.reads()
    assert 0.05 < reads["feature_hit_rate"] < 0.9
    assert reads["rows_read"] > 3 * 32 * run.stacks[0].source.steps_per_epoch
    assert run_of(saved, DataPlacement("host", "host")).reads() == {}


def test_a_policy_of_ones_own(saved):
    class Seeds:
        def choose(self, graph, row_bytes, budget):
            assert budget == ROWS - 4 * 400
            return CacheChoice(graph.train[: budget // row_bytes])

    run = run_of(saved, DataPlacement("cached", "host", cache_bytes=ROWS, policy="Seeds"), policy=Seeds())
    run.advance(1)
    assert run.reads()["feature_hit_rate"] > 0.1
    with pytest.raises(InputError, match="the plan caches what 'Seeds' chooses, an object that a plan cannot hold"):
        run_of(saved, DataPlacement("cached", "host", cache_bytes=ROWS, policy="Seeds"))
    with pytest.raises(InputError, match="cache_policy=Seeds: the plan caches what 'degree' chooses; plan again"):
        run_of(saved, DataPlacement("cached", "host", cache_bytes=ROWS), policy=Seeds())


class Greedy:
    def choose(self, graph, row_bytes, budget):
        return CacheChoice(torch.arange(graph.num_nodes))


class Wrong:
    def choose(self, graph, row_bytes, budget):
        return torch.arange(3)


def test_what_policies_may_not_do(graph):
    placement = DataPlacement("cached", "host", cache_bytes=ROWS)
    with pytest.raises(InputError, match=r"Greedy.choose takes 19,200 bytes of the cache, which has room for 2,880"):
        choose_cache(placement, Greedy(), graph, graph.x)
    with pytest.raises(InputError, match=r"Wrong.choose returned Tensor; expected a weft.batches.CacheChoice"):
        choose_cache(placement, Wrong(), graph, graph.x)


def test_files_are_told_from_memory(graph, saved):
    assert is_mapped(saved.x)
    assert not is_mapped(graph.x)
    assert place_graph(saved, DataPlacement("disk", "disk"), CPU) is saved
    for placement, word in ((DataPlacement("disk", "host"), "features"), (DataPlacement("host", "disk"), "topology")):
        with pytest.raises(InputError, match=f"{word}='disk': graph .* is in memory; write it with graph.save"):
            place_graph(graph, placement, CPU)
