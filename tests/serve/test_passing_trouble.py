"""Trouble that passes does not end the server: reads that fail, too many open files, workers that cannot be started."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.serve.scheduler_bench import PLAN, Bench, FakeWorker
from tests.serve.serving import opened
from weft.core.errors import WeftError
from weft.serve import worker_pool
from weft.serve.groups import GroupEndings
from weft.serve.options import ServeOptions
from weft.serve.planner import LOADING_SECONDS, PLANNING_SECONDS, TaskPlanner
from weft.serve.queue_db import Submission
from weft.serve.retention import CHECKPOINT, drop_checkpoints
from weft.serve.state import stamps_of
from weft.serve.supervisor import Supervisor
from weft.serve.worker_pool import PLANNER, NoWorkersError, WorkerOptions, WorkerPool, WorkerProcess

pytestmark = pytest.mark.timeout(180)
FULL = "the queue could not be written (database or disk is full); nothing was changed"


def fails_once(thing, name, error) -> list:
    """Let a method raise ``error`` the first time; a list that is filled when it has."""
    plain, raised = getattr(thing, name), []

    def method(*given, **more):
        if not raised:
            raised.append(given)
            raise error
        return plain(*given, **more)

    setattr(thing, name, method)
    return raised


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("stamps", sqlite3.OperationalError("disk I/O error")),
        ("get", OSError(24, "Too many open files")),
        ("in_turn", sqlite3.DatabaseError("file is locked by another")),
    ],
)
def test_a_read_that_fails_is_tried_again(tmp_path, capsys, method, error):
    with opened(tmp_path) as queue:
        queue.wait(queue.submit({"epochs": 5}))
        raised = fails_once(queue.supervisor.state.db, method, error)
        [task] = queue.wait(queue.submit({"epochs": 5, "seed": 3}))
        assert raised
        assert (task.state, task.attempts) == ("done", 1)
    assert "; trying again" in capsys.readouterr().err


def test_one_worker_that_cannot_be_started_holds_up_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "START_AGAIN_SECONDS", 0.05)
    with opened(tmp_path, workers=2) as queue:
        queue.wait(queue.submit({"epochs": 5}))
        pool = queue.supervisor.pool
        queue.until(lambda: all(worker.idle for worker in pool.workers.values()))
        spawner, tries = pool._spawner, []

        def full(*_given):
            tries.append(len(os.listdir("/proc/self/fd")))
            raise WeftError("no worker could be started")

        monkeypatch.setattr(spawner, "fork", full)
        os.kill(pool.workers["cpu/1"].pid, signal.SIGKILL)
        queue.until(lambda: len(tries) > 2)
        assert not pool.workers["cpu/1"].idle
        [task] = queue.wait(queue.submit({"epochs": 5, "seed": 3}))
        assert task.state == "done"
        queue.until(lambda: len(tries) > 20)
        assert tries[20] <= tries[0] + 2  # nothing stays open
        monkeypatch.undo()
        queue.until(lambda: pool.workers["cpu/1"].idle)


def test_a_worker_that_cannot_be_started_leaves_no_files_open():
    class Spawner:
        def fork(self, *_given):
            raise OSError(12, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="memory"):
            WorkerProcess("cpu/0", "cpu", None, Spawner(), WorkerOptions())
    assert len(os.listdir("/proc/self/fd")) == before


def ending(bench: Bench) -> tuple[GroupEndings, str]:
    [name] = bench.planned()
    bench.scheduler.schedule()
    return GroupEndings(bench.state, bench.pool), name


def end_twice(bench: Bench, endings: GroupEndings, message) -> None:
    """The first time there is no room to write that the attempt failed."""
    [active] = bench.state.active.values()
    active.worker.kill = lambda _reason: None
    fails_once(bench.db, "fail", WeftError(FULL))
    with pytest.raises(WeftError):
        endings.done(active.worker, {"group": active.group.id, **message})
    endings.write_left()


def test_a_second_try_after_memory_ran_out_is_not_lost_on_a_full_disk(tmp_path):
    bench = Bench(tmp_path)
    endings, name = ending(bench)
    end_twice(bench, endings, {"error": "ran out of memory", "kind": "memory", "leftover": 0})
    task = bench.db.get(name)
    assert (task.state, task.plan["memory_errors"]) == ("queued", 1)
    assert bench.state.counters["memory_errors"] == 1


def test_a_second_try_after_a_device_broke_is_not_lost_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(WorkerPool, "shares_faults", property(lambda _pool: True))
    bench = Bench(tmp_path)
    endings, name = ending(bench)
    end_twice(bench, endings, {"error": "CUDA error: an illegal address", "kind": "failed", "leftover": None})
    assert bench.db.get(name).state == "queued"


def test_a_paused_member_knows_where_it_goes_on_from(tmp_path):
    """The attempt is no longer its worker's, and what is known of the task is written all the same."""
    bench = Bench(tmp_path)
    endings, name = ending(bench)
    [active] = bench.state.active.values()
    bench.db.pause(name)
    endings.worker_gone(active.worker, "its worker ended")
    assert bench.db.get(name).state == "paused"
    assert bench.db.get(name).plan["failures"] == 1


def test_a_result_that_waited_for_longer_than_its_lease_is_written(tmp_path):
    with opened(tmp_path, lease_seconds=1.0) as queue:
        queue.wait(queue.submit({"epochs": 5}))
        db, full = queue.supervisor.state.db, [True]
        plain = db.finish

        def finish(*given):
            if full[0]:
                raise WeftError(FULL)
            return plain(*given)

        db.finish = finish
        [name] = queue.submit({"seed": 7, "epochs": 20})
        queue.until(lambda: bool(queue.supervisor._endings._unwritten))
        time.sleep(1.5)
        queue.supervisor.wake()  # asks for a heartbeat, as a submission does
        full[0] = False
        [task] = queue.wait([name])
        assert (task.state, task.attempts) == ("done", 1)


def test_events_that_found_no_room_are_written_later(tmp_path):
    bench = Bench(tmp_path)
    [name] = bench.planned()
    bench.state.records = [(name, "note", {"message": "first"})]
    fails_once(bench.db, "record", WeftError(FULL))
    with pytest.raises(WeftError):
        bench.state.write_records()
    bench.state.records.append((name, "note", {"message": "second"}))
    bench.state.write_records()
    assert bench.notes(name) == "first second"
    assert not bench.state.records


def test_that_no_worker_starts_is_told_also_where_nothing_can_be_written(tmp_path):
    supervisor = Supervisor(ServeOptions(tmp_path / "queue.db", devices=("cpu",)))
    worker = supervisor.pool.workers["cpu/0"] = FakeWorker("cpu/0", "cpu")
    fails_once(supervisor._endings, "worker_gone", WeftError(FULL))
    fails_once(supervisor.pool, "replace", NoWorkersError("worker 'cpu/0' ended 5 times"))
    with pytest.raises(NoWorkersError):
        supervisor._gone(worker, {"code": 1})


def test_the_planner_is_not_told_to_fetch_graphs_of_groups(tmp_path):
    bench = Bench(tmp_path)
    planner = bench.pool.workers[PLANNER] = FakeWorker(PLANNER, "cpu")
    bench.planned(3, graph_path="g")
    bench.scheduler.schedule()
    planner.group = "a task that is planned"
    bench.scheduler.schedule()
    assert bench.pool.workers["cpu/0"].sent[-1]["do"] == "prefetch"
    assert planner.sent == []


def test_a_graph_that_is_downloaded_takes_its_time(tmp_path):
    bench = Bench(tmp_path)
    planner = bench.pool.workers[PLANNER] = FakeWorker(PLANNER, "cpu")
    killed: list[str] = []
    planner.kill = killed.append
    planning = TaskPlanner(bench.state, bench.pool)
    for loads, seconds, error in (
        (False, PLANNING_SECONDS, "planning it took longer than 300 s: its model made no progress"),
        (True, LOADING_SECONDS, "loading its graph took longer than 3600 s"),
    ):
        [task] = bench.db.submit_many([Submission({"task": {"graph": "demo", "model": "gcn"}})])
        planner.group = ""
        planning.plan_queued()
        planning.loading(planner, {"id": task.id, "begins": True})
        before = len(killed)
        planning.end_stuck(time.monotonic() + PLANNING_SECONDS + 1)
        assert len(killed) == before
        planning.loading(planner, {"id": task.id, "begins": loads})
        planning.end_stuck(time.monotonic() + seconds + 1)
        assert len(killed) == before + 1
        planning.planner_gone(planner, "")
        assert bench.db.get(task.id).error == error


def test_a_folder_that_cannot_be_read_keeps_its_checkpoints(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    group, names = bench.preempted()
    for name in names:
        bench.db.cancel(name)
    folder = tmp_path / "runs" / group.folder
    folder.mkdir(parents=True)
    (folder / CHECKPOINT).write_bytes(b"")

    def unreadable(_path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", unreadable)
        drop_checkpoints(bench.db, tmp_path / "runs", group)
    assert (folder / CHECKPOINT).exists()
    drop_checkpoints(bench.db, tmp_path / "runs", group)
    assert not (folder / CHECKPOINT).exists()


def test_a_task_that_goes_on_with_another_graph_says_so_once(tmp_path):
    bench = Bench(tmp_path)
    file = tmp_path / "graph.npz"
    file.write_bytes(b"old")
    [name] = bench.planned(plan={**PLAN, "files": stamps_of([str(file)])})
    bench.scheduler.schedule()
    bench.db.release(name, "preempted")
    file.write_bytes(b"another")
    bench.pool.workers[PLANNER] = FakeWorker(PLANNER, "cpu")
    planning = TaskPlanner(bench.state, bench.pool)
    for _ in range(3):
        planning.plan_queued()
    bench.state.write_records()
    assert bench.notes(name).count("goes on from its checkpoint with what is there now") == 1
