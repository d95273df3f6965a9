"""What a user gives to the client by mistake is refused in one sentence, before anything is sent."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
import torch

import weft
from tests.serve.direct_queue import DirectQueue
from weft.core.errors import InputError, WeftError
from weft.core.wording import option
from weft.serve.client import Client, ServerError, SubmittedSweep
from weft.serve.queue_db import QueueError, Submission

NAME = "c7b4f0a1d2e3"
TASK = weft.Task(graph="demo", model="gcn")
HUGE = 10**400
SWEEP = SubmittedSweep(None, "rates-1", [{"id": NAME}, {"id": "00"}])


class Recorded(Client):
    """A client that keeps what it would have sent."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9")
        self.sent = []

    def _json(self, method, path, body=None):
        self.sent.append((method, path, body))
        return {"tasks": [{"id": NAME, "state": "queued"}], "id": NAME, "state": "done", "kind": "training"}

    def _bytes(self, method, path, body=None, **_):
        self.sent.append((method, path, body))
        return b"printed"


@pytest.fixture
def client(monkeypatch):
    monkeypatch.delenv("WEFT_TOKEN", raising=False)
    return Recorded()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deadline": math.nan}, "deadline=nan must be a time in seconds since 1970"),
        ({"deadline": math.inf}, "deadline=inf must be a time"),
        ({"deadline": HUGE}, "deadline=1000"),
        ({"deadline": "tomorrow"}, "deadline='tomorrow' must be a time"),
        ({"deadline": True}, "deadline=True must be a time"),
        ({"priority": math.nan}, "priority=nan must be a whole number from -1000 to 1000"),
        ({"priority": 1.5}, "priority=1.5 must be a whole number"),
        ({"priority": 99999999999999999999}, "priority=99999999999999999999 must be a whole number from"),
        ({"budget": math.nan}, "budget=nan must be at least one byte"),
        ({"budget": math.inf}, "budget=inf must be at least one byte"),
        ({"budget": HUGE}, "budget=1000"),
        ({"budget": 2**63}, "budget=9223372036854775808 is more memory than there is"),
        ({"after": "../x"}, "there is no task '../x'"),
        ({"after": [NAME, 5]}, "expected the id of a task, or a task as submit returns it, not an int"),
        ({"after": 5}, "expected ids of tasks, not an int"),
        ({"key": object()}, "must be a text of 1 to 200 characters"),
    ],
)
def test_arguments_of_submit(arguments, message):
    with pytest.raises(InputError) as caught:
        Client("http://127.0.0.1:9").submit(TASK, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (None, "submit takes a weft.Task, a weft.Sweep or a list of tasks, not None"),
        ("demo", "not 'demo'; write weft.Task(graph="),
        ({"graph": "demo"}, "not {'graph': 'demo'}; write weft.Task"),
        (5, "not 5"),
        ([TASK, None], "not a list whose item 1 is None"),
        ([TASK, "demo"], "not a list whose item 1 is 'demo'"),
        (weft.Task(graph="demo", model="gcn", model_args={"x": math.nan}), "cannot be sent as JSON"),
    ],
)
def test_work_that_is_none(work, message):
    with pytest.raises(InputError) as caught:
        Client("http://127.0.0.1:9").submit(work)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latency_target": math.inf}, "latency_target=inf must be a number of seconds above 0"),
        ({"latency_target": math.nan}, "latency_target=nan must be"),
        ({"latency_target": 0}, "latency_target=0 must be"),
        ({"nodes": ["a"]}, "nodes: 'a' is no id of a node"),
        ({"nodes": [1.7]}, "nodes: '1.7' is no id of a node"),
        ({"nodes": [2, True]}, "nodes: 'True' is no id of a node"),
        ({"nodes": [-1]}, "nodes: '-1' is no id of a node"),
        ({"nodes": [2**70]}, "is no id of a node"),
        ({"nodes": np.array([1.0])}, "nodes: '1.0' is no id of a node"),
        ({"nodes": 5}, "nodes=5: expected all, train, val, test, or ids"),
        ({"task": "demo"}, "task: expected a weft.Task, not a str"),
        ({"of": [NAME]}, "expected the id of a task"),
        ({"graph": object()}, "cannot be sent as JSON"),
    ],
)
def test_arguments_of_infer(arguments, message):
    with pytest.raises(InputError) as caught:
        Client("http://127.0.0.1:9").infer(**{"of": NAME, **arguments})
    assert message in str(caught.value)


@pytest.mark.parametrize("nodes", [range(3), (0, 1, 2), np.arange(3), torch.arange(3)])
def test_nodes_of_any_kind_of_whole_numbers(client, nodes):
    client.infer(NAME, nodes=nodes)
    assert client.sent[0][2]["infer"]["nodes"] == [0, 1, 2]
    assert all(type(node) is int for node in client.sent[0][2]["infer"]["nodes"])


def test_numbers_of_numpy_are_sent(client):
    client.submit(TASK, priority=np.int64(3), deadline=np.float32(2.0))
    assert (client.sent[0][2]["priority"], client.sent[0][2]["deadline"]) == (3, 2.0)


@pytest.mark.parametrize("after", [NAME, [NAME], (NAME,), {"id": NAME, "state": "queued"}, [{"id": NAME}]])
def test_one_task_to_come_after_is_a_list_of_one(client, after):
    client.submit(TASK, after=after)
    client.infer(NAME, after=after)
    assert [body["after"] for _, _, body in client.sent] == [[NAME], [NAME]]


@pytest.mark.parametrize("after", ["rates-1", ["rates-1"], SWEEP, [SWEEP]])
def test_what_comes_after_a_sweep_comes_after_all_of_its_tasks(client, monkeypatch, after):
    monkeypatch.setattr(client, "tasks", lambda sweep: [{"id": NAME}, {"id": "00"}] if sweep == "rates-1" else [])
    client.submit(TASK, after=after)
    client.infer(NAME, after=after)
    assert [body["after"] for _, _, body in client.sent] == [[NAME, "00"]] * 2


@pytest.mark.parametrize("call", ["logs", "result", "infer"])
def test_a_sweep_where_one_task_is_needed(client, call):
    with pytest.raises(InputError, match="rates-1 is a sweep; give one of its tasks: weft queue list --sweep rates-1"):
        getattr(client, call)("rates-1")
    assert client.sent == []


@pytest.mark.parametrize("call", ["show", "cancel", "pause", "resume", "logs", "result"])
def test_a_task_is_given_by_its_id_or_as_it_was_shown(client, call):
    getattr(client, call)(NAME)
    getattr(client, call)({"id": NAME, "state": "done"})
    assert client.sent[0] == client.sent[1]
    assert NAME in client.sent[0][1]


@pytest.mark.parametrize("call", ["show", "cancel", "pause", "resume", "logs", "result", "wait", "fetch", "events"])
@pytest.mark.parametrize("task", ["../../x", "nobody", "", "a/b", "a" * 300, {"name": "x"}, 5, [[NAME]]])
def test_what_is_no_task(client, call, task, tmp_path):
    with pytest.raises(InputError, match=r"there is no task|expected the id|expected ids"):
        _call(client, call, task, tmp_path)
    assert client.sent == []


def _call(client, call, task, folder):
    if call == "fetch":
        return client.fetch(task, folder)
    return next(client.events(task=task)) if call == "events" else getattr(client, call)(task)


def test_one_task_is_waited_for(client):
    assert [task["id"] for task in client.wait(NAME)] == [NAME]
    assert [task["id"] for task in client.wait({"id": NAME})] == [NAME]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("http://127.0.0.1:notaport", "expected an address such as http://127.0.0.1:8787"),
        ("http://127.0.0.1:99999", "expected an address"),
        ("http://[::1", "expected an address"),
        ("http://127.0.0.1:80\n80", "expected an address"),
        ("http://a b", "expected an address"),
        (5, "expected an address"),
    ],
)
def test_addresses(server, message):
    with pytest.raises(InputError) as caught:
        Client(server)
    assert message in str(caught.value)


@pytest.mark.parametrize("token", ["secret\nword", "secret\r\nX: y", "secret☃", "secret word", 5, b"secret"])
def test_tokens(token):
    with pytest.raises(InputError, match="token") as caught:
        Client("http://127.0.0.1:9", token)
    assert "secret" not in str(caught.value)


def test_a_long_token_is_no_path():
    assert Client("http://127.0.0.1:9", "a" * 5000 + "\n")


def test_a_token_file_without_a_usable_token(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "snow").write_text("anna secret☃\n")
    with pytest.raises(InputError, match="has no token"):
        Client("http://127.0.0.1:9", tmp_path / "empty")
    with pytest.raises(InputError, match="has characters that no token has"):
        Client("http://127.0.0.1:9", tmp_path / "snow")


def test_fetching_into_a_file(client, tmp_path):
    place = tmp_path / "there"
    place.write_text("mine")
    with pytest.raises(InputError, match="there: is a file, or in one; give a folder"):
        client.fetch(NAME, place)
    with pytest.raises(InputError, match="is a file, or in one"):
        client.fetch(NAME, place / "below")
    with pytest.raises(InputError, match="expected the path of a folder, not None"):
        client.fetch(NAME, None)
    with pytest.raises(InputError, match="cannot be made"):
        client.fetch(NAME, "a" * 300)
    assert place.read_text() == "mine"


def test_nothing_is_made_for_a_task_that_is_not_there(tmp_path):
    with pytest.raises(WeftError):
        Client("http://127.0.0.1:9").fetch(NAME, tmp_path / "results")
    assert list(tmp_path.iterdir()) == []


def test_a_long_value_is_cut_in_messages():
    assert option("deadline", "x" * 1000).endswith("…")


def test_a_task_that_has_ended_is_said_to_have(tmp_path):
    with DirectQueue(tmp_path / "queue.db") as queue:
        queue.submit(Submission({}, id="a"))
        queue.cancel("a")
        with pytest.raises(QueueError, match=r"task 'a' has ended already \(cancelled\); it cannot become paused"):
            queue.pause("a")


def test_a_server_that_does_not_answer_is_said_to_be_out_of_reach():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        for call in (client.state, lambda: client.wait(NAME), lambda: next(client.events())):
            with pytest.raises(ServerError, match=r"cannot be reached \(timed out\); is `weft serve` running\?"):
                call()
