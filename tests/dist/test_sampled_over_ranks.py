"""Sampled training over ranks: the numbers of one rank with the same batches, also without shared memory."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.dist.cases import CPU
from tests.dist.mixing import MeanOfBlock, OverBlocks
from tests.graphs_for_tests import tiny_graph
from weft.batches.sampled import source_for
from weft.batches.sharded import ShardedSampling
from weft.core.errors import SpecError, WeftError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.dist import launch
from weft.dist.launch import start_ranks
from weft.dist.ranks import Ranks, Route
from weft.dist.sharded_adjacency import ShardGraph
from weft.ops.sampling.reference import make_clock, sample_torch
from weft.runtime.group import GroupRun

EPOCHS, BOUNDS = 5, {2: (0, 37, 60), 3: (0, 20, 20, 60)}
TASKS = {
    name: Task(
        graph="tiny", model=name, hidden=8, epochs=EPOCHS, lr=0.05, dropout=0.0, mode="sampled", fanout=fanout, batch=7
    )
    for name, fanout in (("gcn", [3, 2]), ("sage", [4, 2]), ("gin", [2, -1]), ("gat", [3, 3]))
}


def outcome(group: GroupRun) -> tuple[torch.Tensor, torch.Tensor]:
    updates = group.advance(EPOCHS)
    return torch.tensor([update.rows for update in updates]), group.stacks[0].state.flat.clone()


def alone(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    task = TASKS[name]
    return outcome(
        GroupRun([task], tiny_graph(), Plan((task.label,), mode="sampled"), CPU, make_source=source_for(task))
    )


def train(ranks: Ranks) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_num_threads(1)
    graph, found = ShardGraph(tiny_graph(), BOUNDS[ranks.ranks], ranks), []
    for task in TASKS.values():
        source = ShardedSampling(ranks, tuple(task.fanouts), task.batch, task.batch_seed)
        found.append(outcome(GroupRun([task], graph, Plan((task.label,), mode="sampled"), CPU, make_source=source)))
    ranks.gather_objects(None)
    return found


@pytest.mark.parametrize(("ranks", "one_host"), [(2, None), (3, None), (2, False)], ids=["2", "3", "2 machines"])
def test_the_numbers_of_one_rank(ranks, one_host, monkeypatch):
    if one_host is False:
        plain = launch.RankAddress
        monkeypatch.setattr(launch, "RankAddress", lambda *given, **more: plain(*given, False, **more))
    with start_ranks(ranks, CPU, train, timeout=120) as here:
        assert here.one_host is (one_host is None)
        found = train(here)
    for name, (rows, weights) in zip(TASKS, found, strict=True):
        expected_rows, expected_weights = alone(name)
        torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5, msg=name)


def ask(ranks: Ranks) -> bool:
    """Rows and lists of nodes of all ranks, asked for in any order, some twice, by one rank not at all."""
    graph = tiny_graph()
    bounds = BOUNDS[ranks.ranks]
    low, high = bounds[ranks.rank], bounds[ranks.rank + 1]
    ids = torch.tensor([59, 0, 36, 37, 5, 5, 20])[: 0 if ranks.rank == 1 else None]
    route = Route(ids, bounds, ranks)
    same = torch.equal(route.rows(graph.x[low:high]), graph.x[ids])
    clock, indptr = make_clock(1, 2, 3), graph.adj.indptr
    own = (indptr[low : high + 1] - indptr[low]).int()
    columns = graph.adj.indices[int(indptr[low]) : int(indptr[high])]

    def answer(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = sample_torch(own, columns, rows, 3, clock, 1, first=low)
        return found.indptr, found.sources

    found, expected = route.lists(answer), sample_torch(indptr, graph.adj.indices, ids, 3, clock, 1)
    same &= torch.equal(found.indptr, expected.indptr) and torch.equal(found.sources, expected.sources)
    return all(ranks.gather_objects(bool(same)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_routes(ranks):
    with start_ranks(ranks, CPU, ask, timeout=120) as here:
        assert ask(here)


def test_a_sampled_run_over_ranks():
    given = {"graph": tiny_graph(), "model": "sage", "hidden": 8, "epochs": 4, "dropout": 0.0, "lr": 0.05}
    task = weft.Task(**given, mode="sampled", fanout=[4, 2], batch=10)
    found, expected = weft.run(task, ranks=2), weft.run(task)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-4)
    assert found.history["val_loss"] == pytest.approx(expected.history["val_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "batch"}, "batch norm does not go with sampled training over ranks"),
        ({"weighted": True}, "edge weights"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(changes, words):
    graph = tiny_graph(weighted=changes.pop("weighted", False))
    task = weft.Task(graph=graph, model="gcn", hidden=8, epochs=2, mode="sampled", fanout=[2, 2], batch=8, **changes)
    with pytest.raises((SpecError, WeftError), match=words):
        weft.run(task, ranks=2)


def test_a_users_module_over_blocks_has_the_numbers_of_one_rank_or_is_refused():
    settings = {"epochs": 5, "lr": 0.05, "mode": "sampled", "fanout": [3, 2], "batch": 7}
    right, wrong = (weft.Task(graph=tiny_graph(), model=model, **settings) for model in (OverBlocks, MeanOfBlock))
    found, expected = (weft.run(right, ranks=ranks, device="cpu").history["loss"] for ranks in (2, 1))
    assert found == pytest.approx(expected, abs=2e-6)
    with pytest.raises(SpecError, match="the numbers of model MeanOfBlock depend on which nodes are on which rank"):
        weft.run(wrong, ranks=2, device="cpu")
