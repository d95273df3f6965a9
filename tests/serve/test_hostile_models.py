"""Models that write to their worker's pipe or kill the server: they are given up, and others go on."""

from __future__ import annotations

import time

import pytest

import weft
from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import FAULTY, TASK, ServeProcess, history_of, opened
from tests.serve.test_supervisor import own, same, submit_own
from weft.serve.queue_db import Submission

LINES = (
    "[1, 2]",
    '"text"',
    "no JSON",
    "{}",
    '{"say": ["event"]}',
    '{"say": "event"}',
    '{"say": "event", "group": GROUP, "event": []}',
    '{"say": "event", "group": GROUP, "event": {"event": "progress", "epoch": "many"}}',
    '{"say": "done", "group": GROUP, "members": {"TASK": 7}}',
    '{"say": "done", "group": GROUP, "members": 7}',
    '{"say": "alive", "bytes": "many"}',
    '{"say": "alive", "bytes": ' + "9" * 5000 + "}",
    "[" * 100_000,
)


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("queue")) as queue:
        yield queue


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_no_message_ends_its_worker_alone(queue, line):
    file = queue.options.db.with_name("line")
    attempts = 1 if "GROUP" in line else 2  # a second group would have another id
    file.unlink(missing_ok=True)
    [bad] = submit_own(queue, own("WritesToThePipe", seed=LINES.index(line)), max_attempts=attempts)
    queue.until(lambda: queue.db.get(bad).state == "running")
    group = next(one for one in queue.db.groups() if bad in one.members)
    file.with_name("new").write_text(line.replace("GROUP", f'"{group.id}"').replace("TASK", bad))
    file.with_name("new").replace(file)
    [failed] = queue.wait([bad])
    assert (failed.state, failed.attempts) == ("failed", attempts)
    assert "sent a" in failed.error
    assert [task.state for task in queue.wait(queue.submit({"seed": 1}))] == ["done"]


def test_a_model_cannot_end_the_group_of_another(tmp_path):
    with opened(tmp_path, workers=2) as queue:
        [good] = queue.submit({"epochs": 400, "hidden": 24}, user="ben")
        queue.until(lambda: queue.db.get(good).state == "running")
        group = next(one for one in queue.db.groups() if good in one.members)
        outcome = f'{{"{good}": {{"status": "finished", "metrics": {{}}, "folder": "", "message": ""}}}}'
        (tmp_path / "line").write_text(f'{{"say": "done", "group": "{group.id}", "members": {outcome}}}')
        [bad] = submit_own(queue, own("WritesToThePipe"), user="anna")
        done, _ = queue.wait([good, bad])
        assert done.state == "done"
        expected = history_of(weft.Task(**{**TASK, "epochs": 400, "hidden": 24}))["gcn"]
        assert same(queue.history(good), expected)


def serve_until_done(server: ServeProcess, names: list[str], seconds: float = 280.0) -> int:
    """Start the server again whenever it has died, until no task of ``names`` waits; how often it died."""
    deaths, end = 0, time.monotonic() + seconds
    server.start(wait=False)
    with DirectQueue(server.db) as queue:
        while any(queue.get(name).state in ("queued", "planned", "running") for name in names):
            assert time.monotonic() < end, (server.folder / "serve.log").read_text()
            if server.process.poll() is not None:
                deaths += 1
                server.start(wait=False)
            time.sleep(0.05)
    return deaths


@pytest.fixture
def server(tmp_path):
    made = ServeProcess(tmp_path, "--no-auth", "--allow-model", f"{FAULTY}:*", "--workers", "2")
    yield made
    if made.process is not None:
        made.stop()


@pytest.mark.long
def test_a_model_that_kills_the_server_is_held_and_others_go_on(server):
    innocent = {**TASK, "epochs": 600, "hidden": 24}
    with DirectQueue(server.db) as queue:
        good, later = (
            queue.submit(Submission({"task": {**innocent, "seed": seed}}, max_attempts=1)) for seed in (1, 2)
        )
        bad = queue.submit(Submission({"task": own("KillsServer")}, max_attempts=1, user="anna"))
        names = [good.id, later.id, bad.id]
        assert serve_until_done(server, names) <= 3
        held = queue.get(bad.id)
        assert held.state == "paused"
        assert "servers died while it ran; it is held: resume it" in held.error
        done = [queue.get(name) for name in names[:2]]
        assert [task.state for task in done] == ["done", "done"], [task.error for task in done]
        assert problems(queue) == []
        queue.cancel(bad.id)


@pytest.mark.long
def test_a_model_that_kills_the_server_when_it_is_planned_is_refused(server):
    with DirectQueue(server.db) as queue:
        bad = queue.submit(Submission({"task": own("KillsServerWhenPlanned")}, max_attempts=1, user="anna"))
        good = queue.submit(Submission({"task": TASK}, user="ben"))
        assert serve_until_done(server, [bad.id, good.id]) == 2
        refused = queue.get(bad.id)
        assert (refused.state, queue.get(good.id).state) == ("failed", "done")
        assert "planning it ended the planner 2 times: the server died" in refused.error
