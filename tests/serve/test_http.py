"""A queue server over HTTP on loopback: submit, watch, fetch, access, limits, and an orderly end."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import httpx
import pytest
from typer.testing import CliRunner

import weft
from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import FAULTY, TASK, ServeProcess, history_of
from tests.serve.test_supervisor import same
from weft.cli.app import app as cli
from weft.core.errors import InputError

OPERATOR, ANNA, BEN = "o" * 24, "a" * 24, "b" * 24


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "tokens").write_text(f"# tokens\n{OPERATOR}\nanna {ANNA}\nben {BEN}\n")
    (folder / "graphs").mkdir()
    weft.load("demo").save(folder / "graphs" / "ours")
    (folder / "secret.npz").write_bytes(b"secret")
    (folder / "graphs" / "out.npz").symlink_to(folder / "secret.npz")
    options = ["--token", str(folder / "tokens"), "--graphs", str(folder / "graphs"), "--quota", "50"]
    options += ["--allow-model", f"{FAULTY}:Plain", "--allow-model", f"{FAULTY}:Counts", "--checkpoint-seconds", "0.2"]
    process = ServeProcess(folder, *options).start()
    yield process
    assert process.stop() == 0
    log = (folder / "serve.log").read_text()
    assert "Traceback" not in log, log
    with DirectQueue(process.db) as queue:
        assert problems(queue) == []


@pytest.fixture
def anna(server):
    return weft.Client(server.url, ANNA)


def http(server, token=ANNA):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False)


def test_six_tasks_finish_with_the_numbers_of_a_run(server, anna):
    tasks = [weft.Task(**TASK, seed=seed, name=f"t{seed}") for seed in range(6)]
    submitted = anna.submit(tasks, key="six")
    assert [task["name"] for task in submitted] == [task.name for task in tasks]
    assert anna.submit(tasks, key="six") == anna.submit(tasks, key="six")
    assert [task["id"] for task in anna.submit(tasks, key="six")] == [task["id"] for task in submitted]
    ended = anna.wait(submitted, 60)
    assert {task["state"] for task in ended} == {"done"}
    group = next(one for one in anna.state()["groups"] if submitted[0]["id"] in one["members"])
    assert len(group["members"]) == 6
    by_id = {one["id"]: task for one, task in zip(submitted, tasks, strict=True)}
    expected = history_of([by_id[name].with_values(name=name) for name in group["members"]])
    assert all(same(anna.result(name)["history"], expected[name]) for name in by_id)


def test_who_did_what_is_on_record(server, anna):
    operator = weft.Client(server.url, OPERATOR)
    [task] = anna.submit(weft.Task(**{**TASK, "epochs": 100_000}, seed=77))
    anna.pause(task["id"])
    operator.resume(task["id"])
    operator.cancel(task["id"])
    [other] = operator.submit(weft.Task(**TASK, seed=78), user="anna")
    changes = [(c["state"], c["by"]) for c in anna.show(task["id"])["changes"] if "by" in c]
    assert changes == [
        ("queued", "anna"),
        ("paused", "anna"),
        ("queued", "the operator"),
        ("cancelled", "the operator"),
    ]
    assert (other["user"], anna.show(other["id"])["changes"][0]["by"]) == ("anna", "the operator")
    with http(server) as client:
        assert "by the operator" in client.get(f"/api/tasks/{task['id']}/logs").text


def test_inference_over_http_and_from_the_command_line(server, anna, tmp_path):
    from safetensors.torch import load_file

    [trained] = anna.submit(weft.Task(**TASK, seed=25))
    asked = anna.infer(trained["id"], nodes=[3, 5], latency_target=60)
    assert asked["kind"] == "inference"
    [ended] = anna.wait([asked], 60)
    assert ended["state"] == "done", ended["error"]
    assert ended["result"]["late"] is False
    place = anna.fetch(asked["id"], tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["predictions.safetensors", "result.json"]
    assert load_file(place / "predictions.safetensors")["nodes"].tolist() == [3, 5]
    weights = anna.fetch(trained["id"], tmp_path) / "model.safetensors"
    (server.folder / "graphs" / "mine.safetensors").write_bytes(weights.read_bytes())
    (tmp_path / "one.toml").write_text('graph = "ours"\n[model]\nname = "gcn"\nhidden = 8\n')
    reach = ["--server", server.url, "--token", ANNA]
    wanted = [str(tmp_path / "one.toml"), "--weights", "mine.safetensors", "--nodes", "3,5", "--wait", "--json"]
    [other] = json.loads(CliRunner().invoke(cli, ["submit", *wanted, *reach], catch_exceptions=False).stdout)
    again = anna.fetch(other["id"], tmp_path) / "predictions.safetensors"
    assert load_file(again)["logits"].tolist() == load_file(place / "predictions.safetensors")["logits"].tolist()
    assert other["id"] in [task["id"] for task in anna.tasks("done") if task["kind"] == "inference"]
    wrong = CliRunner().invoke(cli, ["submit", "--nodes", "test", *reach])
    assert "is for inference" in str(wrong.exception)
    with http(server) as client:
        assert client.get(f"/api/tasks/{trained['id']}/predictions").status_code == 410


def test_results_and_weights_can_be_fetched(anna, tmp_path):
    from safetensors.torch import load_file

    [task, several] = anna.submit(
        [weft.Task(**TASK, seed=20, name="one"), weft.Task(**TASK, name="several", select="val_loss", keep_top=2)]
    )
    anna.wait([task, several], 60)
    place = anna.fetch(task["id"], tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["model.safetensors", "result.json"]
    assert len(weft.read(anna.fetch(several["id"], tmp_path), graph=weft.load("demo")).top) == 2
    found = json.loads((place / "result.json").read_text())
    assert found["status"] == "finished"
    assert found["metrics"]["val_accuracy"] == anna.show(task["id"])["score"]
    assert load_file(place / "model.safetensors")


@pytest.mark.parametrize("beside", [[], [0.01]])  # alone, and in a group
def test_the_best_weights_of_a_task_that_diverged_can_be_fetched(server, anna, tmp_path, beside):
    shared = {**TASK, "layers": 3, "optimizer": "sgd", "epochs": 50}
    tasks = anna.submit([weft.Task(**shared, lr=lr, name=f"rate {lr:g}") for lr in (1e14, *beside)])
    ended = anna.wait(tasks, 60)
    assert [task["state"] for task in ended] == ["failed", "done"][: len(tasks)]
    assert "the best weights so far (epoch 1) are kept" in ended[0]["error"]
    words = ["fetch", tasks[0]["id"], "--out", str(tmp_path), "--server", server.url, "--token", ANNA]
    told = CliRunner().invoke(cli, words)
    assert (told.exit_code, f"task {tasks[0]['id']} failed: " in told.stderr) == (0, True)
    found = weft.read(tmp_path / tasks[0]["id"])
    assert (found.name, found.status, found.metrics["best_epoch"]) == ("rate 1e+14", "diverged", 1)
    assert all(weights.isfinite().all() for weights in found.model.state_dict().values())


def test_a_task_that_diverged_in_its_first_epoch_has_nothing_to_fetch(anna, tmp_path):
    [task] = anna.wait(anna.submit(weft.Task(**TASK, lr=1e20)), 60)
    with pytest.raises(InputError, match=r"failed, so it has no result\.json: .* no epoch was usable"):
        anna.fetch(task["id"], tmp_path)


def test_what_a_module_keeps_is_fetched_with_its_weights(anna, tmp_path):
    [task] = anna.wait(anna.submit(weft.Task(graph="ours", model=f"{FAULTY}:Counts", epochs=3)), 60)
    assert task["state"] == "done", task["error"]
    place = anna.fetch(task["id"], tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["kept.safetensors", "model.safetensors", "result.json"]
    assert weft.read(place).model.steps == json.loads((place / "result.json").read_text())["metrics"]["best_epoch"]


def test_events_go_on_where_they_were_cut_off(server, anna):
    [task] = anna.submit(weft.Task(**TASK, seed=21))
    anna.wait([task], 60)
    first = []
    for event in anna.events(task=task["id"]):
        first.append(event)
        if event["kind"] == "done":
            break
    assert [event["kind"] for event in first][:3] == ["queued", "planned", "running"]
    middle = first[len(first) // 2]["seq"]
    with http(server) as client:
        headers = {"Last-Event-ID": str(middle)}
        with client.stream("GET", "/api/events", params={"task": task["id"]}, headers=headers) as answer:
            told = next(line for line in answer.iter_lines() if line.startswith("id: "))
    assert int(told[4:]) == first[len(first) // 2 + 1]["seq"]


def test_a_graph_of_the_operators_folder_and_a_model_that_is_allowed(anna):
    own = weft.Task(graph="ours", model=f"{FAULTY}:Plain", epochs=3)
    [task] = anna.wait(anna.submit(own), 60)
    assert task["state"] == "done", task["error"]
    assert "secret" not in str(task)


def test_a_fetched_result_names_its_graph_as_it_was_submitted(server, anna, tmp_path):
    [task] = anna.submit(weft.Task(graph="ours", model="gcn", hidden=8, epochs=3))
    asked = anna.infer(task["id"], nodes=[3])
    assert [one["state"] for one in anna.wait([task, asked], 60)] == ["done", "done"]
    for name in (task["id"], asked["id"]):
        text = (anna.fetch(name, tmp_path) / "result.json").read_text()
        assert json.loads(text)["task"]["graph"] == "ours"
        assert str(server.folder) not in text
    assert weft.read(tmp_path / task["id"], graph=weft.load("demo")).metrics["epochs_run"] == 3


def test_commands(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_SERVER", server.url)
    monkeypatch.setenv("WEFT_TOKEN", ANNA)
    spec = tmp_path / "spec.toml"
    spec.write_text('graph = "demo"\n[model]\nname = "gcn"\nhidden = 8\n[train]\nepochs = 5\nlr = [0.01, 0.02]\n')
    shell = CliRunner()

    def call(*words, code=0):
        answer = shell.invoke(cli, words)
        assert answer.exit_code == code, (words, answer.output, answer.exception)
        return answer.output

    submitted = json.loads(call("submit", str(spec), "--wait", "--json"))
    assert [task["state"] for task in submitted] == ["done", "done"]
    name = submitted[0]["id"]
    assert name in call("queue", "list", "--user", "anna")
    assert json.loads(call("queue", "show", name))["estimate"]["bytes"] > 0
    assert "done" in call("logs", name)
    assert str(tmp_path / "got" / name) in call("fetch", name, "--out", str(tmp_path / "got")).replace("\n", "")
    call("watch", name)
    waiting = json.loads(call("submit", str(spec), "--set", "train.epochs=100000", "--set", "train.lr=0.1", "--json"))
    late = waiting[0]["id"]
    assert "paused" in call("pause", late)
    assert "queued" in call("resume", late)
    assert "cancelled" in call("cancel", late)
    call("watch", late, code=3)


@pytest.mark.parametrize("wait", [[], ["--wait"]])
def test_a_key_whose_task_was_cancelled_queues_nothing_and_says_so(server, anna, tmp_path, wait):
    (tmp_path / "one.toml").write_text('graph = "demo"\n[model]\nname = "gcn"\n[train]\nepochs = 100000\n')
    key = f"cancelled{''.join(wait)}"
    words = ["submit", str(tmp_path / "one.toml"), "--key", key, "--server", server.url, "--token", ANNA]
    name = CliRunner().invoke(cli, words).stdout.split()[0]
    anna.cancel(name)
    again = CliRunner().invoke(cli, [*words, *wait])
    assert again.exit_code == 3
    assert f"{name}  cancelled" in again.stdout
    assert f"weft: task {name} cancelled; submit with another key to queue it again" in again.stderr
    assert CliRunner().invoke(cli, ["watch", name, *words[-4:]]).exit_code == 3


def test_metrics_and_openapi(server):
    with http(server) as client:
        text = client.get("/metrics").text
        assert 'weft_tasks{state="done"}' in text
        paths = client.get("/openapi.json").json()["paths"]
        assert "/api/tasks/{task}/weights" in paths
        assert client.get("/health").json() == {"status": "working"}


# ---- access ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "x" * 24, ANNA[:-1], "ü"])
@pytest.mark.parametrize("path", ["/api/tasks", "/api/state", "/api/events", "/metrics", "/openapi.json"])
def test_nothing_without_a_token(server, token, path):
    with http(server, None) as client:
        headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
        answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert "token" in answer.json()["error"]


def test_health_needs_no_token(server):
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "working"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("PUT", "/api/tasks", "GET, POST"), ("POST", "/health", "GET")]
)
def test_a_method_that_is_not_there_is_answered_with_those_that_are(server, method, path, allowed):
    with http(server) as client:
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers.get("Allow")) == (405, allowed)


def test_one_submission_has_a_bounded_number_of_dependencies(server):
    body = {"tasks": [TASK] * 1000, "after": [f"{number:x}" for number in range(1000)]}
    with http(server) as client:
        answer = client.post("/api/tasks", json=body)
    assert answer.status_code == 400
    assert "1,000 tasks that each wait for 1,000 others are too many" in answer.json()["error"]


def test_nothing_is_queued_without_a_token(server):
    with http(server, None) as client:
        assert client.post("/api/tasks", json={"task": TASK}).status_code == 401


def test_only_the_owner_and_the_operator_may_cancel(server, anna):
    [task] = anna.submit(weft.Task(**{**TASK, "epochs": 100_000}, seed=30))
    with pytest.raises(InputError, match="belongs to 'anna'"):
        weft.Client(server.url, BEN).cancel(task["id"])
    assert weft.Client(server.url, OPERATOR).cancel(task["id"])["state"] == "cancelled"


def test_a_user_can_fill_no_more_than_the_quota(server):
    ben = weft.Client(server.url, BEN)
    tasks = [weft.Task(**TASK, seed=seed) for seed in range(51)]
    with pytest.raises(InputError, match="51 more are too many; a submission may have at most 50 tasks"):
        ben.submit(tasks)
    assert ben.tasks(user="ben") == []


def test_only_the_operator_submits_for_others(server, anna):
    task = weft.Task(**{**TASK, "epochs": 1}, seed=31)
    with pytest.raises(InputError, match="user='ben': your token is that of 'anna', and only the operator"):
        anna.submit(task, user="ben")
    with http(server) as client:
        assert client.post("/api/tasks", json={"task": TASK, "user": "ben"}).status_code == 403
    assert anna.submit(task, user="anna")[0]["user"] == "anna"
    assert weft.Client(server.url, OPERATOR).submit(task, user="carl")[0]["user"] == "carl"


def test_a_key_with_other_settings_is_refused(server, anna):
    [first] = anna.submit(weft.Task(**TASK, seed=32))
    work = [weft.Task(**TASK, seed=33)]
    [task] = anna.submit(work, key="monday", deadline=5e9, priority=-1)
    assert anna.submit(work, key="monday", deadline=5e9, priority=-1)[0]["id"] == task["id"]
    for other in ({"priority": -2}, {"after": [first["id"]]}, {"deadline": 6e9}, {"budget": "2GiB"}):
        with pytest.raises(InputError, match=r"key='monday' was used for task .* choose another key"):
            anna.submit(work, key="monday", **{"deadline": 5e9, "priority": -1, **other})
    asked = anna.infer(first["id"], key="ask", latency_target=60)
    assert anna.infer(first["id"], key="ask", latency_target=60)["id"] == asked["id"]
    with pytest.raises(InputError, match="key='ask' was used"):
        anna.infer(first["id"], key="ask", latency_target=61)


def test_a_key_with_other_tasks_is_refused_as_a_whole(server, anna):
    tasks = [weft.Task(**TASK, seed=seed) for seed in range(60, 63)]
    submitted = [task["id"] for task in anna.submit(tasks, key="three", priority=-1)]
    there = len(anna.tasks())
    for other, told in (
        (tasks[:2], "key='three' has 3 tasks in the queue, and 2 were submitted; choose another key"),
        (tasks[:1], "key='three' has 3 tasks in the queue, and 1 was submitted; choose another key"),
        ([*tasks, weft.Task(**TASK, seed=63)], "key='three' has 3 tasks in the queue, and 4 were submitted; choose"),
        ([*tasks[:2], weft.Task(**TASK, seed=64)], "key='three' was used for task .* another spec; choose"),
    ):
        with pytest.raises(InputError, match=told):
            anna.submit(other, key="three", priority=-1)
    with pytest.raises(InputError, match="key='three' has 3 tasks in the queue, and 1 was submitted"):
        anna.infer(submitted[0], key="three", priority=-1)
    assert len(anna.tasks()) == there
    assert [task["id"] for task in anna.submit(tasks, key="three", priority=-1)] == submitted


def test_a_task_and_a_list_of_one_are_the_same_under_a_key(server, anna):
    with http(server) as client:
        body = {"key": "one", "priority": -1}
        first = client.post("/api/tasks", json={**body, "task": {**TASK, "seed": 65}}).json()["tasks"][0]
        again = client.post("/api/tasks", json={**body, "tasks": [{**TASK, "seed": 65}]}).json()["tasks"]
        assert [task["id"] for task in again] == [first["id"]]
        two = client.post("/api/tasks", json={**body, "tasks": [{**TASK, "seed": 65}, {**TASK, "seed": 66}]})
        assert two.status_code == 409
        assert "has 1 task in the queue, and 2 were submitted" in two.json()["error"]
        part = client.post("/api/tasks", json={**body, "key": "one/0", "task": {**TASK, "seed": 67}})
        assert part.status_code == 201  # a key of its own


def test_tasks_without_a_result_say_why(server, anna):
    [cancelled] = anna.submit(weft.Task(**{**TASK, "epochs": 100_000}, seed=34))
    with pytest.raises(InputError, match=r"it has no result\.json yet"):
        anna.result(cancelled["id"])
    anna.cancel(cancelled["id"])
    with pytest.raises(InputError, match=r"was cancelled, so it has no result\.json"):
        anna.result(cancelled["id"])
    with pytest.raises(InputError, match=f"infer.of='{cancelled['id']}' is cancelled; it will never be done"):
        anna.infer(cancelled["id"])


def test_what_is_wrong_with_a_graph_is_said_without_folders_of_the_server(server, anna):
    (server.folder / "graphs" / "bad.npz").write_bytes(b"not a graph")
    [task] = anna.wait(anna.submit(weft.Task(graph="bad.npz")), 60)
    assert "bad.npz" in task["error"]
    with pytest.raises(InputError, match=r"failed, so it has no result\.json: .*bad\.npz") as refused:
        anna.result(task["id"])
    events = [event for event in _events_of(server, task["id"]) if event["kind"] == "failed"]
    listed = next(one for one in anna.tasks("failed") if one["id"] == task["id"])
    shown = [task, listed, events, anna.logs(task["id"]), str(refused.value), anna.show(task["id"])]
    assert events
    assert str(server.folder) not in json.dumps(shown)


HOSTILE = [
    {"task": {**TASK, "graph": "../secret.npz"}},
    {"task": {**TASK, "graph": "/etc/passwd"}},
    {"task": {**TASK, "graph": "ours/../../secret.npz"}},
    {"task": {**TASK, "graph": "out.npz"}},
    {"task": {**TASK, "graph": "~/x"}},
    {"task": {**TASK, "graph": "ours\x00"}},
    {"task": {**TASK, "graph": "a" * 100_000}},
    {"task": {**TASK, "graph": "planetoid:cora"}},
    {"task": {**TASK, "graph": {"a": 1}}},
    {"task": {**TASK, "graph": ["demo", "demo"]}},
    {"task": {**TASK, "model": "os:system"}},
    {"task": {**TASK, "model": f"{FAULTY}:exits_when_built"}},
    {"task": {**TASK, "model": "/tmp/x.py:f"}},
    {"task": {**TASK, "model": 5}},
    {"task": {**TASK, "model_args": 7}},
    {"task": {**TASK, "epochs": 10**400}},
    {"task": {**TASK, "epochs": -1}},
    {"task": {**TASK, "lr": "'; DROP TABLE tasks; --"}},
    {"task": {**TASK, "betas": "xy"}},
    {"task": {**TASK, "name": "\ud800"}},
    {"task": {**TASK, "name": "n" * 1000}},
    {"task": {**TASK, "given": 5, "model": f"{FAULTY}:Plain"}},
    {"task": {**TASK, "unknown": 1}},
    {"task": {**TASK}, "priority": 10**30},
    {"task": {**TASK}, "priority": "high"},
    {"task": {**TASK}, "after": ["nobody"]},
    {"task": {**TASK}, "after": "nobody"},
    {"task": {**TASK}, "budget": "lots"},
    {"task": {**TASK}, "budget": -1},
    {"task": {**TASK}, "budget": [1]},
    {"task": {**TASK}, "deadline": "tomorrow"},
    {"task": {**TASK}, "key": ""},
    {"task": {**TASK}, "tasks": []},
    {"tasks": []},
    {"tasks": {}},
    {"tasks": [1]},
    {},
    [],
    "text",
    None,
    5,
]


@pytest.mark.parametrize("body", HOSTILE, ids=[str(place) for place in range(len(HOSTILE))])
def test_bad_tasks_are_refused(server, body):
    with http(server) as client:
        before = client.get("/api/tasks").json()["tasks"]
        answer = client.post("/api/tasks", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, answer.text
        assert "root:" not in answer.text
        assert answer.json()["error"]
        assert len(client.get("/api/tasks").json()["tasks"]) == len(before)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"task": ' * 40 + b"1" + b"}" * 40, 400),
        (b'{"task": {"lr": NaN}}', 400),
        (b'{"task": {"lr": ' + b"9" * 10_000 + b"}}", 400),
        (b"\xff\xfe", 400),
        (b"", 400),
        (b'{"task": "' + b"x" * (5 << 20) + b'"}', 413),
    ],
)
def test_bad_bodies_are_refused(server, content, status):
    with http(server) as client:
        headers = {"Content-Type": "application/json"}
        assert client.post("/api/tasks", content=content, headers=headers).status_code == status


def test_a_form_is_refused(server):
    with http(server) as client:
        assert client.post("/api/tasks", data={"task": "x"}).status_code == 415


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/tasks/..%2F..%2Fetc%2Fpasswd", 404),
        ("/api/tasks/..%2Fqueue.db/weights", 404),
        ("/api/tasks/' OR 1=1 --", 404),
        ("/api/tasks/%00/result", 404),
        ("/api/tasks/%ff", 404),
        ("/api/tasks?state=' OR 1=1 --", 400),
        ("/api/tasks?limit=x", 422),
        ("/api/tasks?limit=999999999999999999999999", 400),
        ("/api/tasks?beyond=-5", 400),
        ("/api/tasks?user=' OR 1=1 --", 200),
        ("/api/events?since=-1", 400),
        ("/api/events?since=99999999999999999999999", 400),
        ("/nowhere", 404),
        ("/docs", 404),
    ],
)
def test_bad_paths_are_refused(server, path, status):
    with http(server) as client:
        answer = client.get(path)
        assert answer.status_code == status, answer.text
        assert status != 200 or answer.json()["tasks"] == []


def test_a_bad_last_event_id_is_refused(server):
    with http(server) as client:
        assert client.get("/api/events", headers={"Last-Event-ID": "x' --"}).status_code == 400
        assert client.get("/api/events", headers={"Last-Event-ID": "\u00b2".encode()}).status_code == 400


def test_many_submissions_at_once(server):
    """Several threads with the same keys: every task is queued once."""
    found: list[str] = []

    def submit(number: int) -> None:
        client = weft.Client(server.url, ANNA)
        for seed in range(5):
            task = weft.Task(**{**TASK, "epochs": 2}, seed=100 + seed)
            found.append(client.submit(task, key=f"once-{seed}")[0]["id"])

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(set(found)) == 5
    weft.Client(server.url, ANNA).wait(sorted(set(found)), 60)


def test_no_auth_is_for_loopback_alone(tmp_path):
    answer = CliRunner().invoke(cli, ["serve", "--no-auth", "--bind", "0.0.0.0:0", "--db", str(tmp_path / "q.db")])
    assert answer.exit_code != 0
    assert "others could reach it" in str(answer.exception)


def test_sigterm_drains_and_the_next_server_goes_on(tmp_path):
    """A group that runs saves its state; the next server resumes it, with the numbers of an uninterrupted run."""
    server = ServeProcess(tmp_path, "--no-auth").start()
    client = weft.Client(server.url)
    tasks = [weft.Task(**{**TASK, "epochs": 200}, seed=seed) for seed in range(2)]
    submitted = client.submit(tasks, user="anna")
    while not any(event["kind"] == "start" for event in _events(server)):
        time.sleep(0.05)
    time.sleep(0.3)
    assert server.stop() == 0
    with DirectQueue(server.db) as queue:
        assert {task.state for task in queue.tasks()} == {"queued"}
        [group] = queue.groups("preempted")
    with httpx.Client(trust_env=False) as other:
        server.start()
        assert other.get(f"{server.url}/api/tasks", headers={"Host": "evil.example"}).status_code == 400
    assert {task["state"] for task in client.wait(submitted, 60)} == {"done"}
    settings = {one["id"]: task for one, task in zip(submitted, tasks, strict=True)}
    expected = history_of([settings[name].with_values(name=name) for name in group.members])
    assert all(same(client.result(name)["history"], expected[name]) for name in settings)
    assert client.tasks(user="anna")[0]["attempts"] == 2
    server.stop()


def _events_of(server, task):
    """The events of a task as they are streamed, up to its end."""
    found = []
    for event in weft.Client(server.url, ANNA).events(task=task):
        found.append(event)
        if event["kind"] in ("done", "failed", "cancelled"):
            break
    return found


def _events(server):
    with DirectQueue(server.db) as queue:
        return [asdict(event) for event in queue.events()]
