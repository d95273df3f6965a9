"""Machine: a host, its devices and the links between them, measured by ``weft probe`` or taken from data sheets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from weft.core.errors import SpecError
from weft.core.machine.device import Device
from weft.core.machine.host import Host
from weft.core.machine.link import Link
from weft.core.machine.processor import Rates

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Machine:
    """The numbers that memory and time are worked out from.

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
        found = (one for one in self.links if (one.kind, one.origin, one.target) == (kind, origin, target))
        return next(found, None)

    def host_only(self, name: str) -> Machine:
        """The same host without its devices, called ``name``; its rates have to be known."""
        kept = tuple(link for link in self.links if "gpu" not in link.origin + link.target)
        return Machine(name, self.host, (), kept, self.measured)

    def with_device(self, **changes: Any) -> Machine:
        """The same machine with other numbers for the trainer."""
        if not self.devices:
            return self.with_host(**changes)
        return replace(self, devices=(replace(self.devices[0], **changes), *self.devices[1:]))

    def with_host(self, **changes: Any) -> Machine:
        """The same machine with other numbers for its host."""
        return replace(self, host=replace(self.host, **changes))

    # ---- numbers of the trainer ----------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Memory of the trainer."""
        return self.primary.memory_bytes

    @property
    def context_bytes(self) -> int:
        """What CUDA takes once it is up."""
        return self.primary.context_bytes

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS takes in a process."""
        return self.primary.workspace_bytes

    @property
    def available_bytes(self) -> int:
        """What tensors may take: the memory less the CUDA context and the workspaces of the libraries."""
        return max(self.memory_bytes - self.context_bytes - self.workspace_bytes, 0)

    @property
    def l2_bytes(self) -> int:
        """The last cache before memory."""
        return self.primary.l2_bytes

    @property
    def copy_bandwidth(self) -> float:
        """Read and written bytes per second of a long copy."""
        return self.primary.copy_bandwidth

    @property
    def gather(self) -> Rates:
        """Rows fetched from memory by index."""
        return self.primary.gather

    @property
    def l2_gather(self) -> Rates:
        """Rows fetched from the cache by index."""
        return self.primary.l2_gather

    @property
    def flops(self) -> Mapping[str, float]:
        """Floating-point operations per second by precision."""
        return self.primary.flops

    @property
    def matmul_share(self) -> float:
        """How much of ``flops`` tall products reach."""
        return self.primary.matmul_share

    @property
    def has_bf16(self) -> bool:
        """Whether the trainer has units for bfloat16."""
        return self.primary.has_bf16

    @property
    def launch_seconds(self) -> float:
        """Of a kernel called from Python."""
        return self.primary.launch_seconds

    @property
    def replay_seconds(self) -> float:
        """Of a kernel in a captured CUDA graph."""
        return self.primary.replay_seconds

    @property
    def op_seconds(self) -> float:
        """Of a call of a torch operator."""
        return self.primary.op_seconds

    @property
    def custom_op_seconds(self) -> float:
        """Of a call of one of Weft's operators."""
        return self.primary.custom_op_seconds

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        return self.primary.sms

    @property
    def sources(self) -> Mapping[str, str]:
        """Where the numbers of the trainer are from."""
        return self.primary.sources

    def gather_rate(self, row_bytes: float, cached: bool) -> float:
        """Bytes per second when rows of ``row_bytes`` are fetched by index, from the cache or from memory."""
        return self.primary.gather_rate(row_bytes, cached)

    def matmul_rate(self, precision: str) -> float:
        """Floating-point operations per second of a product of tall matrices."""
        return self.flops[precision] * self.matmul_share

    # ---- numbers of the host and its bus -------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Memory of the host."""
        return self.host.memory_bytes

    @property
    def cores(self) -> int:
        """Cores of the host."""
        return self.host.cores

    @property
    def one_thread(self) -> float:
        """The share of the host's rates that one thread reaches."""
        return self.host.one_thread

    @property
    def h2d_bandwidth(self) -> float:
        """Bytes per second from pinned memory of the host to the first GPU; 0 where that is not known."""
        found = self.link("pcie", "host", "gpu:0")
        return 0.0 if found is None else found.bytes_per_second

    @property
    def d2h_bandwidth(self) -> float:
        """Bytes per second from the first GPU to pinned memory of the host; 0 where that is not known."""
        found = self.link("pcie", "gpu:0", "host")
        return 0.0 if found is None else found.bytes_per_second

    # ---- plain data ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "measured": self.measured,
            "host": self.host.to_dict(),
            "devices": [device.to_dict() for device in self.devices],
            "links": [link.to_dict() for link in self.links],
        }

    def to_json(self) -> str:
        """The text of a machine file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of :meth:`to_dict`; files of earlier versions, without a host in them, are read as well."""
        try:
            return _read(data) if isinstance(data.get("host"), Mapping) else _read_flat(data)
        except SpecError as error:
            raise SpecError(f"machine {data.get('name', '?')!r}: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"machine {data.get('name', '?')!r}: not as `weft probe` writes one ({error})") from None

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


def _read(data: Mapping[str, Any]) -> Machine:
    if "name" not in data:
        raise SpecError("no 'name'; `weft probe --out FILE` writes one")
    return Machine(
        data["name"],
        Host.from_dict(data["host"]),
        tuple(Device.from_dict(one) for one in data.get("devices", ())),
        tuple(Link.from_dict(one) for one in data.get("links", ())),
        bool(data.get("measured", False)),
    )


def _read_flat(data: Mapping[str, Any]) -> Machine:
    """A machine as files had it before hosts and links: one device, with the host's cores and memory among its numbers.

    Of a GPU's host nothing else is known; of its bus, both directions.
    """
    for name in ("name", "device", "memory_bytes"):
        if name not in data:
            raise SpecError(f"no {name!r}; `weft probe --out FILE` writes one")
    if data["device"] not in DEVICES:
        raise SpecError(f"device={data['device']!r} must be one of {', '.join(DEVICES)}")
    measured = bool(data.get("measured", False))
    host = {key: data[key] for key in ("cores", "one_thread") if key in data}
    if data["device"] == "cpu":
        own = {one.name: data[one.name] for one in fields(Host) if one.name in data}
        return Machine(data["name"], Host(**(own | host)), measured=measured)
    own = {one.name: data[one.name] for one in fields(Device) if one.name in data}
    bus = (("h2d_bandwidth", "host", "gpu:0"), ("d2h_bandwidth", "gpu:0", "host"))
    source = dict(data.get("sources", {})).get("h2d_bandwidth", "")
    links = tuple(Link("pcie", begin, end, data[key], source=source) for key, begin, end in bus if data.get(key))
    return Machine(
        data["name"], Host(memory_bytes=data.get("host_bytes", 0), **host), (Device(**own),), links, measured
    )
