"""Sharded tasks in the queue: all ranks start, are killed, preempted, cancelled, paused and resumed as one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import weft
from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import TASK, Queue, ServeProcess, history_of
from tests.serve.test_supervisor import same
from weft.serve.processes import children
from weft.serve.queue_db import ENDED, Submission
from weft.serve.service import metrics_text

LONG = {"epochs": 300, "model": "sage"}
SAMPLED = {"model": "sage", "mode": "sampled", "batch": 64, "fanout": [4, 4], "epochs": 4, "dropout": 0.0}


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    opened = Queue(tmp_path_factory.mktemp("queue"), workers=2)
    yield opened
    opened.close()
    assert opened.supervisor.error == ""


@pytest.fixture(scope="module")
def expected():
    """The numbers of LONG over two ranks."""
    return over_ranks(weft.Task(**{**TASK, **LONG}))


def over_ranks(task, ranks=2) -> dict:
    return weft.run(task, device="cpu", ranks=ranks, progress=False).history


def submit(queue, settings, ranks=2, **more) -> str:
    [task] = queue.db.submit_many([Submission({"task": {**TASK, **settings}, "options": {"ranks": ranks}}, **more)])
    queue.supervisor.wake()
    return task.id


def worker_of(queue, name):
    """The worker that trains a task."""
    found = [active.worker for active in queue.supervisor.state.active.values() if name in active.members]
    return found[0] if found else None


def rank_pids(worker: int) -> list[int]:
    """The processes of the other ranks that a worker has started."""
    found = []
    for child in children(worker):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        found += [child] if b"spawn_main" in command else []
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_checkpoint(queue, name) -> tuple[int, list[int]]:
    """Wait until a task trains and has saved; its worker and its other ranks."""
    queue.until(lambda: queue.epoch(name) > 0 or queue.db.get(name).state in ENDED, 120)
    assert queue.db.get(name).state == "running", queue.told()
    worker = worker_of(queue, name).pid
    return worker, rank_pids(worker)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["full", "sampled"])
def test_a_task_over_two_ranks_has_the_numbers_of_a_run(queue, settings):
    name = submit(queue, settings)
    [done] = queue.wait([name])
    assert (done.state, done.attempts) == ("done", 1), done.error
    task = weft.Task(**{**TASK, **settings})
    assert same(queue.history(name), over_ranks(task))
    one_rank = history_of(task)[task.label]
    assert queue.history(name)["loss"] == pytest.approx(one_rank["loss"], rel=2e-4, abs=2e-5)
    [group] = [one for one in queue.db.groups() if name in one.members]
    assert "2 ranks on cpu" in group.why
    assert done.plan["ranks"] == 2
    assert not rank_pids(os.getpid())


def test_it_takes_as_many_workers_as_it_has_ranks_and_what_waits_is_not_lost(queue):
    wide = submit(queue, LONG)
    queue.until(lambda: worker_of(queue, wide) is not None)
    set_aside = 2 * queue.db.groups("running")[0].bytes
    queue.until(lambda: f'estimated_bytes{{device="cpu"}} {set_aside}' in metrics_text(queue.supervisor.view, {}, {}))
    beside = queue.submit({"seed": 5, "layers": 3})[0]
    queue.until(lambda: "free worker" in queue.supervisor.view["why"].get(beside, ""))
    assert queue.db.get(wide).state == "running"
    assert [task.state for task in queue.wait([wide, beside], 120)] == ["done", "done"]


@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_a_killed_process_ends_all_ranks_and_the_task_goes_on_from_its_checkpoint(queue, expected, victim):
    name = submit(queue, LONG)
    worker, ranks = wait_for_checkpoint(queue, name)
    assert len(ranks) == 1
    os.kill(worker if victim == "worker" else ranks[0], signal.SIGKILL)
    queue.until(lambda: not any(map(is_alive, [worker, *ranks])))
    [done] = queue.wait([name], 120)
    assert (done.state, done.attempts) == ("done", 2), done.error
    notes = [event.data.get("message", "") for event in queue.db.events(task=name, limit=10_000)]
    assert any("resumed after epoch" in note for note in notes)
    assert same(queue.history(name), expected)


def test_a_rank_that_is_killed_while_it_starts_costs_an_attempt_and_not_the_task(queue):
    name, ranks = submit(queue, {"epochs": 20, "seed": 4}), []
    while not ranks:
        queue.until(lambda: worker_of(queue, name) is not None)
        ranks = rank_pids(worker_of(queue, name).pid)
    os.kill(ranks[0], signal.SIGKILL)
    [done] = queue.wait([name], 120)
    assert (done.state, done.attempts) == ("done", 2), done.error
    errors = [event.data["error"] for event in queue.db.events(task=name, limit=10_000) if "error" in event.data]
    assert errors == ["rank 1 of 2 was killed before it had started (signal 9)"]


def test_the_memory_of_all_ranks_is_measured(queue):
    name = submit(queue, {"epochs": 100_000, "seed": 41})
    [rank] = wait_for_checkpoint(queue, name)[1]
    resident = int(Path(f"/proc/{rank}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    queue.until(lambda: [one["held"] for one in queue.supervisor.view["running"]] > [0.9 * resident])
    queue.db.cancel(name)
    queue.supervisor.wake()
    queue.wait([name])


def test_cancelling_ends_all_ranks(queue):
    name = submit(queue, {**LONG, "epochs": 100_000})
    _, ranks = wait_for_checkpoint(queue, name)
    queue.db.cancel(name)
    queue.supervisor.wake()
    queue.until(lambda: not any(map(is_alive, ranks)) and worker_of(queue, name) is None)
    assert queue.db.get(name).state == "cancelled"
    [after] = queue.wait(queue.submit({"seed": 9}))
    assert after.state == "done"


def test_a_paused_task_has_no_ranks_and_goes_on_to_the_same_numbers(queue, expected):
    name = submit(queue, LONG)
    _, ranks = wait_for_checkpoint(queue, name)
    queue.db.pause(name)
    queue.supervisor.wake()
    queue.until(lambda: not any(map(is_alive, ranks)) and worker_of(queue, name) is None)
    assert queue.db.get(name).state == "paused"
    queue.db.resume(name)
    queue.supervisor.wake()
    [done] = queue.wait([name], 120)
    assert done.state == "done", done.error
    assert same(queue.history(name), expected)


def test_something_urgent_preempts_all_ranks(queue):
    name = submit(queue, {**LONG, "epochs": 100_000})
    _, ranks = wait_for_checkpoint(queue, name)
    [urgent] = queue.wait(queue.submit({"model": "gin", "seed": 3}, priority=5))
    assert urgent.state == "done"
    assert not any(map(is_alive, ranks))
    before = queue.epoch(name)
    queue.until(lambda: queue.epoch(name) > before)
    assert queue.db.get(name).attempts == 2
    queue.db.cancel(name)
    queue.supervisor.wake()
    queue.until(lambda: worker_of(queue, name) is None)


def test_small_tasks_that_keep_arriving_do_not_starve_it(queue):
    """There are always some that wait, and the sharded task is done long before the last of them."""
    begin, small = time.monotonic(), []
    wide = submit(queue, {"epochs": 5})
    while queue.db.get(wide).state not in ENDED:
        assert time.monotonic() < begin + 120, queue.told()
        waiting = [one for one in small if queue.db.get(one).state not in ENDED]
        if len(waiting) < 6:
            small += queue.submit(*({"layers": 1 + layers, "seed": len(small), "epochs": 20} for layers in range(4)))
        time.sleep(0.05)
    assert queue.db.get(wide).state == "done"
    assert {task.state for task in queue.wait(small, 120)} == {"done"}


def test_ranks_that_do_not_fit_are_refused_in_a_sentence(queue):
    [task] = queue.wait([submit(queue, {"hidden": 20_000, "layers": 3}, ranks=40)])
    assert task.state == "failed"
    assert "its 40 ranks need" in task.error
    assert "give it fewer ranks, or raise the budget" in task.error


def test_a_killed_server_leaves_no_rank_and_the_next_one_goes_on(tmp_path):
    server = ServeProcess(tmp_path, "--no-auth", "--checkpoint-seconds", "0.1", "--workers", "2").start()
    try:
        client, task = weft.Client(server.url), weft.Task(**{**TASK, **LONG})
        [wide] = client.submit(task, ranks=2)
        ranks = ranks_below(server, wide["id"])
        server.kill()
        end = time.monotonic() + 30
        while any(map(is_alive, ranks)):
            assert time.monotonic() < end, "a rank is left over"
            time.sleep(0.05)
        server.start()
        [done] = client.wait([wide], 180)
        assert done["state"] == "done"
        assert same(client.result(wide["id"])["history"], over_ranks(task))
        with DirectQueue(server.db) as found:
            assert problems(found) == []
    finally:
        assert server.stop() == 0


def ranks_below(server, name) -> list[int]:
    """The ranks of a task that has saved a checkpoint, wherever they are below the server."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        with DirectQueue(server.db) as found:
            saved = any(event.kind == "checkpoint" for event in found.events(task=name, limit=10_000))
        below = [server.process.pid]
        for pid in below:  # grows
            below += children(pid)
        ranks = [rank for pid in below for rank in rank_pids(pid)]
        if saved and ranks:
            return ranks
        time.sleep(0.05)
    raise AssertionError((server.folder / "serve.log").read_text())
