"""The planner is shown no GPU by CUDA, and estimates for the server's."""

from __future__ import annotations

import pytest
import torch

from weft.core import gpus
from weft.engine.home import machine_name
from weft.serve import worker_pool
from weft.serve.estimates import machine_of
from weft.serve.options import ServeOptions
from weft.serve.state import SupervisorState
from weft.serve.worker_pool import PLANNER, WorkerPool


@pytest.mark.parametrize(("chosen", "name"), [(None, "NVIDIA A100-SXM4-80GB"), ("1", "NVIDIA H200")])
def test_estimates_are_for_the_first_gpu_that_cuda_shows_the_server(tmp_path, monkeypatch, chosen, name):
    started = {}

    def start(called, device, inbox, spawner, options):
        started[called] = device, dict(options.environment)

    there = [gpus.Gpu("NVIDIA A100-SXM4-80GB", "GPU-1"), gpus.Gpu("NVIDIA H200", "GPU-2")]
    monkeypatch.setattr(gpus, "_in_files", lambda: there)
    monkeypatch.setattr(worker_pool, "WorkerProcess", start)
    monkeypatch.setattr(worker_pool.Spawner, "ready", lambda self: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(gpus.VISIBLE, chosen)
    pool = WorkerPool(SupervisorState(ServeOptions(tmp_path / "q.db", mps=False)))
    pool.start_all()
    assert list(started) == [PLANNER, *(f"cuda:{place}/0" for place in range(2 if chosen is None else 1))]
    device, environment = started[PLANNER]
    assert (device, environment[gpus.VISIBLE]) == ("cpu", "")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert machine_of("cuda:0").name == machine_name(name)
