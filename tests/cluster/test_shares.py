"""Shares: every task once, joined per node, as many as there are nodes; checkpoints travel as bytes."""

from __future__ import annotations

import pytest

import weft
from weft.cluster import ray as ray_nodes
from weft.cluster.ray import (
    Mailbox,
    RayNode,
    Share,
    connect,
    device_names,
    divide,
    gpu_bytes,
    needs,
    pack,
    shares_of,
    train_share,
    unpack,
)
from weft.core.errors import InputError, SpecError
from weft.core.plan import Plan

PLAN = Plan(("a", "b"))
SWEEP = weft.Sweep("demo", model=["gcn", "sage"], hidden=8, epochs=3, seed=range(6), lr=[0.01, 0.02])


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 100])
def test_every_task_is_in_one_share(nodes):
    report = weft.plan(SWEEP, machine="cpu")
    shares = shares_of(report, nodes)
    names = [task.label for share in shares for task in share.tasks]
    assert sorted(names) == sorted(task.label for task in SWEEP)
    assert len({share.key for share in shares}) == len(shares)
    assert min(nodes, len(names)) <= len(shares) + len(report.groups)
    groups = [set(group.plan.members) for group in report.groups]
    for share in shares:
        assert any({task.label for task in share.tasks} <= group for group in groups), "a share is part of one group"
        assert share.num_bytes > 0


def test_parts_differ_by_one():
    tasks = SWEEP.tasks()
    assert [len(part) for part in divide(tasks, 5)] == [4, 5, 5, 5, 5]
    assert len(divide(tasks[:2], 5)) == 2


def test_what_ray_is_to_reserve():
    share = Share("1", tuple(SWEEP.tasks()[:2]), 10 << 30, PLAN)
    nodes = [RayNode("a", 8 << 30), RayNode("b", 16 << 30)]
    assert needs(share, nodes, "cpu") == {"num_cpus": 1, "memory": 10 << 30}
    with pytest.raises(SpecError, match="the largest node of the cluster has 8"):
        needs(share, nodes[:1], "cpu")
    gpus = [RayNode("c", 64 << 30, 4, "h200")]
    wanted = needs(share, gpus, "cuda", shares=100)
    assert 0 < wanted["num_gpus"] < 0.1
    assert wanted["num_gpus"] * gpu_bytes("h200") >= share.num_bytes
    with pytest.raises(SpecError, match="no GPU of the cluster has as much"):
        needs(Share("1", (), 10**15, PLAN), gpus, "cuda")


def test_a_share_has_a_device_of_its_own_while_there_are_enough():
    """Ray would put parts of 0.1 on one GPU, and gives a task of one CPU one thread."""
    share = Share("1", tuple(SWEEP.tasks()[:2]), 10 << 30, PLAN)
    gpus = [RayNode("a", 64 << 30, 4, "h200", cpus=64), RayNode("b", 64 << 30, 4, "h200", cpus=64)]
    parts = [needs(share, gpus, "cuda", shares)["num_gpus"] for shares in (1, 8, 9, 16, 17)]
    assert parts == [1.0, 1.0, 0.5, 0.5, 0.33]
    assert needs(share, gpus, "cuda", shares=1000)["num_gpus"] * gpu_bytes("h200") >= share.num_bytes
    nodes = [RayNode("a", 64 << 30, cpus=0), RayNode("b", 64 << 30, cpus=8), RayNode("c", 64 << 30, cpus=32)]
    assert needs(share, nodes, "cpu", shares=3)["num_cpus"] == 8
    with pytest.raises(SpecError, match="the largest node of the cluster has 0"):
        needs(share, nodes[:1], "cpu")


def test_ranks_take_the_devices_of_one_node():
    share = Share("1", (), 1 << 30, PLAN)
    gpus = [RayNode(name, 64 << 30, 4, "h200", cpus=32) for name in "ab"]
    assert needs(share, gpus, "cuda", ranks=4) == {"num_cpus": 1, "num_gpus": 4}
    with pytest.raises(SpecError, match="ranks=8: no node of the cluster has 8 GPUs, and ranks share one node"):
        needs(share, gpus, "cuda", ranks=8)
    nodes = [RayNode("a", 8 << 30, cpus=2), RayNode("b", 8 << 30, cpus=4)]
    assert needs(share, nodes, "cpu", ranks=3) == {"num_cpus": 4, "memory": 3 << 30}
    with pytest.raises(SpecError, match="ranks=5: no node of the cluster has 5 CPUs"):
        needs(share, nodes, "cpu", ranks=5)
    with pytest.raises(SpecError, match=r"takes 5\.00 GiB per rank; the largest node"):
        needs(Share("1", (), 5 << 30, PLAN), nodes, "cpu", ranks=2)


def test_a_share_over_ranks_is_as_large_as_one_rank():
    report = weft.plan(weft.Task("shape:pubmed", model="gcn", hidden=512, epochs=3, mode="full"), machine="cpu")
    [whole], [rank] = shares_of(report, 3), shares_of(report, 3, ranks=2)
    assert 0 < rank.num_bytes < whole.num_bytes


def test_addresses():
    for wrong in ("slurm", "ray://", "ray:/x"):
        with pytest.raises(SpecError, match="must be 'ray' or"):
            connect(wrong)


class NoClient:
    """Ray as installed without its client."""

    is_initialized = staticmethod(lambda: False)

    @staticmethod
    def init(address, **_):
        raise ValueError("Ray Client requires pip package `ray[client]`." if address else "something else")


def test_a_cluster_elsewhere_needs_rays_client(monkeypatch):
    monkeypatch.setattr(ray_nodes, "import_ray", lambda: NoClient)
    with pytest.raises(InputError, match=r"needs Ray's client: pip install 'weft-gnn\[ray\]'"):
        ray_nodes.connect("ray://head:10001")
    with pytest.raises(ValueError, match="something else"):
        ray_nodes.connect("ray")


def test_devices_of_nodes():
    nodes = [RayNode("a", 1), RayNode("b", 1, gpus=2)]
    assert device_names(nodes) == ("cuda:0@b", "cuda:1@b")
    assert device_names(nodes[:1]) == ("cpu@a",)


def test_a_newer_checkpoint_replaces_the_one_before():
    box = Mailbox()
    box.put("1", 1, "checkpoint", b"a")
    box.put("1", 1, "event", {})
    box.put("2", 1, "checkpoint", b"b")
    box.put("1", 1, "checkpoint", b"c")
    assert box.take() == [("1", 1, "event", {}), ("2", 1, "checkpoint", b"b"), ("1", 1, "checkpoint", b"c")]
    assert box.take() == []


def test_a_share_continues_from_the_bytes_of_its_checkpoint():
    tasks = weft.Sweep("demo", model="gcn", hidden=8, epochs=8, seed=range(2)).tasks()
    options = weft.RunOptions(device="cpu", checkpoint_every=1e-6)
    sent: list[tuple[str, object]] = []
    whole, error = train_share(tasks, lambda kind, message: sent.append((kind, message)), None, options)
    assert not error
    checkpoints = [message for kind, message in sent if kind == "checkpoint"]
    assert len(checkpoints) > 1
    heard: list[dict] = []
    again, _ = train_share(
        tasks, lambda kind, message: heard.append(message) if kind == "event" else None, checkpoints[0], options
    )
    assert any("resumed after epoch" in event.get("message", "") for event in heard)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine.name == theirs.name
        for name, values in theirs.history.items():
            assert mine.history[name] == pytest.approx(values, nan_ok=True), name


def test_bytes_of_a_folder(tmp_path):
    (tmp_path / "a" / "groups" / "1").mkdir(parents=True)
    (tmp_path / "a" / "groups" / "1" / "checkpoint.safetensors").write_bytes(b"state")
    (tmp_path / "a" / "sweep.json").write_text("{}")
    (tmp_path / "a" / "events.jsonl").write_text("many")
    unpack(pack(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b" / "groups" / "1" / "checkpoint.safetensors").read_bytes() == b"state"
    assert (tmp_path / "b" / "sweep.json").exists()
    assert not (tmp_path / "b" / "events.jsonl").exists()


def test_a_share_that_cannot_train_says_why():
    bad = [weft.Task(graph="no such graph", model="gcn", hidden=8, epochs=1)]
    found, error = train_share(bad, lambda kind, message: None, None, weft.RunOptions(device="cpu"))
    assert found == []
    assert "no such graph" in error
