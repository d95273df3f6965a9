"""The first run of a process on a GPU starts it beside an import; on a CPU nothing is started."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from weft.engine import process_state as device_start
from weft.engine.process_state import start_device


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not imported Triton, and the names of the modules that it then imports."""
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    imported = []
    monkeypatch.setattr(device_start, "import_module", imported.append)
    monkeypatch.setattr(device_start, "have_triton", lambda: True)
    return imported


def test_a_gpu_starts_beside_the_import(fresh, monkeypatch):
    goes_on, called, ended = threading.Event(), [], threading.Event()

    def synchronize(device):
        assert goes_on.wait(10)
        called.append(device)
        ended.set()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    start_device(torch.device("cuda", 1))
    assert (fresh, called) == (["triton"], [])
    goes_on.set()
    assert ended.wait(10)
    assert called == [torch.device("cuda", 1)]


def test_an_error_is_left_to_the_run(fresh, monkeypatch):
    ended = threading.Event()

    def synchronize(device):
        ended.set()
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    start_device(torch.device("cuda", 7))
    assert ended.wait(10)


def test_a_cpu_starts_nothing(fresh):
    start_device(torch.device("cpu"))
    assert fresh == []
