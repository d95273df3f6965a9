"""GPUs that a process sees, from the driver's files or its library, without CUDA."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from weft.core import gpus

NAMES = ["NVIDIA A100", "NVIDIA H100", "NVIDIA H200"]


class Driver:
    """A driver's library with two GPUs; ``broken`` is a function that fails."""

    def __init__(self, broken="", processes=()):
        self._broken, self.processes = broken, processes

    def __getattr__(self, name):
        def answer(*arguments):
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = 2
            if name == "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = arguments[0].value + 1
            if name == "nvmlDeviceGetName":
                arguments[1].value = b"NVIDIA H200"
            if name == "nvmlDeviceGetUUID":
                arguments[1].value = f"GPU-{arguments[0].value}".encode()
            if name == "nvmlDeviceGetComputeRunningProcesses_v3":
                for process, (pid, size) in zip(arguments[2], self.processes, strict=False):
                    process.pid, process.bytes = pid, size
                arguments[1]._obj.value = len(self.processes)
            return 3 if name == self._broken else 0

        return answer


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch, tmp_path):
    """A host without the driver's files, and no choice of GPUs."""
    for name in (gpus.VISIBLE, gpus.KNOWN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "FILES", tmp_path)


@pytest.fixture
def files(tmp_path):
    """Files of three GPUs; the last one is not in use and has no UUID."""
    for place, (name, uuid) in enumerate(zip(NAMES, ("GPU-a1", "GPU-b2", "GPU-????????"), strict=True)):
        card = tmp_path / f"0000:{place}7:00.0"
        card.mkdir()
        about = f"Model: \t\t {name}\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        (card / "information").write_text(about, encoding="utf-8")


@pytest.mark.parametrize("broken", ["", "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_names_by_the_drivers_library(monkeypatch, broken):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(broken))
    assert gpus.gpu_names() == ([] if broken else ["NVIDIA H200"] * 2)


def test_without_the_library_there_is_none(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.gpu_names() == []


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("chosen", "names"), [("", []), ("2", NAMES[2:]), ("1,0", NAMES[1::-1]), ("0,7,1", NAMES[:1])])
def test_those_that_cuda_shows(monkeypatch, chosen, names):
    assert gpus.gpu_names() == NAMES
    monkeypatch.setenv(gpus.VISIBLE, chosen)
    assert gpus.gpu_names() == names


@pytest.mark.usefixtures("files")
def test_uuids_that_the_files_lack_are_asked_of_the_library(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setenv(gpus.VISIBLE, "GPU-2")
    assert gpus.gpu_names() == ["NVIDIA H200"]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver("nvmlInit_v2"))
    monkeypatch.setenv(gpus.VISIBLE, "GPU-b2")
    assert gpus.gpu_names() == ["NVIDIA H100"]


@pytest.mark.parametrize("broken", ["", "nvmlDeviceGetUUID"])
def test_uuids_by_the_drivers_library(monkeypatch, broken):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(broken))
    monkeypatch.setenv(gpus.VISIBLE, "GPU-2,GPU-1")
    assert gpus.gpu_names() == ([] if broken else ["NVIDIA H200"] * 2)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("chosen", "names"), [(None, NAMES), ("2,1", NAMES[:0:-1]), ("", [])])
def test_a_process_that_cuda_shows_none_still_knows_of_them(monkeypatch, chosen, names):
    if chosen is not None:
        monkeypatch.setenv(gpus.VISIBLE, chosen)
    for name, value in gpus.without_gpus().items():
        monkeypatch.setenv(name, value)
    assert gpus.VISIBLE in gpus.without_gpus()
    assert gpus.gpu_names() == names


def test_bytes_of_a_process_by_the_drivers_library(monkeypatch):
    processes = [(1, 5 << 30), (os.getpid(), 7 << 20), (9, gpus.NOT_AVAILABLE)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(processes=processes))
    assert gpus.process_bytes("GPU-2") == 7 << 20
    assert gpus.process_bytes("GPU-2", pid=1) == 5 << 30
    assert gpus.process_bytes("GPU-2", pid=9) is None
    assert gpus.process_bytes("GPU-2", pid=4) is None
    assert gpus.process_bytes("GPU-3") is None
    for broken in ("nvmlInit_v2", "nvmlDeviceGetComputeRunningProcesses_v3"):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, broken=broken: Driver(broken, processes))
        assert gpus.process_bytes("GPU-2") is None


def test_torch_is_not_imported():
    code = "import sys; from weft.core.gpus import gpu_names; gpu_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": "src"}).returncode == 0
