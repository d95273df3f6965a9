"""Plan: how a training will be run, decided before it starts, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Plan:
    """The decisions for one group of tasks.

    ``join``: how the members share a step (``"solo"``: a group of one). ``device``: ``"cpu"`` or ``"cuda"``.
    ``replay``: record the step once as a CUDA graph and replay it. ``first_layer``: ``"once"`` when the first
    layer's aggregation of the features is constant and computed before training, else ``"every step"``.
    ``threads``: how many a CPU run may use, None for as many as torch has.
    ``why`` has a sentence for every decision.
    """

    members: tuple[str, ...]
    join: str = "solo"
    device: str = "cpu"
    replay: bool = False
    first_layer: str = "every step"
    threads: int | None = None
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{', '.join(self.members)}: {self.join} on {self.device}"
        return "\n".join([head, *(f"  - {reason}" for reason in self.why)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "members": list(self.members), "why": list(self.why)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`; unknown keys are ignored so that older readers cope."""
        known = {f.name for f in fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        return cls(**{**kept, "members": tuple(kept["members"]), "why": tuple(kept.get("why", ()))})
