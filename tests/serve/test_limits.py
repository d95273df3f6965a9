"""Limits on what one user may take: priority, running time of a task, running time of a user; and missed deadlines."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.serve.scheduler_bench import Bench
from tests.serve.serving import TASK, Queue, ServeProcess, opened
from tests.serve.test_supervisor import own, submit_own
from weft.serve import worker_pool
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Submission

TOKENS = {"anna": "a" * 20, "": "o" * 20}
LONG = {"epochs": 100_000}


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    """Send a request as a user to a server whose caps are priority 5 and 60 s."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "tokens").write_text("\n".join(f"{user} {token}" for user, token in TOKENS.items()))
    options = ["--token", str(folder / "tokens"), "--max-priority", "5", "--time-limit", "60"]
    server = ServeProcess(folder, *options).start()

    def send(sender, method="post", path="/api/tasks", **body):
        headers = {"Authorization": f"Bearer {TOKENS[sender]}"}
        return httpx.request(method, server.url + path, headers=headers, json=body or None, timeout=30, trust_env=False)

    yield send
    assert server.stop() == 0


def test_a_user_may_give_a_priority_up_to_the_cap_and_the_operator_any(post):
    assert post("anna", task=TASK, priority=5).status_code == 201
    refused = post("anna", task=TASK, priority=6)
    assert refused.status_code == 403
    assert "priority=6: users of this server may give at most 5" in refused.text
    assert post("", task=TASK, priority=1000, user="anna").json()["tasks"][0]["priority"] == 1000


def test_without_an_option_users_may_only_lower_their_priority(tmp_path):
    assert ServeOptions(tmp_path / "queue.db").max_priority == 0


def test_a_time_limit_above_that_of_the_server_is_refused(post):
    assert post("anna", task=TASK, time_limit=60).status_code == 201
    refused = post("anna", task=TASK, time_limit=61)
    assert refused.status_code == 400
    assert "time_limit=61: a task may run for at most 60 s here" in refused.text


def test_a_missed_deadline_is_said(post):
    ids = [post("anna", task=TASK, deadline=due).json()["tasks"][0]["id"] for due in (5.0, time.time() + 1e6)]
    ids.append(post("anna", task=TASK).json()["tasks"][0]["id"])
    listed = {task["id"]: task["late"] for task in post("anna", "get").json()["tasks"] if task["id"] in ids}
    shown = {name: post("anna", "get", f"/api/tasks/{name}").json()["late"] for name in ids}
    assert listed == shown == dict(zip(ids, (True, False, None), strict=True))


def test_a_task_that_waits_past_its_deadline_says_so(tmp_path):
    with opened(tmp_path) as queue:
        first = queue.db.submit(Submission({"task": TASK}))
        queue.db.pause(first.id)
        late = queue.db.submit(Submission({"task": {**TASK, "seed": 1}, "deadline": 5.0}, after=(first.id,)))
        queue.supervisor.wake()
        said = f"waits for {first.id!r} to be done; it is late: its deadline has passed"
        queue.until(lambda: queue.supervisor.view["why"].get(late.id) == said)


def limited(queue, seconds, *settings, **more):
    """Submit tasks together, the first of them with a time limit."""
    spec = [{"task": {**TASK, **LONG, **one}} for one in settings]
    spec[0]["time_limit"] = seconds
    tasks = queue.db.submit_many([Submission(one, **more) for one in spec])
    queue.supervisor.wake()
    return [task.id for task in tasks]


@pytest.mark.rest
def test_a_task_over_its_limit_is_ended_and_others_of_its_group_go_on(tmp_path):
    with opened(tmp_path) as queue:
        short, other = limited(queue, 0.5, {"epochs": 1_500}, {"epochs": 1_500, "seed": 1})
        ended, done = queue.wait([short, other])
        assert (ended.state, done.state, done.attempts) == ("failed", "done", 1)
        assert ended.error == "it ran for longer than its time limit of 0.5 s, and was ended"
        assert len(queue.db.groups()) == 1


def test_a_model_over_its_limit_that_does_not_return_frees_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "CANCELLED_SECONDS", 0.2)
    with opened(tmp_path, time_limit=0.5, hang_seconds=3600.0) as queue:
        [bad] = queue.wait(submit_own(queue, own("Hangs")))
        assert bad.error.startswith("it ran for longer than its time limit of 0.5 s")
        [good] = queue.wait(queue.submit({"seed": 1, "epochs": 1}))
        assert good.state == "done"


@pytest.mark.rest
def test_running_time_counts_across_pauses_and_servers(tmp_path):
    queue = Queue(tmp_path)
    try:
        [name] = limited(queue, 3.0, {})
        queue.until(lambda: queue.epoch(name) > 0)
        began = time.monotonic()
        queue.db.pause(name)
        queue.supervisor.wake()
        queue.until(lambda: not queue.supervisor.state.active)
    finally:
        queue.close()
    assert 0 < queue.supervisor.state.user_seconds()[""] < 3.0 + time.monotonic() - began
    with opened(tmp_path) as queue:
        assert queue.db.get(name).plan["ran_seconds"] > 0
        queue.db.resume(name)
        [ended] = queue.wait([name])
        assert "longer than its time limit of 3 s" in ended.error


def test_a_user_who_had_the_time_of_a_day_waits_and_others_do_not(tmp_path):
    with opened(tmp_path, user_time_limit=0.05) as queue:
        queue.wait(queue.submit({"epochs": 300}, user="anna"))
        [second] = queue.submit({"seed": 1}, user="anna")
        [other] = queue.wait(queue.submit({"seed": 2}, user="ben"))
        assert other.state == "done"
        queue.until(lambda: "and may run for 0.05 s" in queue.supervisor.view["why"].get(second, ""))
        assert queue.db.get(second).attempts == 0


def test_what_an_urgent_task_waits_for_goes_before_what_is_less_urgent(tmp_path):
    bench = Bench(tmp_path)
    [usual] = bench.planned()
    [low] = bench.planned(priority=-5)
    [between] = bench.planned(priority=-3, after=(low,))
    bench.planned(priority=5, after=(between,))
    bench.scheduler.schedule()
    assert bench.states([low, usual]) == ["running", "planned"]
    [other] = bench.planned(priority=1)
    bench.scheduler.schedule()
    assert bench.states([low, other]) == ["running", "planned"]
    assert not bench.state.active[bench.pool.workers["cpu/0"].group].leaving
