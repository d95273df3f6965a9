"""NVIDIA's multi-process service: started for the workers of a server where it is available, and stopped after them.

With it kernels of several worker processes share a GPU; without it they take turns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0


class MPS:
    """The service for ``devices``, with its files in ``folder``; does nothing where it is not installed."""

    def __init__(self, devices: Sequence[str], workers: int, folder: Path) -> None:
        self._folder = folder / "mps"
        self._wanted = workers > 1 and any(name.startswith("cuda") for name in devices)
        self._running = False

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that make a worker use it."""
        if not self._running:
            return {}
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._folder), "CUDA_MPS_LOG_DIRECTORY": str(self._folder)}

    def start(self) -> bool:
        """Start it if it is of use here; whether it runs."""
        control = shutil.which(CONTROL)
        if not self._wanted or control is None:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        self._running = True
        try:
            done = subprocess.run(
                [control, "-d"], env={**os.environ, **self.environment}, timeout=SECONDS, capture_output=True
            )
            self._running = done.returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            self._running = False
        return self._running

    def stop(self) -> None:
        """Stop it if it was started here."""
        if not self._running:
            return
        environment, self._running = {**os.environ, **self.environment}, False
        try:
            subprocess.run(
                [CONTROL], input=b"quit\n", env=environment, timeout=SECONDS, capture_output=True, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
