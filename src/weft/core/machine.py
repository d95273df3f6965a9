"""Machines: a host, its devices and the links between them, with measured rates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Generic, Self, TypeVar

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

# ---- Processors: the GPUs of a machine, and its host, which trains if there is no GPU.

PRECISIONS = ("fp32", "tf32", "bf16")

Rates = tuple[tuple[int, float], ...]
"""Bytes per second by the width of a row in bytes, ascending: ``((64, 2e12), (256, 4e12))``."""


@dataclass(frozen=True, kw_only=True)
class Processor(PlainData):
    """Memory and rates; 0 or nothing where a number is not known.

    Bytes: ``memory_bytes``, and ``l2_bytes`` of the last cache before memory. Rates in bytes per second:
    ``copy_bandwidth`` (read and written bytes of a long copy), ``gather`` and ``l2_gather`` (rows fetched by index, by
    the width of a row; from memory, and when the rows stay in the cache). ``flops`` per second by precision.
    Seconds: ``op_seconds`` that a torch operator takes the host, ``custom_op_seconds`` one of Weft's.
    ``sources`` says where each number is from.
    """

    memory_bytes: int = 0
    l2_bytes: int = 0
    copy_bandwidth: float = 0.0
    gather: Rates = ()
    l2_gather: Rates = ()
    flops: Mapping[str, float] = field(default_factory=dict)
    op_seconds: float = 0.0
    custom_op_seconds: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    kind: ClassVar[str]
    must_be_above_0: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Mapping) or entry.name in ("name", "gather", "l2_gather"):
                continue
            _check_number(self.words, entry.name, value, above=entry.name in self.must_be_above_0)
        for table in ("gather", "l2_gather"):
            rates = getattr(self, table)
            object.__setattr__(self, table, _checked_rates(self.words, table, rates) if rates else ())
        for precision, rate in self.flops.items():
            _check_number(self.words, f"flops[{precision!r}]", rate, above=True)

    @property
    def words(self) -> str:
        """How messages begin."""
        return self.kind

    def require_rates(self) -> None:
        """A :class:`SpecError` for the first rate that is not known; training is predicted from all of them."""
        for name in ("memory_bytes", "copy_bandwidth"):
            _check_number(self.words, name, getattr(self, name), above=True)
        for table in ("gather", "l2_gather"):
            _checked_rates(self.words, table, getattr(self, table))
        missing = [precision for precision in PRECISIONS if precision not in self.flops]
        if missing:
            raise SpecError(f"{self.words}: flops has no rate above 0 for {missing[0]!r}")

    def gather_rate(self, row_bytes: float, cached: bool) -> float:
        """Bytes per second when rows of ``row_bytes`` are fetched by index, from the cache or from memory."""
        return interpolate(self.l2_gather if cached else self.gather, row_bytes)

    @property
    def has_bf16(self) -> bool:
        """True if products in bfloat16 are faster than in float32: without units for it they are emulated."""
        return self.flops.get("bf16", 0.0) > self.flops.get("fp32", math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"kind": self.kind, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; unknown keys are ignored, so that older versions can read newer files."""
        kind = data.get("kind", cls.kind)
        if kind != cls.kind:
            raise SpecError(f"device={kind!r} must be {cls.kind} here")
        return super().from_dict(data)


def interpolate(rates: Rates, row_bytes: float) -> float:
    """The rate at ``row_bytes``: between two points on a line over log2 of the width, flat beyond the ends.

    Below the narrowest measured row a whole sector is fetched for less and less of use, so the rate falls with it.
    """
    first, last = rates[0], rates[-1]
    if row_bytes <= first[0]:
        return first[1] * max(row_bytes, 1.0) / first[0]
    if row_bytes >= last[0]:
        return last[1]
    (low, slow), (high, fast) = next(ends for ends in pairwise(rates) if row_bytes <= ends[1][0])
    return slow + math.log2(row_bytes / low) / math.log2(high / low) * (fast - slow)


def _check_number(who: str, name: str, value: Any, above: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above and value == 0):
        raise SpecError(f"{who}: {name}={value!r} must be a number {'above 0' if above else 'at least 0'}")


def _checked_rates(who: str, name: str, rates: Any) -> Rates:
    try:
        points = tuple((int(width), float(rate)) for width, rate in rates)
    except (TypeError, ValueError):
        points = ()
    ascending = all(a[0] < b[0] for a, b in pairwise(points))
    if not points or not ascending or not all(width > 0 and 0 < rate < math.inf for width, rate in points):
        raise SpecError(f"{who}: {name}={rates!r} must be pairs of row bytes (ascending) and bytes per second")
    return points


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


# ---- Links between the parts of a machine

LINKS = ("pcie", "nvlink", "network", "disk")


@dataclass(frozen=True)
class Link(PlainData):
    """One direction of a connection.

    ``kind``: one of :data:`LINKS`. ``origin`` and ``target``: ``"host"``, ``"disk"``, ``"gpu:0"``, or the name of
    another machine; in JSON they are ``from`` and ``to``. ``bytes_per_second`` of a long transfer, ``latency`` in
    seconds of a short one (0: not known). ``source`` says where the numbers are from.
    """

    kind: str
    origin: str
    target: str
    bytes_per_second: float
    latency: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        who = f"link {self.origin!r} to {self.target!r}"
        if self.kind not in LINKS:
            raise SpecError(f"{who}: kind={self.kind!r} must be one of {', '.join(LINKS)}")
        _check_number(who, "bytes_per_second", self.bytes_per_second, above=True)
        _check_number(who, "latency", self.latency, above=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        numbers = {"bytes_per_second": self.bytes_per_second, "latency": self.latency}
        return {"kind": self.kind, "from": self.origin, "to": self.target, **numbers, "source": self.source}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Link:
        """The inverse of :meth:`to_dict`."""
        for key in ("kind", "from", "to", "bytes_per_second"):
            if key not in data:
                raise SpecError(f"a link has no {key!r}; expected kind, from, to and bytes_per_second")
        return super().from_dict({**data, "origin": data["from"], "target": data["to"]})


# ---- Machines, measured by ``weft probe`` or taken from data sheets

T = TypeVar("T")


class _OfTrainer(Generic[T]):
    """An attribute of a machine's trainer, read as the machine's own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, machine: Machine, owner: type | None = None) -> T:
        value: T = getattr(machine.primary, self._name)
        return value


@dataclass(frozen=True)
class Machine(PlainData):
    """The numbers that memory and time are predicted from.

    ``host``: CPUs and memory. ``devices``: GPUs; on a machine without any the host trains. ``links``: how fast bytes
    go between them (``"host"``, ``"gpu:0"``, ``"disk"``). ``measured``: probed, not from data sheets.

    What trains is :attr:`primary`, the first device or else the host. Its numbers are also those of the machine:
    ``machine.memory_bytes`` is ``machine.primary.memory_bytes``.
    """

    name: str
    host: Host
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    measured: bool = False

    in_file: ClassVar[str] = "a machine; `weft probe --out FILE` writes one"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "links", tuple(self.links))
        if not self.devices:
            self.host.require_rates()

    @property
    def primary(self) -> Device | Host:
        """What trains: the first device, or the host if there is none."""
        return self.devices[0] if self.devices else self.host

    @property
    def device(self) -> str:
        """The kind of the trainer: ``"cuda"`` or ``"cpu"``."""
        return self.primary.kind

    def link(self, kind: str, origin: str, target: str) -> Link | None:
        """The link of that kind between two parts; None if there is none, or none is known."""
        ends = (kind, origin, target)
        return next((link for link in self.links if (link.kind, link.origin, link.target) == ends), None)

    def host_only(self, name: str) -> Machine:
        """The same host without its devices, called ``name``; its rates have to be known."""
        links = tuple(link for link in self.links if "gpu" not in link.origin + link.target)
        return Machine(name, self.host, (), links, self.measured)

    def with_device(self, **changes: Any) -> Machine:
        """The same machine with other numbers for the trainer."""
        if not self.devices:
            return self.with_host(**changes)
        return replace(self, devices=(replace(self.devices[0], **changes), *self.devices[1:]))

    def with_host(self, **changes: Any) -> Machine:
        """The same machine with other numbers for its host."""
        return replace(self, host=replace(self.host, **changes))

    # Numbers of the trainer: see :class:`Device` and :class:`Host`
    memory_bytes = _OfTrainer[int]()
    context_bytes = _OfTrainer[int]()
    workspace_bytes = _OfTrainer[int]()
    l2_bytes = _OfTrainer[int]()
    copy_bandwidth = _OfTrainer[float]()
    gather = _OfTrainer[Rates]()
    l2_gather = _OfTrainer[Rates]()
    gather_rate = _OfTrainer[Callable[..., float]]()
    flops = _OfTrainer[Mapping[str, float]]()
    matmul_share = _OfTrainer[float]()
    has_bf16 = _OfTrainer[bool]()
    launch_seconds = _OfTrainer[float]()
    replay_seconds = _OfTrainer[float]()
    op_seconds = _OfTrainer[float]()
    custom_op_seconds = _OfTrainer[float]()
    sms = _OfTrainer[int]()
    sources = _OfTrainer[Mapping[str, str]]()

    @property
    def available_bytes(self) -> int:
        """Bytes for tensors: the memory less the CUDA context and the workspaces of the libraries."""
        return max(self.memory_bytes - self.context_bytes - self.workspace_bytes, 0)

    def matmul_rate(self, precision: str) -> float:
        """Floating-point operations per second of a product of tall matrices."""
        return self.flops[precision] * self.matmul_share

    def bus_bandwidth(self, origin: str, target: str) -> float:
        """Bytes per second between pinned memory of the ``"host"`` and ``"gpu:0"``; 0 where that is not known."""
        link = self.link("pcie", origin, target)
        return 0.0 if link is None else link.bytes_per_second

    # ---- Plain data

    def to_json(self) -> str:
        """The text of a machine file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of :meth:`to_dict`."""
        try:
            for key in ("name", "host"):
                if key not in data:
                    raise SpecError(f"no {key!r}; `weft probe --out FILE` writes one")
            return super().from_dict(data)
        except SpecError as error:
            raise SpecError(f"machine {data.get('name', '?')!r}: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"machine {data.get('name', '?')!r}: not as `weft probe` writes one ({error})") from None
