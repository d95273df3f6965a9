"""Bytes that a request, a task, a user and a page of a listing may have, over HTTP."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import httpx
import pytest

import weft
from tests.serve.serving import TASK, ServeProcess

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = ServeProcess(tmp_path_factory.mktemp("quotas"), "--no-auth").start()
    yield process
    process.stop()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


def with_settings_of(size: int, **more) -> dict:
    """A task that waits for good, with so many bytes of settings."""
    return {**TASK, "epochs": 10_000_000, "model_args": {"text": "x" * size}, **more}


def test_settings_of_a_task_are_bounded(http):
    before = http.get("/api/tasks").json()["tasks"]
    answer = http.post("/api/tasks", json={"task": with_settings_of(65 * KIB)})
    assert answer.status_code == 413
    assert "the settings of a task have " in answer.json()["error"]
    assert "and a task may have 65,536; " in answer.json()["error"]
    refused = http.post("/api/tasks", json={"tasks": [TASK, with_settings_of(3 * MIB)]})
    assert refused.status_code == 413
    assert http.get("/api/tasks").json()["tasks"] == before  # all or none


def test_settings_of_a_users_open_tasks_are_bounded(http):
    body = {"tasks": [with_settings_of(60 * KIB, seed=seed) for seed in range(64)], "user": "large"}
    statuses = [http.post("/api/tasks", json=body).status_code for _ in range(9)]
    assert statuses == [201] * 8 + [429]
    refusal = http.post("/api/tasks", json=body).json()["error"]
    assert refusal.startswith("user 'large': the settings of tasks that have not ended have ")
    small = {"task": {**TASK, "epochs": 10_000_000}}
    assert http.post("/api/tasks", json={**small, "user": "large"}).status_code == 201
    assert http.post("/api/tasks", json={**body, "user": "other"}).status_code == 201
    shown = 0
    for page in pages(http, user="large", limit=10_000):
        assert len(page.content) < 8 * MIB
        shown += len(page.json()["tasks"])
    assert shown == 8 * 64 + 1


def test_descriptions_of_a_users_open_sweeps_are_bounded(http):
    described = {"name": "d", "model_args": {"text": "x" * 60 * KIB}}
    body = {"tasks": [{**TASK, "epochs": 10_000_000}], "sweep": described, "user": "sweeps"}
    statuses = [http.post("/api/tasks", json=body).status_code for _ in range(560)]
    assert statuses[:500] == [201] * 500
    assert statuses[-1] == 429
    with_description = http.get("/api/sweeps/d-1").json()
    assert with_description["spec"] == described
    [*_, listed] = http.get("/api/sweeps", params={"user": "sweeps"}).json()["sweeps"]
    assert listed["counts"]
    assert "spec" not in listed


def pages(http, **asked):
    """The pages of a listing."""
    beyond = 0
    while beyond is not None:
        page = http.get("/api/tasks", params={**asked, "beyond": beyond})
        beyond = page.json()["next"]
        yield page


def test_a_page_ends_before_its_limit_and_the_next_goes_on(server, http):
    names = []
    for _ in range(2):
        tasks = [{**TASK, "epochs": 10_000_000, "name": f"{seed:0150d}"} for seed in range(3000)]
        body = {"tasks": tasks, "user": "p"}
        names += [task["id"] for task in http.post("/api/tasks", json=body).json()["tasks"]]
    found = list(pages(http, user="p", limit=10_000))
    assert len(found) > 1
    assert max(len(page.content) for page in found) < 3 * MIB
    assert [task["id"] for page in found for task in page.json()["tasks"]] == names
    assert len(http.get("/api/tasks", params={"user": "p", "limit": 7}).json()["tasks"]) == 7
    assert [task["id"] for task in weft.Client(server.url).tasks(user="p")] == names


def test_a_page_has_the_reasons_of_its_own_tasks_alone(http):
    end = time.monotonic() + 60
    while not (page := http.get("/api/tasks", params={"user": "p", "limit": 3}).json())["why"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert set(page["why"]) <= {task["id"] for task in page["tasks"]}


def test_bodies_of_two_million_lists_are_refused(http):
    nested = b"[" * 30 + b"]" * 30 + b","
    body = b'{"task": [' + nested * (4 * MIB // 61 - 2) + b"0]}"
    answer = http.post("/api/tasks", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"] == "the body has more than 200,000 lists and objects"


def test_bodies_that_arrive_at_once_are_bounded_and_small_requests_are_answered(server, http):
    head = f"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {4 * MIB}"
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(20)]
        refused = 0
        for link in links:
            link.settimeout(10)
            try:
                link.sendall(f"{head}\r\n\r\n".encode() + b" " * (4 * MIB - 1))  # the last byte does not come
            except ConnectionError:
                refused += 1
        end = time.monotonic() + 30
        while not refused:
            assert time.monotonic() < end
            for link in links:
                link.settimeout(0.05)
                try:
                    refused += link.recv(20).startswith(b"HTTP/1.1 503 ")
                except TimeoutError:
                    continue
    assert http.post("/api/tasks", json={"task": {**TASK, "epochs": 1}}).status_code == 201
