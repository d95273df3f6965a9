"""A Ray cluster of three local nodes: a sweep of 24 tasks has the numbers of a run on one, also if a node is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from tests.engine.small_sweeps import of_kind
from tests.engine.training.test_rows import joined
from tests.serve.serving import Queue
from weft.cli.main import main
from weft.cluster.ray import run_on_ray
from weft.core.errors import SpecError
from weft.serve.queue_db import Submission

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.rest, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

STORE, CPUS = 80 * 2**20, 4  # Ray would put two of three shares of one CPU on one of these nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": CPUS, "object_store_memory": STORE, "memory": 2 << 30}
    found = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    nodes = [found.add_node(**small) for _ in range(2)]
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    found.others = {node.node_id: node for node in nodes}
    yield found
    ray.shutdown()
    found.shutdown()


def sweep(epochs: int) -> weft.Sweep:
    return weft.Sweep("demo", model="gcn", hidden=8, epochs=epochs, seed=range(6), lr=[0.005, 0.01], dropout=[0.0, 0.5])


def assert_same(found: Any, expected: Any) -> None:
    assert [result.name for result in found] == [result.name for result in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.status == theirs.status == "finished"
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=2e-3, abs=2e-4), mine.name
        mine_weights, weights = list(mine.model.parameters()), list(theirs.model.parameters())
        if mine.metrics["best_epoch"] == theirs.metrics["best_epoch"]:
            for one, other in zip(mine_weights, weights, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("words", [(), ("--progress", "plain"), ("--json",)])
def test_the_command_shows_a_cluster_as_it_shows_one_machine(cluster, tmp_path, monkeypatch, capsys, words):
    (tmp_path / "s.toml").write_text(
        'graph = "demo"\nseed = [0, 1]\n[model]\nhidden = [4, 8]\n[train]\nepochs = 3\n', encoding="utf-8"
    )
    given = ["weft", "run", str(tmp_path / "s.toml"), "--on", "ray", "--device", "cpu", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", [*given, *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert not end.value.code
    if words == ("--json",):
        assert {json.loads(line)["event"] for line in out.splitlines()} >= {"start", "group", "progress", "finish"}
        return
    assert "s: 4 tasks on demo (2,400 nodes, 9,600 edges)" in err
    assert "s: finished (4 finished); best settings hidden=" in err
    assert "best: hidden=" in out
    assert "{" not in out


def test_ranks_of_one_node_have_the_numbers_of_a_run(cluster, tmp_path):
    task, options = weft.Task("demo", model="gcn", hidden=8, epochs=20), weft.RunOptions(device="cpu", ranks=2)
    events = []
    found = run_on_ray(task, "ray", options=options, out=tmp_path / "run", on_event=events.append)
    assert found.status == "finished"
    assert found.history["loss"] == pytest.approx(weft.run(task, device="cpu").history["loss"], rel=2e-3, abs=2e-4)
    assert len({event.data["node"] for event in events if "begins" in event.data.get("message", "")}) == 1
    with pytest.raises(SpecError, match=f"ranks={CPUS + 1}: no node of the cluster has {CPUS + 1} CPUs"):
        run_on_ray(task, "ray", options=weft.RunOptions(device="cpu", ranks=CPUS + 1), out=tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_a_sharded_task_of_a_queue_trains_on_one_node(cluster, tmp_path):
    from weft.cluster.ray import device_names, nodes_of

    work = Queue(tmp_path, devices=device_names(nodes_of(ray)), workers=1)
    try:
        task = {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 20}
        [name] = [one.id for one in work.db.submit_many([Submission({"task": task, "options": {"ranks": 2}})])]
        work.supervisor.wake()
        [done] = work.wait([name], 150)
        assert done.state == "done", done.error
        [group] = [one for one in work.db.groups() if name in one.members]
        assert f"2 ranks on {group.device}" in group.why
        expected = weft.run(weft.Task(**task), device="cpu").history["loss"]
        assert work.history(name)["loss"] == pytest.approx(expected, rel=2e-3, abs=2e-4)
    finally:
        work.close()


def test_a_sweep_and_then_a_lost_node(cluster, tmp_path):
    work, events = sweep(20), []
    found = run_on_ray(work, "ray", options=weft.RunOptions(device="cpu"), out=tmp_path / "run", on_event=events.append)
    assert_same(found, weft.run(work, device="cpu"))
    begun = {event.data["node"] for event in events if "begins" in event.data.get("message", "")}
    assert len(begun) == 3, "every node has a share"
    assert [len(one["tasks"]) for one in events[0].data["shares"]] == [8, 8, 8]
    assert {event.kind for event in events} >= {"start", "progress", "end", "finish"}
    histories = joined(of_kind(events, "rows"))
    assert all(histories[member.name] == member.history for member in found)
    assert sum(event.kind == "end" for event in events) == 24
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(saved["tasks"]) == 24
    assert len(list((tmp_path / "run" / "tasks").glob("*/model.safetensors"))) == 24
    with pytest.raises(SpecError, match="holds a run already"):
        run_on_ray(work, "ray", options=weft.RunOptions(device="cpu"), out=tmp_path / "run")

    # The same with a node that is lost after its first checkpoint.
    longer, killed, where, told = sweep(60), [], {}, []

    def kill(event):
        told.append(event)
        if "begins" in event.data.get("message", ""):
            where[event.group] = event.data["node"]
        victim = cluster.others.get(where.get(event.group, ""))
        if event.kind == "checkpoint" and victim is not None and not killed:
            killed.append(event.group)
            cluster.remove_node(victim, allow_graceful=False)

    found = run_on_ray(longer, "ray", on_event=kill, options=weft.RunOptions(device="cpu", checkpoint_every=0.05))
    assert killed
    lost = [
        event for event in told if "was lost; it continues from its last checkpoint" in event.data.get("message", "")
    ]
    assert [event.group for event in lost] == killed
    assert any("resumed after epoch" in event.data.get("message", "") for event in told)
    assert_same(found, weft.run(longer, device="cpu"))
    assert all(len(rows["loss"]) == 60 for rows in joined(of_kind(told, "rows")).values()), "none twice, none missing"
    assert len(ray.nodes()) == 3
    until = time.monotonic() + 90  # the share continues elsewhere before the head gives the node up
    while sum(node["Alive"] for node in ray.nodes()) > 2 and time.monotonic() < until:
        time.sleep(0.5)
    assert sum(node["Alive"] for node in ray.nodes()) == 2


def test_a_cluster_without_gpus_is_told(cluster):
    with pytest.raises(SpecError, match="no node of the cluster has such a device"):
        run_on_ray(sweep(1), "ray", options=weft.RunOptions(device="cuda"))


def test_a_queue_over_the_cluster_survives_a_node(cluster, tmp_path):
    """The last test: it loses another node."""
    from weft.cluster.ray import device_names, nodes_of

    alive = {node.id for node in nodes_of(ray)}
    victims = [node for name, node in cluster.others.items() if name in alive]
    devices = device_names(nodes_of(ray))
    assert len(devices) == len(alive)
    work = Queue(tmp_path, devices=devices, workers=1)
    try:
        # Models of different structure are groups of their own, so that every node has some.
        settings = [{"hidden": 8, "layers": layers, "epochs": 400} for layers in (1, 2, 3, 4)]
        names = work.submit(*settings)
        on_victim = f"cpu@{victims[0].node_id}"
        work.until(
            lambda: any(one.group and one.device == on_victim for one in work.supervisor.pool.workers.values()), 150
        )
        cluster.remove_node(victims[0], allow_graceful=False)
        ended = work.wait(names, 200)
        assert [task.state for task in ended] == ["done"] * 4
        # What was there continues at once; the device goes with its node, which the head takes a while to notice.
        work.until(lambda: on_victim not in work.supervisor.pool.room, 90)
    finally:
        work.close()
