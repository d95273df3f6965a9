"""Ranks that share one GPU through CUDA IPC: losses and weights of one rank over 20 epochs, checkpoints, clear ends."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch

import weft
from tests.dist import cases
from tests.dist.cases import Case, TwoBranches, train_alone
from tests.graphs_for_tests import tiny_graph
from weft.core.task import Task
from weft.dist.launch import devices_for, start_ranks
from weft.dist.peer_memory import CudaIpc, RankLostError
from weft.dist.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, EPOCHS = torch.device("cuda:0"), 20


def task(model="gcn", graph="tiny", **changes) -> Task:
    """Adam's eps is larger under a batch norm: the gradient of a bias before it is nothing but rounding."""
    given = {"epochs": EPOCHS, "lr": 0.02, "eps": 1e-4 if changes.get("norm") else 1e-8, **changes}
    return Task(graph=graph, model=model, **({"hidden": 8, **given} if isinstance(model, str) else given))


def case(name: str, *tasks: Task, **about) -> Case:
    return Case(name, tasks, epochs=EPOCHS, **about)


CASES = [
    case("gcn", task("gcn")),
    case("sage", task("sage")),
    case("sage max", task("sage", aggregator="max")),
    case("gin batch norm", task("gin", norm="batch")),
    case("gat", task("gat", heads=2)),
    case("gat without dropout", task("gat", heads=2, dropout=0.0)),
    case("a user's module", task(TwoBranches)),
    case("weights", task("gcn"), graph="weighted"),
    case("hub", task("gcn", "hub"), graph="hub"),
    case("hub by tiles", task("gcn", "hub"), graph="hub", way="tiles"),
    case("weights by tiles", task("gcn"), graph="weighted", way="tiles"),
    case("stacked by tiles", *(task("sage", seed=seed, dropout=0.2 * seed) for seed in range(3)), way="tiles"),
    case("hub, interleaved", task("gcn", "hub"), graph="hub", way="interleaved"),
    case("weights, interleaved", task("gcn"), graph="weighted", way="interleaved"),
    case("stacked, interleaved", *(task("sage", seed=s, dropout=0.2 * s) for s in range(3)), way="interleaved"),
    case("gcn, fetched", task("gcn"), way="fetched"),
    case("weights, fetched", task("gcn"), graph="weighted", way="fetched"),
    case("directed", task("gin", "directed", norm="batch"), graph="directed"),
    case("relations", task("rgcn")),
    case("stacked", *(task("gcn", seed=seed, dropout=0.2 * seed) for seed in range(3))),
]
EMPTY = {1: (0, 60), 2: (0, 60, 60), 3: (0, 0, 7, 60), 4: (0, 25, 25, 26, 60)}


def differences(name: str, found: dict, expected: dict) -> list[str]:
    """What is not equal up to rounding: losses, weights, buffers; a metric may be off by one node of a split."""
    wrong = []
    losses = 1 + (expected["rows"].shape[-1] - 1) // 2
    near = {"rtol": 2e-3, "atol": 5e-4, "equal_nan": True}
    pairs = [("loss", found["rows"][..., :losses], expected["rows"][..., :losses], near)]
    pairs += [("metric", found["rows"][..., losses:], expected["rows"][..., losses:], {**near, "atol": 0.11})]
    pairs += [("weights", found["weights"], expected["weights"], near)]
    pairs += [(key, found["buffers"][key], value, near) for key, value in expected["buffers"].items()]
    for what, mine, theirs, close in pairs:
        try:
            torch.testing.assert_close(mine, theirs, **close)
        except AssertionError as error:
            wrong.append(f"{name}, {what}: {' '.join(str(error).split())[:300]}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_is_single(ranks):
    chosen = [*CASES, case("uneven and empty shards", task("gcn", norm="batch"), bounds=EMPTY[ranks])]
    alone = [train_alone(one, DEVICE) for one in chosen]
    with start_ranks(ranks, DEVICE, cases.work, (chosen,), timeout=240) as here:
        found = cases.train_all(here, chosen)
        every = here.gather_objects([(one["rows"], one["weights"]) for one in found])  # as cases.work does
        assert ranks == 1 or here.staging.exchanged_bytes > 0
        assert isinstance(here.memory, CudaIpc)
    wrong = [
        words
        for place, one in enumerate(chosen)
        for words in differences(one.name, found[place], alone[place])
    ]  # fmt: skip
    for place, one in enumerate(chosen):
        if not all(torch.equal(theirs[place][1], found[place]["weights"]) for theirs in every):
            wrong.append(f"{one.name}: ranks hold different weights")
    assert not wrong, "\n".join(wrong)


def test_two_runs_have_the_same_bits():
    """Not with attention dropout: its masks over ranks are torch's operators, whose sums on a GPU have no order."""
    chosen = [case("gcn", task("gcn")), case("gin", task("gin", norm="batch"))]
    runs = []
    for _ in range(2):
        with start_ranks(2, DEVICE, cases.work, (chosen,), timeout=240) as here:
            runs.append(cases.train_all(here, chosen))
            here.gather_objects(None)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first["weights"], second["weights"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_sampled_sweeps_have_the_numbers_of_one_rank(ranks):
    settings = {"hidden": 8, "epochs": 5, "dropout": 0.0, "mode": "sampled", "fanout": [3, 2], "batch": 10}
    sweep = weft.Sweep(tiny_graph(), model=["sage", "gcn", "rgcn"], lr=[0.05, 0.01], seed=[0, 1], **settings)
    found, expected = (weft.run(sweep, ranks=count, device="cuda:0") for count in (ranks, 1))
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("loss", "val_loss"):
            assert mine.history[name] == pytest.approx(theirs.history[name], rel=1e-3), mine.name


def grow(ranks: Ranks) -> list[float]:
    """Exchange rows of several sizes, so that peer memory is given back and taken anew; what arrived."""
    sums = []
    for size in (3, 1000, 10, 500_000, 7):
        mine = torch.full((size, 4), float(ranks.rank + 1), device=ranks.device)
        rows_of = ranks.staging.publish(mine, size)
        sums.append(sum(float(rows_of(rank, size).double().mean()) for rank in range(ranks.ranks)))
    ranks.gather_objects(None)
    return sums


def test_peer_memory_grows():
    with start_ranks(3, DEVICE, grow, timeout=120) as here:
        assert grow(here) == [6.0] * 5


def test_a_run_over_two_ranks_resumed_by_one(tmp_path):
    one = weft.Task(graph=tiny_graph(), model="gcn", hidden=8, epochs=40, lr=0.02)
    control = weft.Control()
    stop = lambda event: control.preempt() if event.kind == "progress" else None  # noqa: E731
    left = weft.run(one, ranks=2, device="cuda:0", out=tmp_path / "run", control=control, on_event=stop)
    expected = weft.run(one, device="cuda:0")
    assert left.status == "preempted"
    found = weft.run(one, device="cuda:0", out=tmp_path / "run", resume=True)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=2e-3, abs=5e-4)


@pytest.mark.parametrize("way", ["staged", "tiles", "interleaved", "fetched"])
def test_the_way_to_sum_remote_rows_is_a_setting(way):
    one = weft.Task(graph=tiny_graph(), model="gcn", hidden=8, epochs=5, lr=0.02)
    expected = weft.run(one, device="cuda:0", progress=False)
    found = weft.run(one, device="cuda:0", progress=False, options=weft.RunOptions(ranks=2, sharded=way))
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=2e-3, abs=5e-4)


def test_a_killed_rank_ends_the_run(tmp_path):
    killed = []

    def kill(event):
        if event.kind == "checkpoint" and not killed:
            victim = next(child for child in multiprocessing.active_children() if child.name == "weft rank 1")
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    one = weft.Task(graph=tiny_graph(), model="gcn", hidden=8, epochs=100_000)
    with pytest.raises(RankLostError, match="continue from the checkpoint"):
        weft.run(
            one,
            ranks=2,
            device="cuda:0",
            out=tmp_path / "run",
            on_event=kill,
            options=weft.RunOptions(checkpoint_every=0.01),
        )
    assert killed


def test_ranks_on_one_gpu_use_no_nccl():
    assert devices_for(3, DEVICE) == (["cuda:0"] * 3, False)
    assert devices_for(1, torch.device("cuda"))[1] is False
