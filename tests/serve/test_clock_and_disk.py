"""A clock that is set while groups run, and places that cannot be written: one sentence, or nothing happens."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest

from tests.serve.direct_queue import DirectQueue
from weft.core.errors import SpecError
from weft.sched.queue_state import RunningGroup
from weft.serve.groups import Groups
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Group, Submission
from weft.serve.server import bound_sockets, make_folder, server_lock
from weft.serve.state import ActiveGroup, SupervisorState
from weft.serve.submissions import make_token_file

HOUR = 3600.0


@pytest.fixture
def running(tmp_path):
    """A task that a worker trains, in a queue whose clock can be set; ``set_clock`` moves it."""
    ahead = [0.0]
    state = SupervisorState(ServeOptions(tmp_path / "q.db"))
    with DirectQueue(state.options.db, lambda: time.time() + ahead[0]) as state.db:
        task = state.db.submit(Submission({"task": {}}))
        state.db.plan(task.id, {"bytes": 1, "seconds": 60.0})
        worker = SimpleNamespace(name="cpu/0", pid=1, device="cpu")
        group = Group("g", "cpu", "cpu/0", (task.id,), task.id, 1, 60.0, "is next", time.time())
        (claimed,) = state.db.claim_all([task.id], state.claimant(worker), 30.0, group)
        running = RunningGroup("g", "cpu", (task.id,), 1)
        attempts, users = {task.id: claimed.attempts}, {task.id: ""}
        state.active["g"] = ActiveGroup(group, worker, attempts, users, running, heard=time.monotonic())
        yield state, task.id, lambda seconds: ahead.__setitem__(0, seconds)


@pytest.mark.parametrize("seconds", [2 * HOUR, -HOUR])
def test_a_clock_that_is_set_takes_no_task_from_its_worker(running, seconds):
    state, task, set_clock = running
    for _ in range(3):  # as often as a task is tried
        set_clock(seconds)
        Groups(state, None).heartbeat()
        set_clock(0.0)
        Groups(state, None).heartbeat()
    found = state.db.get(task)
    assert (found.state, found.attempts) == ("running", 1)


def test_a_worker_that_is_gone_loses_its_task_all_the_same(running):
    state, task, set_clock = running
    state.active.clear()
    set_clock(31.0)
    Groups(state, None).heartbeat()
    assert state.db.get(task).state == "queued"


@pytest.mark.parametrize("seconds", [2 * HOUR, -HOUR])
def test_how_long_a_group_has_run_is_not_read_off_the_clock(running, seconds, monkeypatch):
    state, _, _ = running
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    active = state.active["g"]
    assert 0 <= active.seconds < 30
    assert 30 < active.state().ends - time.time() <= 60


def test_an_address_that_is_taken_is_one_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SpecError, match=rf"--bind 127.0.0.1:{port}: address already in use; choose another"):
            bound_sockets("127.0.0.1", port)
    (free,) = bound_sockets("127.0.0.1", 0)
    with free:
        assert free.getsockname()[1] > 0
    with pytest.raises(SpecError, match="choose another address"):
        bound_sockets("no-such-host.invalid", 1)


def addresses_of(*hosts):
    """What the system says of a name with several addresses."""
    family = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    return lambda _, port, **__: [(*family, (host, port)) for host in hosts]


def test_every_address_of_a_name_is_bound_to_one_port(monkeypatch):
    not_here = "203.0.113.9"
    monkeypatch.setattr(socket, "getaddrinfo", addresses_of("127.0.0.1", not_here, "127.0.0.2", "127.0.0.1"))
    made = bound_sockets("both", 0)
    assert [one.getsockname()[0] for one in made] == ["127.0.0.1", "127.0.0.2"]
    assert len({one.getsockname()[1] for one in made}) == 1
    port = made[0].getsockname()[1]
    made[0].close()
    made[1].listen()
    with pytest.raises(SpecError, match="address already in use"):
        bound_sockets("both", port)  # somebody has one of them: clients would reach one server or the other
    made[1].close()
    monkeypatch.setattr(socket, "getaddrinfo", addresses_of(not_here))
    with pytest.raises(SpecError, match="cannot assign requested address"):
        bound_sockets("elsewhere", port)


def test_places_that_cannot_be_written_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "q.db"  # nobody, not even root, makes a folder of a file
    with pytest.raises(SpecError, match=r"file: cannot be made \(file exists\)"):
        make_folder(inside.parent)
    with pytest.raises(SpecError, match="cannot be made"), server_lock(inside):
        pass
    (tmp_path / "q.db").mkdir()
    with (
        pytest.raises(SpecError, match=r"q\.db: cannot be written \(is a directory\)"),
        server_lock(tmp_path / "q.db"),
    ):
        pass
    with pytest.raises(SpecError, match=r"no token could be written there \(not a directory\)"):
        make_token_file(inside)
