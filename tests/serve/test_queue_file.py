"""The file of the queue: one server for it by whatever name, and nothing is written to it by a server that lost it."""

from __future__ import annotations

import os
import sqlite3
import warnings
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.serve.serving import TASK, ServeProcess
from weft.cli.app import app as cli
from weft.core.errors import SpecError

pytest.importorskip("fastapi")

from weft.serve.app import make_app
from weft.serve.options import ServeOptions
from weft.serve.queue_db import LostQueueError, QueueDB, QueueError, Submission, back_up, take_queue
from weft.serve.server import server_lock
from weft.serve.submissions import Tokens
from weft.serve.supervisor import Supervisor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another package than httpx
    from starlette.testclient import TestClient

LINKS = {"symlink": os.symlink, "hard link": os.link}
BODY = {"task": {"graph": "demo", "model": "gcn"}}


def dump(path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_one_server_for_all_names_of_a_file(tmp_path, link):
    (tmp_path / "folder").mkdir()
    with server_lock(tmp_path / "q.db"):
        link(tmp_path / "q.db", tmp_path / "folder" / "other.db")
        with (
            pytest.raises(SpecError, match=r"other\.db: another server works on this queue; use that one"),
            server_lock(tmp_path / "folder" / "other.db"),
        ):
            pass


def test_a_file_with_two_names_is_refused(tmp_path):
    take_queue(tmp_path / "q.db")
    os.link(tmp_path / "q.db", tmp_path / "other.db")
    with pytest.raises(QueueError, match=r"other\.db: has several names \(hard links\) and may have one; remove"):
        take_queue(tmp_path / "other.db")


def test_a_server_that_lost_its_queue_can_write_nothing(tmp_path):
    path = tmp_path / "q.db"
    with QueueDB(path, owner=take_queue(path)) as former:
        former.submit_apart([[Submission({"task": {}}, id="a")]])
        former.plan_many([("a", {"bytes": 1})])
        take_queue(path)
        before = dump(path)
        writes = {
            "submit_apart": ([[Submission({"task": {}})]],),
            "plan_many": ([("a", {})],),
            "unplan": ("a",),
            "claim_all": (["a"], "w", 30.0, None),
            "heartbeat": ("w", 30.0),
            "finish": ("a", "w", 1, {}),
            "fail": ("a", "w", 1, "reason"),
            "release": ("a", "reason"),
            "hold": ("a", "reason", {}),
            "refuse": ("a", "reason"),
            "replan": ("a", {}),
            "record": ([("a", "note", {})],),
            "end_group": ("g", "ended"),
            "requeue_expired": (),
            "cancel": ("a",),
            "pause": ("a",),
            "resume": ("a",),
        }
        for name, arguments in writes.items():
            with pytest.raises(LostQueueError, match=r"q\.db: another server has taken this queue over; use that one"):
                getattr(former, name)(*arguments)
        assert dump(path) == before


@pytest.mark.rest
def test_a_server_that_lost_its_queue_ends_with_one_sentence(tmp_path):
    server = ServeProcess(tmp_path, "--no-auth").start()
    try:
        take_queue(server.db)
        answer = httpx.post(f"{server.url}/api/tasks", json={"task": TASK}, trust_env=False)
        assert answer.status_code == 503
        assert "another server has taken this queue over" in answer.json()["error"]
        assert server.process.wait(60) == 1
    finally:
        server.stop()
    log = (tmp_path / "serve.log").read_text()
    assert log.count("another server has taken this queue over; use that one") == 1, log
    assert "Traceback" not in log
    with QueueDB(server.db) as queue:
        assert not any(queue.counts().values())


class Asleep(Supervisor):
    """A supervisor that starts no process."""

    def is_alive(self) -> bool:
        return True


@contextmanager
def served(path, owner):
    """The HTTP interface of a server that owns the queue in ``path``."""
    options = ServeOptions(path, devices=("cpu",))
    app = make_app(options, Asleep(options, owner), Tokens(open=True))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture
def client(tmp_path):
    with served(tmp_path / "q.db", take_queue(tmp_path / "q.db")) as opened:
        yield opened


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_file_that_is_deleted_or_replaced_under_a_server(client, tmp_path, replaced, used):
    path = tmp_path / "q.db"
    if used:
        assert client.post("/api/tasks", json=BODY).status_code == 201
    assert client.get("/health").status_code == 200
    path.rename(tmp_path / "away")
    if replaced:
        take_queue(path)
    for answer in (client.get("/health"), client.post("/api/tasks", json=BODY)):
        assert answer.status_code == 503
        assert "q.db: the file of the queue was deleted or replaced" in answer.text
    assert path.exists() == replaced  # asking has not made another one
    (tmp_path / "away").rename(path)
    assert client.get("/health").status_code == 200
    assert client.post("/api/tasks", json=BODY).status_code == 201


def test_a_backup_while_a_server_runs(client, tmp_path):
    path, copy = tmp_path / "q.db", tmp_path / "copy.db"
    assert client.post("/api/tasks", json=BODY).status_code == 201
    shell = CliRunner().invoke(cli, ["serve", "backup", str(path), str(copy)])
    assert (shell.exit_code, shell.stdout) == (0, f"{copy}: 1 tasks, checked\n")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert client.post("/api/tasks", json=BODY).status_code == 201  # the copying has taken nothing from the server
    with served(copy, take_queue(copy)) as other:
        assert len(other.get("/api/tasks").json()["tasks"]) == 1
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith("copy")) == ["copy.db"]


def test_a_backup_overwrites_nothing(tmp_path):
    take_queue(tmp_path / "q.db")
    (tmp_path / "copy.db").write_text("precious")
    for copy in (tmp_path / "copy.db", Path()):
        with pytest.raises(QueueError, match=rf"{copy}: is there already and is not overwritten; name a new file"):
            back_up(tmp_path / "q.db", copy)
    assert (tmp_path / "copy.db").read_text() == "precious"
    with pytest.raises(QueueError, match="there is no such file; name the queue"):
        back_up(tmp_path / "none.db", tmp_path / "other.db")
    with pytest.raises(QueueError, match="name a file in a folder to write to"):
        back_up(tmp_path / "q.db", tmp_path / "nowhere" / "other.db")
    (tmp_path / "other.db.part").touch()
    with pytest.raises(QueueError, match="remove it, if no other backup writes it"):
        back_up(tmp_path / "q.db", tmp_path / "other.db")
    assert not (tmp_path / "none.db").exists()
    assert not (tmp_path / "other.db").exists()


@pytest.fixture
def damaged(tmp_path):
    """A queue with pages that were overwritten, and the server that owned it."""
    path = tmp_path / "q.db"
    with QueueDB(path, owner=take_queue(path)) as queue:
        queue.submit_apart([[Submission({"task": {**TASK, "seed": seed}}) for seed in range(300)]])
    owner = take_queue(path)
    with open(path, "r+b") as file:
        for page in range(20, path.stat().st_size // 4096, 3):
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    return path, owner


def test_a_damaged_file_is_refused_at_the_start(damaged, tmp_path):
    path, _ = damaged
    with pytest.raises(QueueError, match=r"q\.db: is damaged .*; restore a copy that `weft serve backup .*` made, or"):
        take_queue(path)
    with pytest.raises(QueueError, match=r"q\.db: is damaged"):
        back_up(path, tmp_path / "copy.db")
    assert [file.name for file in tmp_path.iterdir()] == ["q.db"]


def test_pages_that_are_damaged_under_a_server_are_503(damaged):
    with served(*damaged) as client:
        answer = client.get("/api/tasks")
        assert answer.status_code == 503
        assert "the queue cannot be read now" in answer.json()["error"]
