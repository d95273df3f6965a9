"""Read a GPU's utilisation and memory from the driver's own library, without a package for it."""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NVML:
    """One GPU by its index, as ``nvidia-smi`` shows it; an OSError if the driver does not answer."""

    def __init__(self, index: int, library: Any = None) -> None:
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} answered {code}")

    def busy(self) -> float:
        """The share of the driver's last sampling period in which a kernel ran."""
        found = _Utilisation()
        self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(found))
        return found.gpu / 100

    def used_bytes(self) -> int:
        """Bytes that all processes have taken."""
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(found))
        return int(found.used)
