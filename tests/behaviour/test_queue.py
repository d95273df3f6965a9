"""A queue server: what was submitted is finished once, also after ``kill -9`` of the server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

import weft
from tests.behaviour import calls

TASK = {"graph": "demo", "model": "gcn", "hidden": 8}


class Server:
    """``weft serve`` on the CPU as a process of its own."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.client = weft.Client(f"http://{self.address}")

    def start(self) -> None:
        command = [sys.executable, "-m", "weft", "serve", "--db", str(self.folder / "queue.db")]
        options = ["--bind", self.address, "--devices", "cpu", "--no-auth", "--checkpoint-seconds", "0.1"]
        with open(self.folder / "serve.log", "ab") as log:
            self.process = subprocess.Popen([*command, *options], env=calls.environment(), stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                self.client.state()
                return
            except weft.WeftError:
                assert time.monotonic() < end, (self.folder / "serve.log").read_text()
                assert self.process.poll() is None, (self.folder / "serve.log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    made.start()
    yield made
    if made.process.poll() is None:
        made.stop()


def test_tasks_are_trained_and_fetched(server, tmp_path):
    sweep = weft.Sweep(**TASK, epochs=5, seed=range(3))
    submitted = server.client.submit(sweep, key="monday")
    assert [one["id"] for one in server.client.submit(sweep, key="monday")] == [one["id"] for one in submitted]
    assert {one["state"] for one in server.client.wait(submitted, 90)} == {"done"}
    expected = calls.run(sweep)
    for one, result in zip(submitted, expected, strict=True):
        assert server.client.result(one["id"])["history"]["loss"] == pytest.approx(result.history["loss"], rel=1e-4)
    server.client.fetch(submitted[0]["id"], tmp_path / "fetched")
    assert list((tmp_path / "fetched").rglob("model.safetensors"))
    (tmp_path / "bad.toml").write_text('graph = "demo"\n[model]\nname = "gcn"\nhidden = 0\n')
    address = ("--server", f"http://{server.address}")
    refused = calls.shell("submit", tmp_path / "bad.toml", *address)
    assert refused.returncode == 2
    assert "hidden=0" in refused.stderr
    watched = calls.shell("watch", submitted[1]["id"], *address)
    assert watched.returncode == 0, watched.stderr
    listed = calls.shell("queue", "list", *address)
    assert all(one["id"] in listed.stdout for one in submitted)
    assert server.stop() == 0


@pytest.mark.rest
def test_a_killed_server_goes_on_and_finishes_every_task_once(server):
    long = weft.Task(**TASK, epochs=700)
    several = [weft.Task(**{**TASK, "model": "sage"}, epochs=150, seed=seed) for seed in range(2)]
    submitted = [*server.client.submit(long, key="long"), *server.client.submit(several, key="several")]
    watching = [sys.executable, "-m", "weft", "watch", submitted[0]["id"], "--server", f"http://{server.address}"]
    with open(server.folder / "watch.log", "wb") as log:
        watcher = subprocess.Popen(watching, env=calls.environment(), stdout=log, stderr=log)
    for _ in range(2):
        last = server.client.state()["last_seq"]
        events = server.client.events(last, task=submitted[0]["id"])
        next(event for event in events if event["kind"] == "checkpoint")
        server.kill()
        server.start()
    assert [one["id"] for one in server.client.submit(long, key="long")] == [submitted[0]["id"]]
    assert {one["state"] for one in server.client.wait(submitted, 120)} == {"done"}
    assert watcher.wait(60) == 0, (server.folder / "watch.log").read_text()
    assert len(server.client.tasks()) == 3
    (mark,) = server.client.submit(weft.Task(**TASK, epochs=1, seed=9))
    ends = []
    for event in server.client.events():
        if event["kind"] == "done":
            ends.append(event["task"])
            if event["task"] == mark["id"]:
                break
    assert sorted(ends) == sorted(one["id"] for one in [*submitted, mark])
    found = server.client.result(submitted[0]["id"])["history"]["loss"]
    assert found == pytest.approx(calls.run(long).history["loss"], rel=1e-4)
    assert server.stop() == 0
