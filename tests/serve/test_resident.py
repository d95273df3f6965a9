"""Resident models: loaded by the first request, exact, beside trainings, and gone when others need the room."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import FAULTY, TASK, ServeProcess
from weft.core.errors import InputError

ANNA, BEN = "a" * 24, "b" * 24
pytestmark = pytest.mark.long


def serving(folder, *options):
    (folder / "tokens").write_text(f"anna {ANNA}\nben {BEN}\n")
    options = [
        "--token",
        str(folder / "tokens"),
        "--allow-model",
        f"{FAULTY}:*",
        "--checkpoint-seconds",
        "0.1",
        *options,
    ]
    return ServeProcess(folder, *options).start()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")
    (folder / "graphs").mkdir()
    process = serving(folder, "--workers", "2", "--graphs", str(folder / "graphs"))
    yield process
    assert process.stop() == 0
    log = (process.folder / "serve.log").read_text()
    assert "Traceback" not in log, log
    with DirectQueue(process.db) as queue:
        assert problems(queue) == []


@pytest.fixture
def anna(server):
    return weft.Client(server.url, ANNA)


def trained(client, **settings) -> str:
    (task,) = client.submit(weft.Task(**{**TASK, "epochs": 3, **settings}))
    (done,) = client.wait([task], 60)
    assert done["state"] == "done", done["error"]
    return done["id"]


def residents(client) -> list[dict]:
    return [task for task in client.tasks() if task["kind"] == "inference"]


def worker_of(client, task: str) -> dict:
    """The worker that has a task; what a server shows is up to half a second old."""
    groups: list[dict] = []

    def is_shown() -> bool:
        groups[:] = [group for group in client.state()["running"] if task in group["members"]]
        return bool(groups)

    until(is_shown)
    return next(worker for worker in client.state()["workers"] if worker["name"] == groups[0]["worker"])


def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "settings", [{}, {"model": "sage", "batch": 64, "fanout": [3, 3]}, {"model": f"{FAULTY}:Plain", "hidden": 64}]
)
def test_it_answers_with_the_numbers_of_the_run_beside_a_training(server, anna, tmp_path, settings):
    task = trained(anna, **settings)
    (slow,) = anna.submit(weft.Task(**{**TASK, "epochs": 100_000, "name": "slow"}))
    until(lambda: anna.show(slow)["state"] == "running")
    answers = [anna.predict(task, [3, 5, 8, 5]) for _ in range(20)]
    assert anna.show(slow)["state"] == "running"
    logits = weft.read(anna.fetch(task, tmp_path)).predict_logits("demo")[[3, 5, 8, 5]]
    for answer in answers:
        assert answer["nodes"] == [3, 5, 8, 5]
        assert torch.allclose(torch.tensor(answer["logits"]), logits, atol=1e-5)
        assert answer["classes"] == logits.argmax(1).tolist()
        assert torch.allclose(torch.tensor(answer["probabilities"]), logits.softmax(1), atol=1e-5)
        assert answer["computed"] == "kept"  # the whole graph was computed when the model was loaded
    (one,) = [found for found in residents(anna) if found["state"] == "running"]
    assert weft.Client(server.url, BEN).predict(task, [1])["task"] == task  # one model for all users
    assert anna.predict(one["id"], [1])["classes"] == anna.predict(task, [1])["classes"]
    anna.cancel(slow)
    anna.cancel(one["id"])
    until(lambda: not any(worker["group"] for worker in anna.state()["workers"]))


@pytest.fixture(scope="module")
def done(server) -> str:
    return trained(weft.Client(server.url, ANNA), seed=5)


def test_samples_are_drawn_by_their_seed(anna, done):
    one, two, three = (anna.predict(done, [7, 9], fanout=[1, 1], seed=seed)["logits"] for seed in (1, 1, 2))
    assert one == two != three


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"nodes": [1]}, 400, "must be an object such as"),
        ({"task": "f" * 12, "nodes": [1]}, 404, "there is no task"),
        ({"task": "TASK", "nodes": []}, 400, "nodes must be a list of up to 10,000 node ids"),
        ({"task": "TASK", "nodes": [1.5]}, 400, "nodes must be a list"),
        ({"task": "TASK", "nodes": "test"}, 400, "nodes must be a list"),
        ({"task": "TASK", "nodes": list(range(10_001))}, 400, "up to 10,000 node ids"),
        ({"task": "TASK", "nodes": [10**6]}, 400, "must lie in 0..2399"),
        ({"task": "TASK", "nodes": [1], "fanout": [0]}, 400, "fanout="),
        ({"task": "TASK", "nodes": [1], "fanout": [3]}, 400, "has 1 hops for 2 layers"),
        ({"task": "TASK", "nodes": [1], "seed": -1}, 400, "must be at least 0"),
        ({"task": "TASK", "nodes": [1], "seed": 1}, 400, "seed would have no effect: nothing is drawn without fanout"),
        ({"task": "TASK", "nodes": [1], "wieghts": 1}, 400, "unknown field 'wieghts'"),
        ({"task": "OPEN", "nodes": [1]}, 409, "it has no model.safetensors yet"),
    ],
)
def test_a_request_that_cannot_be_answered_is_one_sentence(server, anna, done, body, status, told):
    if body.get("task") == "TASK":
        body = {**body, "task": done}
    elif body.get("task") == "OPEN":
        (waits,) = anna.submit(weft.Task(**TASK), after=anna.submit(weft.Task(**{**TASK, "epochs": 50_000})))
        body = {**body, "task": waits["id"]}
    answer = httpx.post(f"{server.url}/api/predict", json=body, headers={"Authorization": f"Bearer {ANNA}"}, timeout=60)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]
    for task in anna.tasks("running") + anna.tasks("planned"):
        if task["kind"] == "training":
            anna.cancel(task["id"])


def test_a_model_that_can_never_be_loaded_is_not_asked_for_again(server, anna):
    tiny_graph(0).save(server.folder / "graphs" / "mine.npz")
    task = trained(anna, graph="mine.npz")
    tiny_graph(1).save(server.folder / "graphs" / "mine.npz", overwrite=True)
    with pytest.raises(weft.WeftError, match=r"cannot be loaded: .* had 60 nodes") as error:
        anna.predict(task, [1])
    assert "try again" not in str(error.value)


def test_it_needs_a_token(server):
    assert httpx.post(f"{server.url}/api/predict", json={"task": "x", "nodes": [1]}).status_code == 401


def test_a_model_of_a_user_has_a_process_of_its_own_which_goes_with_it(server, anna):
    task = trained(anna, model=f"{FAULTY}:Plain", hidden=64, seed=9)
    anna.predict(task, [1])
    (one,) = [found for found in residents(anna) if found["state"] == "running" and found["task"].get("seed") == 9]
    before = worker_of(anna, one["id"])
    anna.cancel(one["id"])

    def replaced() -> bool:
        now = {worker["name"]: worker for worker in anna.state()["workers"]}[before["name"]]
        return now["ready"] and now["pid"] != before["pid"]

    until(replaced)


def test_a_worker_that_is_killed_is_replaced_and_the_next_request_loads_the_model_again(server, anna):
    task = trained(anna, seed=11)
    before = anna.predict(task, [1, 2])["logits"]
    (one,) = [found for found in residents(anna) if found["state"] == "running" and found["task"].get("seed") == 11]
    os.kill(worker_of(anna, one["id"])["pid"], signal.SIGKILL)

    def answered() -> bool:
        try:
            return anna.predict(task, [1, 2])["logits"] == before
        except weft.WeftError:
            return False

    until(answered)


def test_an_idle_model_makes_way_for_a_training_that_has_no_worker(tmp_path):
    server = serving(tmp_path)
    try:
        anna = weft.Client(server.url, ANNA)
        task = trained(anna)
        anna.predict(task, [1])
        (next_one,) = anna.submit(weft.Task(**{**TASK, "seed": 3}))
        (done,) = anna.wait([next_one], 60)
        assert done["state"] == "done"
        (one,) = residents(anna)
        assert one["state"] == "done"
        assert anna.predict(task, [1])["classes"]  # and is loaded again
        server.kill()
        server.start()
        assert {found["state"] for found in residents(anna)} == {"done", "cancelled"}
        assert anna.predict(task, [1])["classes"]
    finally:
        assert server.stop() == 0


def test_a_client_says_what_is_wrong_before_it_asks(anna):
    for nodes, told in [([-1], "no id of a node"), ([True], "no id of a node"), (5, "nodes=5: expected")]:
        with pytest.raises(InputError, match=told):
            anna.predict("a" * 12, nodes)
