"""NVIDIA's Multi-Process Service for the time of one measurement: own folders, own daemon, ended by its own control."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0  # for the daemon to start, and to end


def available() -> bool:
    """Whether the control program is installed."""
    return shutil.which(CONTROL) is not None


@contextmanager
def service() -> Iterator[dict[str, str]]:
    """A running daemon; gives the environment that its clients need."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        env = dict(os.environ)
        for name, part in (("CUDA_MPS_PIPE_DIRECTORY", "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log")):
            place = Path(folder) / part
            place.mkdir()
            env[name] = str(place)
        started = subprocess.run([CONTROL, "-d"], env=env, capture_output=True, text=True, timeout=SECONDS)
        if started.returncode:
            raise RuntimeError(f"{CONTROL} -d failed: {(started.stderr or started.stdout).strip()}")
        try:
            yield env
        finally:
            with suppress(subprocess.TimeoutExpired):  # what was measured is worth more than a tidy end
                subprocess.run([CONTROL], input="quit\n", env=env, capture_output=True, text=True, timeout=SECONDS)
