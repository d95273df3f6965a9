"""Link: a connection between two parts of a machine, with its bandwidth and latency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import SpecError

LINKS = ("pcie", "nvlink", "network", "disk")


@dataclass(frozen=True)
class Link:
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
        for name, value, low in (("bytes_per_second", self.bytes_per_second, "above 0"), ("latency", self.latency, "")):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (low and value == 0):
                raise SpecError(f"{who}: {name}={value!r} must be a number {low or 'at least 0'}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        numbers = {"bytes_per_second": self.bytes_per_second, "latency": self.latency}
        return {"kind": self.kind, "from": self.origin, "to": self.target, **numbers, "source": self.source}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Link:
        """The inverse of :meth:`to_dict`."""
        try:
            return cls(
                data["kind"], data["from"], data["to"], data["bytes_per_second"],
                data.get("latency", 0.0), data.get("source", ""),
            )  # fmt: skip
        except KeyError as missing:
            raise SpecError(f"a link has no {missing}; expected kind, from, to and bytes_per_second") from None
