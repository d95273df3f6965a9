"""Processor: memory and rates that a :class:`Device` and a :class:`Host` have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from weft.core.errors import SpecError

PRECISIONS = ("fp32", "tf32", "bf16")

Rates = tuple[tuple[int, float], ...]
"""Bytes per second by the width of a row in bytes, ascending: ``((64, 2e12), (256, 4e12))``."""

Kind = TypeVar("Kind", bound="Processor")


@dataclass(frozen=True, kw_only=True)
class Processor:
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
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Mapping) or one.name in ("name", "gather", "l2_gather"):
                continue
            _check_number(self.words, one.name, value, above=one.name in self.must_be_above_0)
        for table in ("gather", "l2_gather"):
            given = getattr(self, table)
            object.__setattr__(self, table, _checked_rates(self.words, table, given) if given else ())
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
        """Whether products in bfloat16 are faster than in float32: without units for it they are emulated."""
        return self.flops.get("bf16", 0.0) > self.flops.get("fp32", math.inf)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        tables = {name: [list(point) for point in getattr(self, name)] for name in ("gather", "l2_gather")}
        return {"kind": self.kind, **asdict(self), **tables}

    @classmethod
    def from_dict(cls: type[Kind], data: Mapping[str, Any]) -> Kind:
        """The inverse of :meth:`to_dict`; unknown keys are ignored so that older readers cope."""
        kind = data.get("kind", cls.kind)
        if kind != cls.kind:
            raise SpecError(f"device={kind!r} must be {cls.kind} here")
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


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
