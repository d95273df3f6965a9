"""Machine: what a device and its host can do, measured by ``weft probe`` or taken from a data sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from weft.core.errors import SpecError

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16")

Rates = tuple[tuple[int, float], ...]
"""Bytes a second by the width of a row in bytes, ascending: ``((64, 2e12), (256, 4e12))``."""


@dataclass(frozen=True)
class Machine:
    """The numbers that memory and time are worked out from.

    Bytes: ``memory_bytes`` of the device, of which ``context_bytes`` are gone once CUDA is up and
    ``workspace_bytes`` go to the libraries (cuBLAS) of a process; ``l2_bytes`` is the last-level cache,
    ``host_bytes`` the memory of the host.

    Rates, in bytes a second unless said: ``copy_bandwidth`` (read and written bytes of a long copy),
    ``gather`` and ``l2_gather`` (rows fetched by index, by the width of a row; from memory, and when the rows stay
    in the cache), ``h2d_bandwidth`` and ``d2h_bandwidth`` (pinned memory over the bus). ``flops`` by precision, and
    ``matmul_share``: how much of ``flops`` the tall products of a GNN reach (1 where they were measured so).

    Fixed costs in seconds: ``launch_seconds`` a kernel called from Python, ``replay_seconds`` a kernel in a
    recorded graph, ``op_seconds`` a torch operator on the host, ``custom_op_seconds`` one of Weft's.

    ``sms`` multiprocessors, ``cores`` of the host; ``one_thread`` is the share of a CPU's rates that one thread
    reaches. ``measured`` tells a probe from a data sheet; ``sources`` says where each number is from.
    """

    name: str
    device: str
    memory_bytes: int
    context_bytes: int = 0
    workspace_bytes: int = 0
    l2_bytes: int = 0
    host_bytes: int = 0
    copy_bandwidth: float = 0.0
    gather: Rates = ()
    l2_gather: Rates = ()
    h2d_bandwidth: float = 0.0
    d2h_bandwidth: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    matmul_share: float = 1.0
    launch_seconds: float = 0.0
    replay_seconds: float = 0.0
    op_seconds: float = 0.0
    custom_op_seconds: float = 0.0
    sms: int = 0
    cores: int = 1
    one_thread: float = 1.0
    measured: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SpecError(f"machine {self.name!r}: device={self.device!r} must be one of {', '.join(DEVICES)}")
        for rule, names in _RULES.items():
            for name in names:
                _check(self.name, name, getattr(self, name), rule)
        for table in ("gather", "l2_gather"):
            object.__setattr__(self, table, _checked_rates(self.name, table, getattr(self, table)))
        missing = [p for p in PRECISIONS if not _positive(self.flops.get(p))]
        if missing:
            raise SpecError(f"machine {self.name!r}: flops has no rate above 0 for {missing[0]!r}")

    @property
    def available_bytes(self) -> int:
        """What tensors may take: the memory less the CUDA context and the workspaces of the libraries."""
        return max(self.memory_bytes - self.context_bytes - self.workspace_bytes, 0)

    def gather_rate(self, row_bytes: float, cached: bool) -> float:
        """Bytes a second when rows of ``row_bytes`` are fetched by index, from the cache or from memory."""
        return interpolate(self.l2_gather if cached else self.gather, row_bytes)

    def matmul_rate(self, precision: str) -> float:
        """Floating-point operations a second of a product of tall matrices."""
        return self.flops[precision] * self.matmul_share

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        tables = {name: [list(point) for point in getattr(self, name)] for name in ("gather", "l2_gather")}
        return {**asdict(self), **tables}

    def to_json(self) -> str:
        """The text of a machine file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of :meth:`to_dict`; unknown keys are ignored so that older readers cope."""
        known = {f.name for f in fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        for name in ("name", "device", "memory_bytes"):
            if name not in kept:
                raise SpecError(f"machine {data.get('name', '?')!r}: no {name!r}; `weft probe --out FILE` writes one")
        return cls(**kept)

    @classmethod
    def from_json(cls, text: str, where: str) -> Machine:
        """The machine that a file holds; ``where`` begins every complaint."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"{where}: not valid JSON ({error}); `weft probe --out FILE` writes a machine") from None
        if not isinstance(data, dict):
            raise SpecError(f"{where}: holds {type(data).__name__}; expected the machine that `weft probe` writes")
        try:
            return cls.from_dict(data)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None


def interpolate(rates: Rates, row_bytes: float) -> float:
    """The rate at ``row_bytes``: between two points on a line over log2 of the width, flat beyond the ends.

    Below the narrowest measured row a whole sector is fetched for less and less of use, so the rate falls with it.
    """
    first, last = rates[0], rates[-1]
    if row_bytes <= first[0]:
        return first[1] * max(row_bytes, 1.0) / first[0]
    if row_bytes >= last[0]:
        return last[1]
    for (low, slow), (high, fast) in pairwise(rates):
        if row_bytes <= high:
            share = math.log2(row_bytes / low) / math.log2(high / low)
            return slow + share * (fast - slow)
    raise AssertionError("the last point ends the search")


_RULES = {
    "above 0": ("memory_bytes", "copy_bandwidth", "matmul_share", "one_thread", "cores"),
    "at least 0": (
        "context_bytes", "workspace_bytes", "l2_bytes", "host_bytes", "h2d_bandwidth", "d2h_bandwidth",
        "launch_seconds", "replay_seconds", "op_seconds", "custom_op_seconds", "sms",
    ),
}  # fmt: skip


def _check(machine: str, name: str, value: Any, rule: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (rule == "above 0" and value == 0):
        raise SpecError(f"machine {machine!r}: {name}={value!r} must be a number {rule}")


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _checked_rates(machine: str, name: str, rates: Any) -> Rates:
    try:
        points = tuple((int(width), float(rate)) for width, rate in rates)
    except (TypeError, ValueError):
        points = ()
    ascending = all(a[0] < b[0] for a, b in pairwise(points))
    if not points or not ascending or not all(width > 0 and _positive(rate) for width, rate in points):
        raise SpecError(
            f"machine {machine!r}: {name}={rates!r} must be pairs of row bytes (ascending) and bytes a second"
        )
    return points
