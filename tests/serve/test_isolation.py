"""What one user's task does to logs, files and processes of the server costs no other task anything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.serve.serving import FAULTY, TASK, opened
from tests.serve.test_supervisor import own, submit_own
from weft.serve import worker_pool
from weft.serve.submissions import BadRequestError, Registry


def test_a_model_that_prints_without_end_leaves_a_bounded_log(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_LOG_BYTES", 1 << 20)
    with opened(tmp_path) as queue:
        [name] = submit_own(queue, {"model": f"{FAULTY}:Prints", "graph": "demo", "epochs": 2})
        log = queue.options.runs / name / "log.txt"
        queue.until(lambda: log.exists() and b"what came after was dropped" in log.read_bytes())
        assert queue.db.get(name).state == "running"
        (tmp_path / "go").touch()
        [done] = queue.wait([name])
        assert done.state == "done", done.error
        assert log.stat().st_size < (1 << 20) + 200


def test_the_log_of_all_workers_begins_anew_when_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_LOG_BYTES", 1 << 20)
    with opened(tmp_path) as queue:
        queue.until(lambda: queue.supervisor.pool.any_idle())
        log = queue.options.runs / "workers.log"
        with open(log, "ab") as file:
            file.write(b"x" * (2 << 20))
        queue.until(lambda: b"what was here before was dropped" in log.read_bytes())
        assert log.stat().st_size < 1000


def kill_spawner(queue) -> None:
    """Kill the process that starts workers; return when there is another."""
    spawner = queue.supervisor.pool._spawner
    killed = spawner._process.pid
    os.kill(killed, signal.SIGKILL)
    queue.until(lambda: (now := spawner._process) is not None and now.pid != killed and spawner.ready())


def starts_of(queue, name: str) -> int:
    """How often a task was started."""
    return sum(event.kind == "running" for event in queue.db.events(task=name, limit=10_000))


@pytest.mark.rest
def test_users_code_runs_on_when_one_spawner_is_killed_and_not_when_two_are(tmp_path):
    """Its model may be the cause, and without a spawner nobody's worker can be started."""
    with opened(tmp_path, workers=2) as queue:
        [others] = queue.submit({"epochs": 6_000}, user="ann", max_attempts=1)
        [own_code] = submit_own(queue, own("Counts", epochs=6_000), user="bob", max_attempts=2)
        queue.until(lambda: queue.epoch(own_code) > 0 and queue.epoch(others) > 0)
        kill_spawner(queue)
        assert starts_of(queue, own_code) == 1
        kill_spawner(queue)
        done = queue.wait([others, own_code])
        assert [task.state for task in done] == ["done", "done"], [task.error for task in done]
        assert [starts_of(queue, name) for name in (others, own_code)] == [1, 2]
        assert [task.attempts for task in done] == [1, 2]


@pytest.mark.rest
def test_a_group_goes_on_where_it_was_after_the_spawner_was_killed(tmp_path):
    """So do tasks that come later, in a process that a new spawner has started."""
    with opened(tmp_path) as queue:
        names = queue.submit({"epochs": 900}, {"epochs": 900, "seed": 1}, max_attempts=1)
        queue.until(lambda: all(queue.epoch(name) > 0 for name in names))
        worker = queue.worker_pid()
        kill_spawner(queue)
        assert [task.state for task in queue.wait(names)] == ["done", "done"]
        assert len(queue.db.groups()) == 1
        assert starts_of(queue, names[0]) == 1
        queue.until(lambda: queue.worker_pid() not in (worker, 0))
        assert [task.state for task in queue.wait(queue.submit({"seed": 2}))] == ["done"]
        status = Path(f"/proc/{worker}/status")
        assert not status.exists() or "(zombie)" in status.read_text()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_fifo_is_no_graph(tmp_path, kind):
    place = tmp_path / "g.npz"
    if kind == "folder":
        place.mkdir()
    os.mkfifo(place / "edges.npy" if kind == "folder" else place)
    with pytest.raises(BadRequestError, match="is not a file, or a folder of files, in the graphs folder"):
        Registry(graphs=tmp_path).graph_path("g.npz")


def test_a_cancelled_model_that_hangs_in_c_frees_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "CANCELLED_SECONDS", 0.2)
    with opened(tmp_path, hang_seconds=3600.0) as queue:
        [bad] = submit_own(queue, own("HangsInC"))
        queue.until(lambda: (tmp_path / "hangs").exists())
        queue.db.cancel(bad)
        queue.supervisor.wake()
        assert [task.state for task in queue.wait(queue.submit({**TASK, "seed": 1}), 30.0)] == ["done"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["FillsSharedMemory", "FillsMemoryOfChildren", "FillsUnnamedMemory"])
def test_memory_that_no_limit_on_a_process_counts_is_counted(tmp_path, model):
    """Up to 3 GiB in shared segments, a child or a file of memory, where a task may have 600 MiB and what it needs."""
    with opened(tmp_path, workers=2) as queue:
        [bad] = submit_own(queue, own(model, epochs=1), user="anna")
        queue.until(lambda: queue.db.get(bad).state == "running")
        good = queue.submit({"epochs": 300}, user="ben")
        [failed, done] = queue.wait([bad, *good])
        assert (failed.state, done.state, done.attempts) == ("failed", "done", 1)
        assert failed.error.startswith("out of memory: held ")
        assert queue.supervisor.state.counters["memory_errors"] == 2
        assert not list(Path("/dev/shm").glob(f"weft-*-{queue.worker_pid()}-*"))


def test_shared_memory_that_a_killed_worker_has_left_is_removed(tmp_path):
    with opened(tmp_path) as queue:
        [failed] = queue.wait(submit_own(queue, own("LeavesSharedMemory"), max_attempts=1))
        segment = Path("/dev/shm", (tmp_path / "segment").read_text())
        assert "SIGKILL" in failed.error
        queue.until(lambda: not segment.exists())


@pytest.mark.parametrize("model", ["StopsItsParent", "AsksItsParentToEnd"])
def test_a_model_that_disturbs_the_process_that_starts_workers_costs_others_nothing(tmp_path, model):
    with opened(tmp_path) as queue:
        [bad] = queue.wait(submit_own(queue, own(model), user="anna"), 30.0)
        [done] = queue.wait(queue.submit({"seed": 1}, user="ben"), 10.0)
        assert (bad.state, done.state, done.attempts) == ("done", "done", 1)
