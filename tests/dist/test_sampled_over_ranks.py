"""Sampled training over ranks: the numbers of one rank with the same batches, also without shared memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import weft
from tests.dist.cases import CPU
from tests.dist.mixing import BothDirections, Deep, MeanOfBlock, MeanOfSampledBlocks, NormOverGraph, OverBlocks, Plain
from tests.graphs_for_tests import tiny_graph
from weft.batches.sampled import Sampling, source_for
from weft.batches.sharded import ShardedSampled
from weft.core.errors import SpecError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.dist import launch
from weft.dist.launch import start_ranks
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardGraph, Spread
from weft.runtime.group import GroupRun

EPOCHS, BOUNDS = 5, {2: (0, 37, 60), 3: (0, 20, 20, 60)}
CASES = {  # whether edges have weights, model and neighbours per hop
    "gcn": (False, "gcn", [3, 2]),
    "sage": (False, "sage", [4, 2]),
    "gin": (False, "gin", [2, -1]),
    "gat": (False, "gat", [3, 3]),
    "rgcn": (False, "rgcn", [4, 2]),
    "gcn with weights": (True, "gcn", [3, 2]),
}
TASKS = {
    name: Task(
        graph="tiny", model=model, hidden=8, epochs=EPOCHS, lr=0.05, dropout=0.0, mode="sampled", fanout=fanout, batch=7
    )
    for name, (_, model, fanout) in CASES.items()
}


def outcome(group: GroupRun) -> tuple[torch.Tensor, torch.Tensor]:
    updates = group.advance(EPOCHS)
    return torch.tensor([update.rows for update in updates]), group.stacks[0].state.flat.cpu().clone()


def alone(name: str, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor]:
    task, graph = TASKS[name], tiny_graph(weighted=CASES[name][0])
    plan = Plan((task.label,), mode="sampled", device=device.type)
    return outcome(GroupRun([task], graph, plan, device, make_source=source_for(task)))


def train(ranks: Ranks) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_num_threads(1)
    found = []
    for name, task in TASKS.items():
        graph = ShardGraph(tiny_graph(weighted=CASES[name][0]), BOUNDS[ranks.ranks], ranks)
        sampling = Sampling(tuple(task.fanouts), task.batch, task.batch_seed)
        source = partial(ShardedSampled, ranks=ranks, sampling=sampling)
        plan = Plan((task.label,), mode="sampled", device=ranks.device.type)
        found.append(outcome(GroupRun([task], graph, plan, ranks.device, make_source=source)))
    ranks.gather_objects(None)
    return found


def assert_like_one_rank(found: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device = CPU) -> None:
    for name, (rows, weights) in zip(TASKS, found, strict=True):
        expected_rows, expected_weights = alone(name, device)
        torch.testing.assert_close(rows, expected_rows, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("ranks", "one_host"), [(2, None), (3, None), (2, False)], ids=["2", "3", "2 machines"])
def test_the_numbers_of_one_rank(ranks, one_host, monkeypatch):
    if one_host is False:
        plain = launch.RankAddress
        monkeypatch.setattr(launch, "RankAddress", lambda *given, **more: plain(*given, False, **more))
    with start_ranks(ranks, CPU, train, timeout=120) as here:
        assert here.one_host is (one_host is None)
        found = train(here)
    assert_like_one_rank(found)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu_have_the_numbers_of_one(ranks):
    device = torch.device("cuda:0")
    with start_ranks(ranks, device, train, timeout=240) as here:
        found = train(here)
    assert_like_one_rank(found, device)


def read(ranks: Ranks) -> bool:
    """Rows of all ranks, at ids in any order, some twice, by one rank not at all."""
    bounds, device = BOUNDS[ranks.ranks], ranks.device
    low, high = bounds[ranks.rank], bounds[ranks.rank + 1]
    ids = torch.tensor([59, 0, 36, 37, 5, 5, 20], device=device)[: 0 if ranks.rank == 1 else None]
    same = True
    for table in (torch.randn(60, 5, generator=torch.manual_seed(1)).to(device), torch.arange(60, device=device)):
        spread = Spread(table[low:high], bounds, ranks)
        same &= torch.equal(spread[ids], table[ids]) and torch.equal(spread.here, table[low:high])
        if spread.in_reach and ids.numel():  # ids behind the first two are no nodes
            padded, count = torch.cat([ids[:2], ids.new_full((3,), 1 << 30)]), torch.tensor([2], device=device)
            same &= torch.equal(spread.rows(padded, count)[:2], table[ids[:2]])
    return all(ranks.gather_objects(bool(same)))


@pytest.mark.parametrize(("ranks", "one_host"), [(2, None), (3, None), (3, False)], ids=["2", "3", "3 machines"])
def test_rows_that_are_spread_over_ranks(ranks, one_host, monkeypatch):
    if one_host is False:
        plain = launch.RankAddress
        monkeypatch.setattr(launch, "RankAddress", lambda *given, **more: plain(*given, False, **more))
    with start_ranks(ranks, CPU, read, timeout=120) as here:
        assert read(here)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_that_are_spread_over_ranks_of_a_gpu():
    with start_ranks(3, torch.device("cuda:0"), read, timeout=240) as here:
        assert read(here)


def test_a_sampled_run_over_ranks():
    given = {"graph": tiny_graph(), "model": "sage", "hidden": 8, "epochs": 4, "dropout": 0.0, "lr": 0.05}
    task = weft.Task(**given, mode="sampled", fanout=[4, 2], batch=10)
    found, expected = weft.run(task, ranks=2), weft.run(task)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-4)
    assert found.history["val_loss"] == pytest.approx(expected.history["val_loss"], rel=1e-4)


def test_a_sampled_sweep_over_ranks_shares_batches():
    settings = {"hidden": 8, "epochs": 3, "dropout": 0.0, "mode": "sampled", "fanout": [3, 2], "batch": 10}
    sweep = weft.Sweep(tiny_graph(), model=["sage", "gin"], lr=[0.05, 0.01], seed=[0, 1], **settings)
    found, expected = weft.run(sweep, ranks=2, device="cpu"), weft.run(sweep, device="cpu")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=1e-4)
        assert mine.history["val_loss"] == pytest.approx(theirs.history["val_loss"], rel=1e-4)


def test_a_sampled_run_over_ranks_is_resumed_within_an_epoch(tmp_path):
    settings = {"graph": tiny_graph(), "hidden": 8, "epochs": 6, "dropout": 0.0, "mode": "sampled", "fanout": [3, 2]}
    task, control = weft.Task(model="sage", batch=5, **settings), weft.Control()

    def leave(event):
        if event.kind == "progress":
            control.preempt()

    part = weft.run(task, ranks=2, device="cpu", out=tmp_path / "run", control=control, on_event=leave)
    assert part.status == "preempted"
    resumed = weft.run(task, ranks=2, device="cpu", out=tmp_path / "run", resume=True)
    assert resumed.history == weft.run(task, ranks=2, device="cpu").history


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "batch"}, "batch norm does not go with sampled training over ranks"),
        ({"model": NormOverGraph}, "a layer norm with mode='graph' does not go with sampled training over ranks"),
        ({"model": "rgcn", "fanout": [{"each": 2}, {"each": 2}]}, "fan-outs per relation are sampled on one rank"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(changes, words):
    given = {"model": "gcn", "epochs": 2, "mode": "sampled", "fanout": [2, 2], "batch": 8, **changes}
    if isinstance(given["model"], str):
        given["hidden"] = 8
    with pytest.raises(SpecError, match=words):
        weft.run(weft.Task(graph=tiny_graph(), **given), ranks=2, device="cpu")


def test_a_users_module_over_blocks_has_the_numbers_of_one_rank_or_is_refused():
    settings = {"epochs": 5, "lr": 0.05, "mode": "sampled", "fanout": [3, 2], "batch": 7}
    right, wrong = (weft.Task(graph=tiny_graph(), model=model, **settings) for model in (OverBlocks, MeanOfBlock))
    found, expected = (weft.run(right, ranks=ranks, device="cpu").history["loss"] for ranks in (2, 1))
    assert found == pytest.approx(expected, abs=2e-6)
    with pytest.raises(SpecError, match="the numbers of model MeanOfBlock depend on which nodes are on which rank"):
        weft.run(wrong, ranks=2, device="cpu")


@pytest.mark.parametrize("model", [MeanOfSampledBlocks, BothDirections])
def test_a_module_whose_sampled_batches_alone_depend_on_the_ranks_is_refused(model):
    task = weft.Task(tiny_graph(), model=model, epochs=2, mode="sampled", fanout=[3, 2], batch=7)
    with pytest.raises(SpecError, match=rf"the numbers of model {model.__name__} depend on which nodes are on which"):
        weft.run(task, ranks=2, device="cpu")


class Rows(Plain):
    """Norms of each node, dropout, and a dense layer over the features."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.norm, self.by_hand = weft.nn.LayerNorm(8), torch.nn.Linear(in_features, out_features)

    def forward(self, x, adj):
        return super().forward(x, adj) + self.by_hand(x)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_module_with_dropout_trains_on_parts_of_batches_with_dense_features(sparse):
    graph, settings = tiny_graph(sparse=sparse), {"mode": "sampled", "fanout": [3, 2], "batch": 7}
    losses = weft.run(weft.Task(graph, model=Rows, epochs=3, lr=0.02, **settings), ranks=2, device="cpu").history[
        "loss"
    ]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {}), (3, {"fanout": [4, -1]}), (2, {"batch": 23}), (2, {"graph": tiny_graph(weighted=True)})],
    ids=["2", "3", "a last batch of one seed", "weights"],
)
def test_a_module_over_one_subgraph_has_the_numbers_of_one_rank(ranks, settings):
    given = {"graph": tiny_graph(), "epochs": 5, "lr": 0.05, "mode": "sampled", "fanout": [3, 2], "batch": 7}
    task = weft.Task(model=Deep, **{**given, **settings})
    found, expected = (weft.run(task, ranks=count, device="cpu") for count in (ranks, 1))
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=1e-4, abs=1e-5, nan_ok=True), name
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_built_in_model_whose_last_batch_has_fewer_seeds_than_ranks():
    given = {"graph": tiny_graph(), "hidden": 8, "epochs": 4, "dropout": 0.0, "lr": 0.05, "batch": 23}
    task = weft.Task(model="gat", mode="sampled", fanout=[3, 2], **given)
    found, expected = (weft.run(task, ranks=ranks, device="cpu").history["loss"] for ranks in (2, 1))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_over_one_subgraph_has_the_numbers_of_one_rank_on_a_gpu_that_ranks_share():
    given = {"graph": tiny_graph(), "epochs": 5, "lr": 0.05, "mode": "sampled", "fanout": [3, 2], "batch": 7}
    task = weft.Task(model=Deep, **given)
    found, expected = (weft.run(task, ranks=ranks, device="cuda:0").history for ranks in (2, 1))
    for name in ("loss", "val_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4, nan_ok=True)
