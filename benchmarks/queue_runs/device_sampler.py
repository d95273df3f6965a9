"""Sample a GPU's utilisation and memory through NVML, as ``nvidia-smi`` shows them, while something runs.

Utilisation is the share of the driver's sampling period (a sixth of a second or so) in which at least one kernel ran;
it does not say how many multiprocessors a kernel fills. Memory is that of all processes on the device.
"""

from __future__ import annotations

import threading
import time
from statistics import fmean
from types import TracebackType
from typing import Any

SECONDS = 0.05


class DeviceSampler:
    """Samples while entered; without NVML it finds nothing, and its figures are None."""

    def __init__(self, index: int | None) -> None:
        self._handle, self._nvml = _handle(index)
        self._before = self._memory()
        self.samples: list[tuple[float, float, int]] = []  # time, share busy, bytes above those at the start
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceSampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _memory(self) -> int:
        return 0 if self._handle is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _sample(self) -> None:
        while self._handle is not None and not self._end.wait(SECONDS):
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
            self.samples.append((time.time(), busy, self._memory()))

    def figures(self, begin: float, end: float, idle_bytes: int = 0) -> dict[str, float | None]:
        """Mean utilisation between two times, and the most bytes taken beyond ``idle_bytes``."""
        inside = [sample for sample in self.samples if begin <= sample[0] <= end]
        if not inside:
            return {"utilisation": None, "device_peak_bytes": None}
        peak = max(sample[2] for sample in inside) - idle_bytes
        return {"utilisation": fmean(sample[1] for sample in inside), "device_peak_bytes": peak}

    @property
    def bytes_before(self) -> int:
        """Bytes that were taken on the device when this was made."""
        return self._before


def _handle(index: int | None) -> tuple[Any, Any]:
    if index is None:
        return None, None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(index), pynvml
    except Exception:  # not installed, or no driver
        return None, None
