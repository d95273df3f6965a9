"""NVIDIA's multi-process service: started for the workers of a server where it is available, and stopped after them.

With it kernels of several worker processes share a GPU; without it they take turns. Clients of one service share a
context on the device: a kernel that faults ends all of them, and they are replaced like any lost worker. The service
numbers the GPUs that it was shown from 0, and so must its clients.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from weft.core.gpus import renumbered

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0


class MPS:
    """The service for ``devices`` with several workers; does nothing where it is not installed or of no use.

    Its pipes are in a folder of their own under the system's temporary folder: a socket's path has at most 107
    characters, which the folder of a queue may exceed.
    """

    def __init__(self, devices: Sequence[str], workers: int, wanted: bool = True) -> None:
        self._wanted = wanted and workers > 1 and any(name.startswith("cuda") for name in devices)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started here."""
        return self._folder is not None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that make a worker use it."""
        return {**renumbered(), **self._pipes} if self.running else {}

    @property
    def _pipes(self) -> Mapping[str, str]:
        if self._folder is None:
            return {}
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder.name, "CUDA_MPS_LOG_DIRECTORY": self._folder.name}

    def start(self) -> bool:
        """Start it if it is of use here; whether it runs."""
        control = shutil.which(CONTROL)
        if not self._wanted or control is None or os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
            return False  # the last: an operator's own service, which workers use as they are
        self._folder = tempfile.TemporaryDirectory(prefix="weft-mps-", ignore_cleanup_errors=True)
        environment = {**os.environ, **self._pipes}
        try:
            # Not captured through pipes: the service would hold them open for as long as it runs.
            code = subprocess.run(
                [control, "-d"],
                env=environment,
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired):
            code = -1
        if code:
            self._forget()
        return self.running

    def stop(self) -> None:
        """Stop it if it was started here."""
        if self._folder is None:
            return
        environment = {**os.environ, **self._pipes}
        try:
            subprocess.run(
                [CONTROL],
                input=b"quit\n",
                env=environment,
                timeout=SECONDS,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._forget()

    def _forget(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None
