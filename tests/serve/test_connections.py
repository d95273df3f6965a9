"""Connections that send nothing, or half a request: others are answered, and the server lives and works."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack, suppress

import pytest

import weft
from tests.serve.serving import TASK, ServeProcess, opened
from weft.serve import worker_pool
from weft.serve.worker_pool import Spawner

pytest.importorskip("fastapi")
from weft.serve import app as connections

FILES, FLOOD = 160, 400
HALF = b"GET /api/tasks HTTP/1.1\r\nHost: localhost\r\nX-Half: "


@pytest.fixture
def few_files():
    """Processes that are started now may open few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * FLOOD:
        pytest.skip("too few files may be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * FLOOD), hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(server: ServeProcess, stack: ExitStack, text: bytes = HALF) -> None:
    """Open connections that never send a whole request."""
    for _ in range(FLOOD):
        link = stack.enter_context(socket.socket())
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", server.port))
        try:
            link.send(text)
        except OSError:
            continue  # not there yet


def listens(server: ServeProcess) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", server.port)) == 0


@pytest.mark.parametrize("text", [HALF, b""], ids=["half a request", "nothing"])
def test_half_open_connections_stop_nobody(tmp_path, few_files, text):
    server = ServeProcess(tmp_path, "--no-auth").start()
    few_files()
    with ExitStack() as stack:
        stack.callback(server.stop)
        client = weft.Client(server.url)
        for round_ in range(3):
            flood(server, stack, text)
            [task] = client.submit([weft.Task(**TASK, seed=round_)])
            assert client.wait([task], 60)[0]["state"] == "done"
        assert server.process.poll() is None
    assert (tmp_path / "serve.log").stat().st_size < 10_000


def test_a_server_starts_though_connections_wait_for_it(tmp_path, few_files):
    server = ServeProcess(tmp_path, "--no-auth").start(wait=False)
    few_files()
    with ExitStack() as stack:
        stack.callback(server.stop)
        end = time.monotonic() + 60.0
        while not listens(server):
            assert time.monotonic() < end
        flood(server, stack)  # while its workers start
        [task] = weft.Client(server.url).submit([weft.Task(**TASK)])
        assert weft.Client(server.url).wait([task], 60)[0]["state"] == "done"


def test_a_worker_that_cannot_be_started_at_first_is_started_later(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "START_AGAIN_SECONDS", 0.05)
    fork, refused = Spawner.fork, []

    def full(self, *given):
        if len(refused) < 4:
            refused.append(given)
            raise OSError(24, "Too many open files")
        return fork(self, *given)

    monkeypatch.setattr(Spawner, "fork", full)
    with opened(tmp_path) as queue:
        assert [task.state for task in queue.wait(queue.submit({"seed": 1}))] == ["done"]
    assert len(refused) == 4


@pytest.mark.long
def test_a_request_that_does_not_come_is_not_waited_for(tmp_path):
    """Also where its bytes come one by one."""
    server = ServeProcess(tmp_path, "--no-auth")
    server.start()
    try:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as silent,
            socket.create_connection(("127.0.0.1", server.port)) as slow,
        ):
            end = time.monotonic() + 3 * connections.REQUEST_SECONDS
            slow.sendall(HALF)
            slow.settimeout(0.5)
            closed = False
            while not closed and time.monotonic() < end:
                try:
                    slow.sendall(b"x")
                    closed = slow.recv(10) == b""
                except TimeoutError:
                    continue
                except OSError:
                    closed = True
            assert closed
            silent.settimeout(3 * connections.REQUEST_SECONDS)
            with suppress(ConnectionResetError):
                assert silent.recv(10) == b""
    finally:
        server.stop()
