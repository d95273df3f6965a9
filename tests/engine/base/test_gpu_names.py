"""Names of GPUs from the driver's own library, where its files are not there."""

from __future__ import annotations

import ctypes

import pytest

from weft.engine.base import home


class Driver:
    """A driver's library with two GPUs; ``broken`` is a function that fails."""

    def __init__(self, broken=""):
        self._broken = broken

    def __getattr__(self, name):
        def answer(*arguments):
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = 2
            if name == "nvmlDeviceGetName":
                arguments[1].value = b"NVIDIA H200"
            return 3 if name == self._broken else 0

        return answer


@pytest.mark.parametrize("broken", ["", "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_names_by_the_drivers_library(monkeypatch, broken):
    monkeypatch.setattr(home, "_names_in_proc", list)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(broken))
    assert home.gpu_names() == ([] if broken else ["NVIDIA H200"] * 2)


def test_without_the_library_there_is_none(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(home, "_names_in_proc", list)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert home.gpu_names() == []
