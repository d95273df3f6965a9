"""Stage: one stage of a batch's way through a machine, and the resource it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.cost import RESOURCES, resource_kind
from weft.core.errors import SpecError


@dataclass(frozen=True)
class Stage:
    """``name`` says what is done, ``resource`` where (``"gpu"``, ``"cpu"``, ``"pcie"``, ..., or ``"gpu:1"``).

    ``depth``: how many batches may wait behind it (1: synchronous); ``workers``: how many work on it at once. Training
    on the full graph is one stage, ``"train"`` on the device: there is one batch and it never changes.
    """

    name: str
    resource: str
    depth: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        if resource_kind(self.resource) not in RESOURCES:
            raise SpecError(f"stage {self.name!r}: resource={self.resource!r} must be one of {', '.join(RESOURCES)}")
        for name, value in (("depth", self.depth), ("workers", self.workers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"stage {self.name!r}: {name}={value!r} must be a whole number, at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        """The inverse of :meth:`to_dict`."""
        return cls(data["name"], data["resource"], data.get("depth", 1), data.get("workers", 1))


def full_graph_stages(device: str) -> tuple[Stage, ...]:
    """The only stage of training on the full graph on a ``device``, ``"cpu"`` or ``"cuda"``."""
    return (Stage("train", "gpu" if device == "cuda" else "cpu"),)
