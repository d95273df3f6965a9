"""Sample a GPU's utilisation and memory through NVML, as ``nvidia-smi`` shows them, while something runs.

Utilisation is the share of the driver's sampling period (a sixth of a second or so) in which at least one kernel ran;
it does not say how many multiprocessors a kernel fills. Memory is that of all processes on the device.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from statistics import fmean
from types import TracebackType

from benchmarks.queue_runs.nvml import NVML

SECONDS = 0.05


class DeviceSampler:
    """Samples while entered; without NVML it finds nothing, and its figures are None."""

    def __init__(self, index: int | None) -> None:
        self._gpu = _gpu(index)
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
        return 0 if self._gpu is None else self._gpu.used_bytes()

    def _sample(self) -> None:
        while self._gpu is not None and not self._end.wait(SECONDS):
            with suppress(OSError):  # one sample less
                self.samples.append((time.time(), self._gpu.busy(), self._memory()))

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


def _gpu(index: int | None) -> NVML | None:
    """The GPU of that index; None without one, or where the driver does not answer."""
    if index is None:
        return None
    try:
        found = NVML(index)
        found.busy(), found.used_bytes()
    except (OSError, AttributeError):
        return None
    return found
