"""The first run of a process on a GPU starts it in a thread; on a CPU nothing is started."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from weft.engine.training import device_start
from weft.engine.training.device_start import DeviceStart
from weft.runtime.device.first_operators import load_operators


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not imported Triton, and the names of the modules that it then imports."""
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    imported = []
    monkeypatch.setattr(device_start, "import_module", imported.append)
    monkeypatch.setattr(device_start, "have_triton", lambda: True)
    return imported


def test_a_gpu_starts_beside_the_import(fresh, monkeypatch):
    goes_on, called = threading.Event(), []

    def load(device):
        assert goes_on.wait(10)
        called.append(device)

    monkeypatch.setattr(device_start, "load_operators", load)
    start = DeviceStart(torch.device("cuda", 1))
    assert fresh == ["triton"]
    assert called == []
    goes_on.set()
    start.wait()
    assert called == [torch.device("cuda", 1)]
    start.wait()


def test_an_error_is_left_to_the_run(fresh, monkeypatch):
    def load(device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(device_start, "load_operators", load)
    DeviceStart(torch.device("cuda", 7)).wait()


def test_a_cpu_starts_nothing(fresh):
    DeviceStart(torch.device("cpu")).wait()
    assert fresh == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_operators_leave_nothing_behind():
    device = torch.device("cuda", 0)
    load_operators(device)
    before = torch.cuda.memory_allocated(device)
    load_operators(device)
    assert torch.cuda.memory_allocated(device) == before
