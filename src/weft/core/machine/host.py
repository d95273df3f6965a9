"""Host: the CPUs and the memory of a machine; it trains if there is no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.core.machine.processor import Processor


@dataclass(frozen=True, kw_only=True)
class Host(Processor):
    """The CPUs: ``cores`` that may be used; ``one_thread`` is the share of the rates that one thread reaches."""

    cores: int = 1
    one_thread: float = 1.0

    kind: ClassVar[str] = "cpu"
    must_be_above_0: ClassVar[tuple[str, ...]] = ("cores", "one_thread")

    # Fields that only a device has, so that both can be read alike.
    context_bytes: ClassVar[int] = 0
    workspace_bytes: ClassVar[int] = 0
    matmul_share: ClassVar[float] = 1.0
    launch_seconds: ClassVar[float] = 0.0
    replay_seconds: ClassVar[float] = 0.0
    sms: ClassVar[int] = 0

    @property
    def words(self) -> str:
        """How messages begin."""
        return "host"
