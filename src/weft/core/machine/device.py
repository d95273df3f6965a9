"""Device: an accelerator of a machine, with its memory, rates and launch costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.core.machine.processor import Processor


@dataclass(frozen=True, kw_only=True)
class Device(Processor):
    """A GPU.

    Beyond what every :class:`Processor` has: ``context_bytes`` are gone once CUDA is up, ``workspace_bytes`` go to the
    libraries (cuBLAS) of a process. ``matmul_share``: how much of ``flops`` the tall products of a GNN reach (1 where
    they were measured so). ``launch_seconds`` per kernel called from Python, ``replay_seconds`` per kernel of a
    captured CUDA graph. ``sms``: multiprocessors. ``op_seconds`` are of operators on tensors of this device.
    """

    name: str = ""
    context_bytes: int = 0
    workspace_bytes: int = 0
    matmul_share: float = 1.0
    launch_seconds: float = 0.0
    replay_seconds: float = 0.0
    sms: int = 0

    kind: ClassVar[str] = "cuda"
    must_be_above_0: ClassVar[tuple[str, ...]] = ("memory_bytes", "copy_bandwidth", "matmul_share")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_rates()

    @property
    def words(self) -> str:
        """How messages begin."""
        return f"device {self.name!r}"
