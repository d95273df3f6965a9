"""``weft watch`` and ``client.wait`` while a server is killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import weft
from tests.serve.serving import TASK, ServeProcess, environment
from weft.serve import client as client_module
from weft.serve.client import UnreachableError


@contextmanager
def watching(server, name):
    """``weft watch`` as a process, which is ended at the latest with the block."""
    command = [sys.executable, "-m", "weft", "watch", name, "--server", server.url]
    found = {**os.environ, **environment(server.folder)}
    with subprocess.Popen(command, env=found, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_watch_goes_on_after_the_server_was_killed(tmp_path):
    server = ServeProcess(tmp_path, "--no-auth", "--checkpoint-seconds", "0.1").start()
    try:
        client = weft.Client(server.url)
        [before] = client.submit(weft.Task(**{**TASK, "epochs": 1_000_000}))
        while client.show(before)["state"] != "running":
            time.sleep(0.05)
        [task] = client.submit(weft.Task(**{**TASK, "epochs": 400, "hidden": 32}))
        with watching(server, task["id"]) as watch:
            out = watch.stdout.readline()
            client.cancel(before)  # not before the other is watched, which begins now
            while "  checkpoint" not in out and (line := watch.stdout.readline()):  # until it trains
                out += line
            server.kill()
            time.sleep(1.5)
            server.start()
            out += watch.stdout.read()
            told = watch.stderr.read()
            assert watch.wait(30) == 0, told
        lines = [line for line in out.splitlines() if line.startswith(task["id"])]
        assert lines[-1].split()[1] == "done"
        assert sum(line.split()[1] == "running" for line in lines) == 2
        assert len(lines) == len(set(lines)) or out.count("  queued") == 2
        assert told.count("was lost; waiting up to 300 s") == 1, told
        assert told.count("\n") == 1
    finally:
        server.stop()


def test_a_server_that_does_not_come_back_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.05)
    server = ServeProcess(tmp_path, "--no-auth").start()
    try:
        client, told = weft.Client(server.url), []
        [task] = client.submit(weft.Task(**{**TASK, "epochs": 20_000}))
        events = client.events(patience=0.3, on_lost=told.append)
        next(events)
        server.kill()
        with pytest.raises(UnreachableError, match=r"was lost and did not come back within 0 s; its tasks go on"):
            for _ in events:
                pass
        assert len(told) == 1
        monkeypatch.setattr(client_module, "PATIENCE", 0.3)
        with pytest.raises(UnreachableError):
            client.wait([task])
    finally:
        server.stop()


def test_a_server_that_was_never_there_is_said_at_once():
    with pytest.raises(UnreachableError, match="is `weft serve` running"):
        next(weft.Client("http://127.0.0.1:9").events())
