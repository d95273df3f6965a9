"""The queue plans as a run does: the server's budget decides the mode, and tasks share groups as in a sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import weft
from tests.serve.serving import TASK, ServeProcess, environment, opened
from tests.serve.test_supervisor import same
from weft.core.run_options import RunOptions
from weft.serve.queue_db import Submission

WIDE = {"graph": "shape:pubmed", "model": "gin", "hidden": 256, "layers": 4, "epochs": 2}
SAMPLED = {"graph": "demo", "model": "sage", "hidden": 8, "epochs": 4, "mode": "sampled", "batch": 64, "fanout": [4, 4]}


def whole_bytes() -> int:
    return weft.plan(weft.Task(**WIDE, mode="full"), machine="cpu").peak_bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose budget is too small for the whole graph; no part of it is kept for graphs."""
    folder = tmp_path_factory.mktemp("budget")
    process = ServeProcess(folder, "--no-auth", "--budget", str(whole_bytes() - 1), "--keep-graphs", "1").start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in (folder / "serve.log").read_text()


def shell(server, *words) -> str:
    command = [sys.executable, "-m", "weft", *words, "--server", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(server.folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_budget_of_a_server_samples_what_that_of_a_run_samples(server, tmp_path):
    plain = weft.run(weft.Task(**WIDE), budget=whole_bytes() - 1, device="cpu", progress=False)
    assert plain.plan.mode == "sampled"
    spec = tmp_path / "wide.toml"
    model = {"name": WIDE["model"], "hidden": WIDE["hidden"], "layers": WIDE["layers"]}
    lines = [f"graph = {json.dumps(WIDE['graph'])}", "[model]", *(f"{k} = {json.dumps(v)}" for k, v in model.items())]
    spec.write_text("\n".join([*lines, "[train]", f"epochs = {WIDE['epochs']}"]))
    name = shell(server, "submit", str(spec), "--wait").split()[0]
    client = weft.Client(server.url)
    assert same(client.result(name)["history"], plain.history)
    shown = json.loads(shell(server, "queue", "show", name))
    assert "sampled: the whole graph does not fit into" in shown["how"]
    assert client.result(name)["plan"]["mode"] == "sampled"
    assert shown["task"].get("mode") is None  # what was submitted stays as it was
    [listed] = [task for task in client.tasks() if task["id"] == name]
    assert listed["how"] == shown["how"]


def test_a_task_samples_within_a_budget_of_its_own(tmp_path):
    budget = whole_bytes() - 1
    plain = weft.run(weft.Task(**WIDE), budget=budget, device="cpu", progress=False)
    with opened(tmp_path) as queue:
        names = [one.id for one in queue.db.submit_many([Submission({"task": WIDE, "budget": budget})])]
        names += queue.submit(WIDE)
        within, whole = queue.wait(names)
        assert (within.state, whole.state) == ("done", "done"), (within.error, whole.error)
        assert within.plan["bytes"] <= budget < whole.plan["bytes"]
        assert "the whole graph does not fit into" in within.plan["why"]
        assert "mode" not in whole.plan
        assert same(queue.history(names[0]), plain.history)


def test_a_paused_task_is_planned_anew_if_its_graph_was_written_anew(tmp_path):
    file = tmp_path / "wide.npz"
    weft.load(WIDE["graph"]).save(file)
    with opened(tmp_path) as queue:
        [gate] = queue.submit({"epochs": 1})
        queue.db.pause(gate)
        spec = {"task": {**WIDE, "graph": "wide"}, "graph_path": str(file), "budget": whole_bytes() - 1}
        name = queue.db.submit(Submission(spec, after=(gate,))).id
        queue.supervisor.wake()
        queue.until(lambda: queue.db.get(name).state == "planned")
        assert queue.db.get(name).plan["mode"] == "sampled"
        queue.db.pause(name)
        weft.load("demo").save(file, overwrite=True)
        queue.db.resume(name)
        queue.db.resume(gate)
        queue.supervisor.wake()
        [ended] = queue.wait([name])
        assert ended.state == "done", ended.error
        plain = weft.run(
            weft.Task(**{**WIDE, "graph": str(file)}), budget=whole_bytes() - 1, device="cpu", progress=False
        )
        assert plain.plan.mode == "full"
        assert same(queue.history(name), plain.history)


def test_a_batch_that_fits_is_decided_by_the_budget_of_the_server(server):
    settings = {**SAMPLED, "batch": "fit"}
    plain = weft.run(weft.Task(**settings), budget=whole_bytes() - 1, device="cpu", progress=False)
    client = weft.Client(server.url)
    [task] = client.submit(weft.Task(**settings))
    [ended] = client.wait([task])
    assert ended["state"] == "done", ended["error"]
    assert client.result(task)["task"]["batch"] == plain.task.batch
    assert same(client.result(task)["history"], plain.history)


def test_what_does_not_fit_sampled_either_is_refused_with_what_it_needs(server):
    client = weft.Client(server.url)
    [task] = client.submit(weft.Task(**{**WIDE, "hidden": 512}))
    [ended] = client.wait([task])
    assert ended["state"] == "failed"
    assert "needs" in ended["error"]
    assert "raise the budget" in ended["error"]


def test_a_server_that_starts_again_with_less_plans_anew(tmp_path):
    whole = whole_bytes()
    with opened(tmp_path, budget=4 * whole, reserved=0) as queue:
        [first] = queue.submit({**TASK, "epochs": 1_000_000})
        queue.until(lambda: queue.db.get(first).state == "running")
        [waits] = queue.submit({**WIDE, "epochs": 2})
        queue.until(lambda: queue.db.get(waits).state == "planned")
        queue.db.cancel(first)
        queue.db.pause(waits)
    with opened(tmp_path, budget=whole - 1, reserved=0) as queue:
        queue.db.resume(waits)
        queue.supervisor.wake()
        [done] = queue.wait([waits])
        assert (done.state, done.plan["mode"]) == ("done", "sampled"), done.error


# ---- groups ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_structures_on_a_graph_share_a_group_and_have_their_own_numbers(tmp_path):
    """Woven as asked, on a CPU: there stacks of different structure share a group by no other way."""
    settings = [{**TASK, "layers": layers, "hidden": 8, "seed": layers} for layers in (2, 3)]
    with opened(tmp_path) as queue:
        names = queue.train_together(*settings, {**settings[0], "seed": 9}, options={"weave": "merged"})
        assert set(queue.group_of(names[0]).members) == set(names)
        result = json.loads((queue.options.runs / queue.db.get(names[0]).result["folder"] / "result.json").read_text())
        assert result["plan"]["join"] == "woven"
        for name, one in zip(names, settings, strict=False):
            alone = weft.run(weft.Task(**one), device="cpu", progress=False)
            assert queue.history(name)["val_loss"] == pytest.approx(alone.history["val_loss"], rel=1e-4)


def test_structures_that_are_too_different_are_trained_one_after_another(tmp_path):
    """Weaving asks for similar steps, in a queue as in a run."""
    settings = [{**TASK, "model": "gcn", "layers": 2}, {**TASK, "model": "gat", "layers": 8, "hidden": 64, "epochs": 2}]
    tasks = [weft.Task(**one, name=str(place)) for place, one in enumerate(settings)]
    report = weft.plan(tasks, machine="cpu", options=RunOptions(weave="merged"))
    assert len(report.groups) == 2
    with opened(tmp_path) as queue:
        names = queue.train_together(*settings, options={"weave": "merged"})
        assert [len(queue.group_of(name).members) for name in names] == [1, 1]


def test_sampled_tasks_with_one_sampling_share_batches_across_submissions(tmp_path):
    settings = [{**SAMPLED, "seed": seed} for seed in range(3)]
    with opened(tmp_path) as queue:
        settings.append({**SAMPLED, "model": "gcn"})  # another structure
        names = queue.train_together(*settings, {**SAMPLED, "batch": 32})
        assert set(queue.group_of(names[0]).members) == set(names[:4])
        assert queue.group_of(names[4]).members == (names[4],)
        together = weft.run([weft.Task(**one, name=name) for name, one in zip(names, settings, strict=False)],
                            device="cpu", progress=False)  # fmt: skip
        for result in together:
            assert same(queue.history(result.name), result.history)


@pytest.mark.long
def test_members_of_several_structures_go_on_after_their_worker_was_killed(tmp_path):
    settings = [
        {**SAMPLED, "epochs": 500, "dropout": 0.0},
        {**SAMPLED, "epochs": 500, "dropout": 0.0, "model": "gcn"},
    ]
    with opened(tmp_path) as queue:
        names = queue.start_together(*settings)
        queue.until(lambda: queue.epoch(names[1]) > 0)
        os.kill(queue.worker_pid(), signal.SIGKILL)
        done = queue.wait(names)
        assert [(task.state, task.attempts) for task in done] == [("done", 2)] * 2, [task.error for task in done]
        queue.until(lambda: not queue.db.groups("running"))
        assert set(names) in [set(group.members) for group in queue.db.groups("dissolved")]
        for name, one in zip(names, settings, strict=True):
            alone = weft.run(weft.Task(**one), device="cpu", progress=False)
            assert queue.history(name)["val_loss"] == pytest.approx(alone.history["val_loss"], rel=1e-3)


def test_a_server_may_train_every_task_by_itself(tmp_path):
    with opened(tmp_path, fuse=False) as queue:
        names = queue.train_together(*({**TASK, "seed": seed} for seed in range(3)))
        assert [queue.group_of(name).members for name in names] == [(name,) for name in names]


@pytest.mark.parametrize("policy", ["lmcf", "bmc", "base", "sequential", "mps"])
def test_other_policies_fuse_where_asked(tmp_path, policy):
    with opened(tmp_path, fuse=True, policy=policy) as queue:
        names = queue.train_together(*({**TASK, "seed": seed} for seed in range(3)))
        assert set(queue.group_of(names[0]).members) == set(names)
