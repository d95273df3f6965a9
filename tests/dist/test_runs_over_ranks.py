"""``weft.run(..., ranks=N)``: the numbers of one rank, checkpoints for any number of ranks, and clear ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
from tests.dist.cases import TwoBranches
from tests.dist.mixing import MIXING, DotProducts, Later, Plain
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.dist.peer_memory import Barrier, RankLostError
from weft.runtime.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]


def task(**changes) -> weft.Task:
    return weft.Task(**{"graph": tiny_graph(), "model": "gcn", "hidden": 8, "epochs": 12, "lr": 0.05, **changes})


def assert_same(found, expected) -> None:
    assert found.status == expected.status
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=2e-4, abs=2e-5, nan_ok=True), name
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)


def test_a_task_over_two_ranks():
    one = task(model="gat", heads=2, patience=5, eval_every=2)
    assert_same(weft.run(one, ranks=2), weft.run(one))


def test_more_ranks_than_the_host_has_memory_for_are_refused_before_any_is_started():
    with pytest.raises(SpecError, match=r"ranks=100000: every rank is a process .* request at most"):
        weft.run(task(), ranks=100_000)


def test_a_sweep_over_two_ranks(tmp_path):
    sweep = weft.Sweep(tiny_graph(), model=["gcn", "sage"], hidden=8, epochs=6, seed=range(2), lr=[0.05, 0.01])
    found, expected = (
        weft.run(sweep, ranks=2, out=tmp_path / "run", options=weft.RunOptions(prune="median")),
        weft.run(sweep, options=weft.RunOptions(prune="median")),
    )
    assert [result.status for result in found] == [result.status for result in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert all(result.plan.shards == 2 for result in found)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    "changes", [{}, {"bases": 2}, {"graph": tiny_graph(sparse=True), "bases": 2}], ids=["plain", "bases", "sparse"]
)
def test_relations_over_ranks(changes):
    one = task(model="rgcn", **changes)
    assert_same(weft.run(one, ranks=3, device="cpu"), weft.run(one, device="cpu"))


@pytest.mark.parametrize("mode", [{}, {"mode": "sampled", "fanout": [3, 2], "batch": 7}], ids=["full", "sampled"])
def test_splits_over_ranks(mode):
    graph = tiny_graph().random_splits(3, 0.4, 0.3)
    one = task(graph=graph, split="all", dropout=0.0, epochs=4, **mode)
    found, expected = weft.run(one, ranks=2, device="cpu"), weft.run(one, device="cpu")
    assert [result.task.split for result in found] == [0, 1, 2]
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    if not mode:  # in another order of the nodes batches are others
        second, order = task(graph=graph, split=1, dropout=0.0, epochs=4), weft.RunOptions(order="degree")
        assert_same(weft.run(second, ranks=2, device="cpu", options=order), expected[1])


def test_a_saved_plan_is_run_over_ranks_in_its_groups(tmp_path):
    sweep = weft.Sweep("demo", model=["gcn", "sage"], hidden=8, epochs=3, dropout=0.0, lr=[0.05, 0.01])
    path = tmp_path / "plan.json"
    path.write_text(weft.plan(sweep, machine="cpu").to_json())
    planned = weft.read(path)
    found, expected = weft.run(planned, ranks=2, device="cpu"), weft.run(planned, device="cpu")
    assert {result.plan.members for result in found} == {plan.members for plan in planned.plans}
    for mine, theirs in zip(found, expected, strict=True):  # a node may be on the other side of a tie
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=2e-4)
        assert mine.history["val_loss"] == pytest.approx(theirs.history["val_loss"], rel=2e-4)


def test_three_ranks_write_a_checkpoint_that_two_and_one_resume(tmp_path):
    one = task(model="gin", norm="batch", epochs=16)
    control = weft.Control()

    def leave(event):
        if event.kind == "progress":
            control.preempt()

    left = weft.run(one, ranks=3, out=tmp_path / "2", control=control, on_event=leave)
    assert left.status == "preempted"
    assert 0 < left.metrics["epochs_run"] < 16
    shutil.copytree(tmp_path / "2", tmp_path / "1")
    expected = weft.run(one)
    for ranks in (2, 1):
        assert_same(weft.run(one, ranks=ranks, out=tmp_path / str(ranks), resume=True), expected)


def test_a_killed_rank_ends_the_run_and_leaves_a_checkpoint(tmp_path):
    killed = []

    def kill(event):
        if event.kind == "checkpoint" and not killed:
            victim = next(child for child in multiprocessing.active_children() if child.name == "weft rank 1")
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    begin = task(epochs=100_000)
    with pytest.raises(RankLostError, match=r"rank 1 of 3 was killed \(SIGKILL\); continue from the checkpoint"):
        weft.run(begin, ranks=3, out=tmp_path / "run", on_event=kill, options=weft.RunOptions(checkpoint_every=0.01))
    assert killed
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()
    saved = read_checkpoint(tmp_path / "run")
    assert saved is not None
    assert saved.about["epoch"] >= 1


class NeedsRows(TwoBranches):
    """Fails on the rank that has the last nodes."""

    def forward(self, x, adj):
        if adj.forward.low > 0:
            raise ValueError("no such rows here")
        return super().forward(x, adj)


def test_a_rank_that_fails_is_quoted():
    with pytest.raises(weft.WeftError, match="no such rows here"):
        weft.run(task(model=NeedsRows), ranks=2)
    assert not multiprocessing.active_children()


class TorchNorm(TwoBranches):
    def __init__(self, in_features, out_features, hidden=8):
        super().__init__(in_features, out_features, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks=0 must be at least 1"),
        ({"ranks": 2, "weave": "merged"}, "weave='merged' does not go with ranks=2"),
        ({"ranks": 2, "compile": True}, "compile=True does not go with ranks=2"),
        ({"ranks": 2, "sharded": "tiles", "device": "cpu"}, "sharded='tiles' is a kernel of GPUs; ranks on a CPU copy"),
        ({"ranks": 2, "sharded": "pieces"}, "sharded='pieces' must be one of staged, tiles, interleaved, fetched"),
        ({"sharded": "tiles"}, "sharded='tiles' is of use over several ranks only"),
    ],
)
def test_what_ranks_cannot_do_is_one_sentence(options, words):
    with pytest.raises(SpecError, match=words):
        weft.run(task(), options=weft.RunOptions(**options))


@pytest.mark.parametrize("changes", [{"model": "gat"}, {"model": "sage", "aggregator": "max"}])
def test_a_way_to_sum_is_refused_for_what_does_not_sum(changes):
    with pytest.raises(SpecError, match="sharded='tiles' would have no effect: none of these tasks sums rows"):
        weft.run(task(**changes), options=weft.RunOptions(ranks=2, sharded="tiles"))


def test_torch_norms_are_refused():
    with pytest.raises(SpecError, match=r"use weft\.nn\.BatchNorm to train over 2 ranks"):
        weft.run(task(model=TorchNorm), ranks=2)


def test_a_model_that_cannot_be_sent_is_refused():
    class Here(TwoBranches):
        pass

    with pytest.raises(SpecError, match="cannot be sent to other processes"):
        weft.run(task(model=Here), ranks=2)


def test_a_late_rank_is_named():
    barrier = Barrier(torch.zeros(3, dtype=torch.int64), 0, [os.getpid()] * 3, timeout=0.3)
    with pytest.raises(RankLostError, match=r"rank 1 of 3 did not arrive within 0\.3 s"):
        barrier.wait()


def test_a_dead_rank_is_named():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    barrier = Barrier(torch.zeros(2, dtype=torch.int64), 0, [os.getpid(), gone.pid], timeout=60)
    with pytest.raises(RankLostError, match="rank 1 of 2 has died"):
        barrier.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def test_the_command_under_torchrun(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text('graph = "demo"\n[model]\nname = "gcn"\nhidden = 8\n[train]\nepochs = 3\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *launcher,
        "-m",
        "weft",
        "run",
        "--json",
        str(spec),
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events].count("finish") == 1, "only rank 0 tells"
    assert (tmp_path / "o" / "result.json").exists()


@pytest.mark.parametrize("model", [MIXING[0], *(pytest.param(model, marks=pytest.mark.rest) for model in MIXING[1:])])
def test_a_module_whose_numbers_depend_on_the_ranks_is_refused(model):
    with pytest.raises(SpecError, match=rf"the numbers of model {model.__name__} depend on which nodes are on which"):
        weft.run(task(model=model, epochs=2), ranks=2, device="cpu")


@pytest.mark.rest
def test_a_module_on_a_graph_of_a_node_per_rank_is_judged_as_any_other():
    x, y = torch.eye(3), torch.tensor([0, 1, 0])
    graph = weft.Graph.from_edges([0, 1, 2], [1, 2, 0], x=x, y=y, train=[0, 1], val=[2])
    with pytest.raises(SpecError, match=r"the numbers of model Mean depend on which nodes are on which"):
        weft.run(task(graph=graph, model=MIXING[0], epochs=2), ranks=3, device="cpu")
    right = task(graph=graph, model=Plain, epochs=2)
    assert_same(weft.run(right, ranks=3, device="cpu"), weft.run(right, device="cpu"))


def test_a_module_over_wefts_layers_has_the_numbers_of_one_rank_and_is_resumed(tmp_path):
    one = task(model=Plain, epochs=12)
    expected, control = weft.run(one, device="cpu"), weft.Control()
    assert_same(weft.run(one, ranks=3, device="cpu"), expected)

    def leave(event):
        if event.kind == "progress":
            control.preempt()

    whole = weft.run(one, ranks=2, device="cpu")
    assert_same(whole, expected)
    part = weft.run(one, ranks=2, out=tmp_path, device="cpu", on_event=leave, control=control)
    assert part.status == "preempted"
    resumed = weft.run(one, ranks=2, out=tmp_path, device="cpu", resume=True)
    assert resumed.history == whole.history
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


@pytest.mark.rest
def test_a_module_over_wefts_layers_is_resumed_after_a_kill_bit_for_bit(tmp_path):
    one, killed = task(model=Plain, epochs=400), []

    def kill(event):
        if event.kind == "checkpoint" and event.data["epoch"] > 0 and not killed:
            victim = next(child for child in multiprocessing.active_children() if child.name == "weft rank 1")
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    options = weft.RunOptions(checkpoint_every=0.01)
    with pytest.raises(RankLostError, match="continue from the checkpoint"):
        weft.run(one, ranks=2, out=tmp_path / "run", device="cpu", on_event=kill, options=options)
    assert 0 < read_checkpoint(tmp_path / "run").about["epoch"] < 400
    resumed = weft.run(one, ranks=2, out=tmp_path / "run", device="cpu", resume=True)
    whole = weft.run(one, ranks=2, device="cpu")
    assert resumed.history == whole.history
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


def test_products_of_both_ends_of_edges_and_features_of_edges_over_ranks():
    edges = torch.randint(0, 40, (2, 160), generator=torch.manual_seed(1))
    values = {"x": torch.randn(40, 6), "y": torch.arange(40) % 3, "edge_attr": torch.rand(160, 2)}
    splits = {"train": torch.arange(15), "val": torch.arange(15, 25), "test": torch.arange(25, 40)}
    one = task(graph=weft.Graph.from_edges(*edges, 40, directed=True, **values, **splits), model=DotProducts, epochs=5)
    assert_same(weft.run(one, ranks=3, device="cpu"), weft.run(one, device="cpu"))


def test_errors_after_a_run_over_ranks_are_shown_as_before_it():
    before = sys.excepthook
    weft.run(task(epochs=1), ranks=2, device="cpu")
    assert sys.excepthook is before


def test_a_module_that_may_mix_rows_later_is_refused():
    with pytest.raises(SpecError, match=r"keeps 'calls' from call to call.*train it on one rank"):
        weft.run(task(model=Later), ranks=2, device="cpu")


@pytest.mark.rest
def test_a_script_without_a_guard_is_one_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import weft\n"
        "try:\n    weft.run(weft.Task(graph='demo', epochs=2), ranks=2, device='cpu', progress=False)\n"
        "except weft.WeftError as error:\n    print(error)\n"
    )
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert "put what starts it under if __name__ == '__main__':" in ended.stdout
    assert "Traceback" not in ended.stderr
