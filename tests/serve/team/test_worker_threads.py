"""Workers of a host share its cores."""

from __future__ import annotations

import os

import pytest
import torch

from weft.sched.policies import Backfill
from weft.sched.queue_state import DeviceState, MachineState, RunningGroup
from weft.serve import worker_pool
from weft.serve.options import ServeOptions
from weft.serve.queue_db import QueueTask
from weft.serve.spawner import _use_threads
from weft.serve.state import SupervisorState, queued_task
from weft.serve.worker_pool import WorkerPool, threads_each


@pytest.fixture
def threads(monkeypatch):
    """An environment that says nothing of threads; torch's are as before afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield monkeypatch
    torch.set_num_threads(before)
    os.environ.pop("OMP_NUM_THREADS", None)


def test_cores_are_divided_and_every_worker_has_one():
    assert [threads_each(16, workers) for workers in (1, 2, 3, 16, 40)] == [16, 8, 5, 1, 1]


def test_the_pool_asks_for_a_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "cpu_count", lambda: 16)
    options = ServeOptions(tmp_path / "queue.db", devices=("cuda:0", "cuda:1"), workers=3)
    assert WorkerPool(SupervisorState(options))._spawner._threads == 2


def test_workers_of_a_cpu_that_share_its_cores_leave_each_other_room(tmp_path, threads):
    threads.setattr(worker_pool, "cpu_count", lambda: 8)
    pool = WorkerPool(SupervisorState(ServeOptions(tmp_path / "queue.db", devices=("cpu",), workers=2)))
    assert pool.share_of("cpu") == 0.5
    assert pool.share_of("cuda:0") == pool.share_of("cpu@node") == 1.0
    threads.setenv("OMP_NUM_THREADS", "8")
    assert pool.share_of("cpu") == 1.0
    task = QueueTask("t", 1, "planned", {"task": {}}, plan={"bytes": 1, "seconds": 60.0})
    threads.setenv("OMP_NUM_THREADS", "4")
    view = queued_task(task, 0.1, pool.share_of("cpu"))
    running = RunningGroup("g", "cpu", ("x",), 1, view.utilisation, 0.0, 60.0, start_seconds=0.1)
    machine = MachineState((DeviceState("cpu", 100, workers=2),), 1.0)
    assert Backfill().schedule([view], [running], machine).started == ("t",)


def test_a_worker_computes_with_its_share(threads):
    _use_threads(3, "cpu")
    assert torch.get_num_threads() == 3
    _use_threads(5, "cuda:0")
    assert os.environ["OMP_NUM_THREADS"] == "5", "what the program that works on a GPU reads"


def test_the_environment_has_the_last_word(threads):
    threads.setenv("OMP_NUM_THREADS", "2")
    _use_threads(5, "cuda:0")
    assert os.environ["OMP_NUM_THREADS"] == "2"
