"""A sweep as an object of the queue, against a server that runs: named, changed, fetched, reported, pruned."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import weft
from tests.serve.serving import FAULTY, ServeProcess, one_thread
from weft.cli.app import app as cli

ANNA, BEN = "anna-token-of-enough-letters", "ben-token-of-enough-letters-too"
SWEEP = {"model": "gcn", "hidden": 8, "epochs": 40, "lr": [0.01, 0.02], "seed": range(2), "name": "rates"}
LONG = {"model": "gcn", "hidden": 8, "epochs": 200_000, "lr": [0.01, 0.02, 0.03], "name": "long"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "tokens").write_text(f"operator-token-of-enough-letters\nanna {ANNA}\nben {BEN}\n")
    (folder / "tokens").chmod(0o600)
    options = (
        "--token",
        str(folder / "tokens"),
        "--workers",
        "2",
        "--checkpoint-seconds",
        "0.2",
        "--allow-model",
        f"{FAULTY}:*",
    )
    process = ServeProcess(folder, *options).start()
    yield process
    process.stop()


@pytest.fixture
def client(server):
    return weft.Client(server.url, ANNA)


def command(server, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, [*words, "--server", server.url, "--token", ANNA], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout


def files_in(folder) -> set[str]:
    """The files of a run that say what came of it: all but checkpoints."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if "groups" not in path.parts}


def without_times(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds")}


def test_what_is_fetched_is_what_a_run_leaves(server, client, tmp_path):
    sweep = weft.Sweep("demo", **SWEEP)
    submitted = client.submit(sweep, key="fetched").wait(120)
    assert [task["state"] for task in submitted] == ["done"] * 4
    result = submitted.result(tmp_path / "fetched")
    folder = tmp_path / "fetched" / submitted.name
    with one_thread():
        own = weft.run(sweep, device="cpu", progress=False, out=tmp_path / "own")
    assert files_in(folder) == files_in(tmp_path / "own")
    assert result.sweep == own.sweep
    for fetched, trained in zip(result, own, strict=True):
        assert (fetched.name, fetched.status, fetched.task) == (trained.name, trained.status, trained.task)
        assert fetched.history == trained.history
        assert without_times(fetched.metrics) == without_times(trained.metrics)
        assert fetched.plan.members == trained.plan.members
    for file in (tmp_path / "own").rglob("model.safetensors"):
        weights, same = load_file(file), load_file(folder / file.relative_to(tmp_path / "own"))
        assert all(torch.equal(weights[name], same[name]) for name in weights.keys() | same.keys())
    whole, runs = (json.loads((place / "result.json").read_text()) for place in (folder, tmp_path / "own"))
    assert whole.keys() == runs.keys()
    for name in ("sweep", "best", "best_settings", "metric", "statuses", "graphs", "graph", "varying"):
        assert whole[name] == runs[name]
    listed = CliRunner().invoke(cli, ["ls", str(tmp_path)], catch_exceptions=False).stdout.splitlines()
    assert [line.split()[1:5] for line in listed[1:]] == [["gcn", "demo", "4", "of"]] * 2
    compared = CliRunner().invoke(cli, ["compare", str(folder), str(tmp_path / "own"), "--json"]).stdout.splitlines()
    scores = [json.loads(line)["val_accuracy_mean"] for line in compared]
    assert len(scores) == 2
    assert scores[0] == scores[1]
    page = tmp_path / "page.html"
    CliRunner().invoke(cli, ["report", str(folder), "--out", str(page)], catch_exceptions=False)
    assert "rates: 4 trainings on demo" in page.read_text()
    assert "rates: 4 trainings on demo" in (folder / "report.html").read_text()


def test_tables_and_fan_outs_per_relation_are_fetched_as_a_run_leaves_them(client, tmp_path):
    sampled = {"mode": "sampled", "batch": 128}
    tables = [
        {"model": "rgcn", "bases": [2, 4]},
        {"model": "rgcn", "bases": 2, **sampled, "fanout": [{"each": 2}, {"each": 1}]},
        {"model": "gcn"},
    ]
    sweep = weft.Sweep("planted:relations?nodes=200", epochs=2, hidden=8, tasks=tables, name="tables")
    every = weft.Sweep("demo", model="gcn", epochs=2, hidden=8, tasks=[{"mode": "full"}, sampled], lr=[0.01, 0.02])
    shared = weft.Sweep("demo", model=["gcn", "gat"], heads=2, batch=64, mode=["full", "sampled"], epochs=2, hidden=8)
    for number, work in enumerate((sweep, every, shared)):
        submitted = client.submit(work).wait(120)
        assert {task["state"] for task in submitted} == {"done"}
        result = submitted.result(tmp_path / "fetched")
        with one_thread():
            weft.run(work, device="cpu", progress=False, out=tmp_path / str(number))
        own = weft.read(tmp_path / str(number))
        assert result.sweep == own.sweep
        assert [member.name for member in result] == [member.name for member in own] == [t["name"] for t in submitted]
        assert [member.task for member in result] == [member.task for member in own]


def test_the_shell_works_on_a_sweep_by_its_name(server, client, tmp_path):
    spec = tmp_path / "widths.toml"
    spec.write_text('graph = "demo"\nseed = [0, 1]\n[model]\nname = "gcn"\nhidden = [8, 16]\n[train]\nepochs = 20\n')
    name, rest = command(server, "submit", str(spec)).split(maxsplit=1)
    assert (name, rest) == ("widths-1", "4 tasks  4 queued\n")
    assert command(server, "watch", name).count("done") == 4
    shown = json.loads(command(server, "show", name))
    assert (shown["counts"], shown["user"], shown["metric"]) == ({"done": 4}, "anna", "accuracy")
    assert shown["best"]["score"] == max(task["score"] for task in client.tasks(sweep=name))
    assert "widths-1  anna  4      4 done" in command(server, "queue", "sweeps")
    assert command(server, "queue", "list", "--sweep", name).count("done") == 4
    out = tmp_path / "results"
    assert command(server, "fetch", name, "--out", str(out)).strip() == str(out / name)
    assert len(weft.read(out / name)) == 4
    page = tmp_path / "report.html"
    command(server, "report", name, "--out", str(page))
    assert "widths: 4 trainings on demo" in page.read_text()
    [task, *_] = client.tasks(sweep=name)
    command(server, "report", task["id"], "--out", str(page))
    assert "validation accuracy" in page.read_text()
    assert command(server, "submit", str(spec), "--key", "again").startswith("widths-2  ")
    assert command(server, "submit", str(spec), "--key", "again").startswith("widths-2  ")


def test_a_sweep_is_paused_resumed_and_cancelled_as_one(server, client):
    submitted = client.submit(weft.Sweep("demo", **LONG))
    name = submitted.name
    command(server, "cancel", submitted[0]["id"])
    assert "2 tasks changed: 1 cancelled, 2 paused" in command(server, "pause", name)
    assert client.resume(submitted)["changed"] == 2
    with pytest.raises(weft.InputError, match="there is no sweep 'none-1'"):
        client.tasks(sweep="none-1")
    with pytest.raises(weft.InputError, match=rf"sweep '{name}': 2 of its 3 tasks have not ended; wait for it"):
        client.fetch(name, "nowhere")
    assert command(server, "cancel", name).endswith("2 tasks changed: 3 cancelled\n")
    assert [task["state"] for task in client.wait(name, 60)] == ["cancelled"] * 3
    assert client.cancel(name)["changed"] == 0


def test_a_group_that_is_paused_with_its_sweep_goes_on_as_one(client):
    sweep = weft.Sweep("demo", **{**LONG, "epochs": 1500, "name": "pauses"})
    submitted = client.submit(sweep)
    end, group = time.monotonic() + 60, {}
    while not group.get("epoch"):
        assert time.monotonic() < end, client.tasks(sweep=submitted.name)
        group = next((g for g in client.state()["running"] if submitted[0]["id"] in g["members"]), {})
    client.pause(submitted)
    while any(running["id"] == group["id"] for running in client.state()["running"]):
        assert time.monotonic() < end, "it does not leave its worker"
        time.sleep(0.05)
    assert client.show(submitted)["counts"] == {"paused": 3}
    client.resume(submitted)
    ended = [client.show(task) for task in client.wait(submitted, 120)]
    assert [task["result"]["group"] for task in ended] == [group["id"]] * 3
    with one_thread():
        own = weft.run(sweep, device="cpu", progress=False)
    assert [client.result(task)["history"] for task in ended] == [member.history for member in own]


def test_only_its_user_and_the_operator_change_a_sweep(server, client):
    name = client.submit(weft.Sweep("demo", **LONG)).name
    with pytest.raises(weft.InputError, match=f"sweep '{name}' belongs to 'anna'"):
        weft.Client(server.url, BEN).cancel(name)
    assert weft.Client(server.url, BEN).show(name)["user"] == "anna"
    assert weft.Client(server.url, "operator-token-of-enough-letters").cancel(name)["changed"] == 3
    assert name in [sweep["name"] for sweep in client.sweeps("anna")]
    assert name not in [sweep["name"] for sweep in client.sweeps("ben")]
    with pytest.raises(weft.InputError, match="there is no sweep 'other-7'"):
        client.show("other-7")


def test_a_user_waits_for_a_bounded_number_of_reports(server, client):
    name = client.submit(weft.Sweep("demo", **LONG)).name
    client.cancel(name)
    pages, token = f"{server.url}/api/sweeps/{name}/report", {"Authorization": f"Bearer {ANNA}"}
    with ThreadPoolExecutor(6) as several:
        answers = list(several.map(lambda _: httpx.get(pages, headers=token, timeout=120), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 2
    assert {answer.text.count("3 cancelled") > 0 for answer in answers if answer.status_code == 200} == {True}
    assert client.report(name)  # they are made, so that another is taken


def test_members_that_failed_or_were_cancelled_are_in_the_fetched_folder(server, client, tmp_path):
    submitted = client.submit([weft.Task("demo", epochs=10, hidden=8), weft.Task("demo", epochs=300_000, hidden=4)])
    client.cancel(submitted[1])
    result = submitted.wait(60).result(tmp_path)
    assert [member.status for member in result] == ["finished", "cancelled"]
    assert [member.name for member in result] == ["hidden=8 epochs=10", "hidden=4 epochs=300000"]
    assert result.best().name == "hidden=8 epochs=10"


# ---- pruning

RATES = [0.01, 0.02, 0.005, 1e-5, 0.03, 1e-6, 0.015, 2e-6]
PRUNED = {"model": "gcn", "hidden": 8, "epochs": 60, "lr": RATES}


def documented(curves: list[list[float]]) -> list[int]:
    """Epochs that each member trains if it is compared with those before it in the sweep alone."""
    policy, epochs = weft.MedianPruner(), [len(curve) for curve in curves]
    for epoch in range(10, len(curves[0]) + 1, 10):
        scores = {str(i): curve[: min(epoch, epochs[i])] for i, curve in enumerate(curves)}
        for i in range(len(curves)):
            seen = {str(j): scores[str(j)] for j in range(i + 1)}
            if epochs[i] > epoch and policy(epoch, seen, [str(i)]):
                epochs[i] = epoch
    return epochs


def test_members_on_several_workers_are_pruned_by_scores_at_an_epoch(client, tmp_path):
    sweep = weft.Sweep("demo", **PRUNED)
    with one_thread():
        curves = [weft.run(task, device="cpu", progress=False).history["val_accuracy"] for task in sweep]
    epochs = documented(curves)
    assert 0 < sum(count < 60 for count in epochs) < 8
    # A budget of their own keeps tasks from joining: eight groups of one on two workers.
    submitted = client.submit(sweep, budget="1GiB", options=weft.RunOptions(prune="median")).wait(120)
    result = submitted.result(tmp_path)
    assert [member.metrics["epochs_run"] for member in result] == epochs
    assert [member.status == "pruned" for member in result] == [count < 60 for count in epochs]
    assert len({task["result"]["group"] for task in map(client.show, submitted)}) == 8


def test_a_group_is_pruned_as_in_a_run(client, tmp_path):
    sweep, options = weft.Sweep("demo", **PRUNED, seed=7), weft.RunOptions(prune="median")
    result = client.submit(sweep, options=options).wait(120).result(tmp_path)
    with one_thread():
        own = weft.run(sweep, device="cpu", progress=False, options=options)
    assert [(one.name, one.status) for one in result] == [(one.name, one.status) for one in own]
    assert [one.history for one in result] == [one.history for one in own]
    assert "pruned" in own.statuses


def test_a_fast_member_waits_for_the_scores_of_a_slow_one(client):
    models = [(f"{FAULTY}:Slow", 0.02), ("gcn", 0.02), ("gcn", 0.03), ("gcn", 1e-7)]
    tasks = [{"model": model, "lr": lr} for model, lr in models]
    sweep = weft.Sweep("demo", tasks=tasks, epochs=40, name="paces")
    submitted = client.submit(sweep, budget="1GiB", options=weft.RunOptions(prune="median")).wait(120)
    # The last is below the median of three others: of all three, the slow one included, at epoch 30.
    assert [task["status"] for task in submitted] == ["finished"] * 3 + ["pruned"]
    assert client.show(submitted[3])["result"]["metrics"]["epochs_run"] == 30
