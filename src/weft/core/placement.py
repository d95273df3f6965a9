"""DataPlacement: where the features and the edges of a sampled run lie, what a cache holds, and how it is evaluated.

gpu       in the memory of the GPU
host      in pinned memory of the host, read by the GPU over PCIe; of a CPU run, in memory
cached    as host, with the most used rows or neighbour lists kept on the device
disk      in the mapped files of a saved graph, read by the CPU
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

PLACES = ("gpu", "host", "cached", "disk")
POLICIES = ("degree", "presampling", "benefit")
SAMPLERS = ("default", "reservoir", "paper")
EVALUATIONS = ("whole", "layers")
EVALUATION_EDGES = 1 << 22  # edges of a chunk of nodes, in evaluation layer by layer


@dataclass(frozen=True)
class DataPlacement(PlainData):
    """Where things lie.

    ``cache_bytes`` of the device hold what ``policy`` chooses (one of :data:`POLICIES`, or the name of a user's).
    ``overlap``: the next batch is sampled and fetched while the current one trains. ``evaluation``: on the whole graph
    at once, or ``"layers"``, layer by layer in chunks of up to ``chunk_edges`` edges, with activations in host memory.
    ``sampler``: what draws the neighbours, one of :data:`SAMPLERS`.
    """

    features: str = "gpu"
    topology: str = "gpu"
    cache_bytes: int = 0
    policy: str = "degree"
    overlap: bool = False
    evaluation: str = "whole"
    chunk_edges: int = EVALUATION_EDGES
    sampler: str = "default"

    def __post_init__(self) -> None:
        for name in ("features", "topology"):
            if getattr(self, name) not in PLACES:
                raise SpecError(f"{name}={getattr(self, name)!r} must be one of {', '.join(PLACES)}")
        for name, choices in (("evaluation", EVALUATIONS), ("sampler", SAMPLERS)):
            if getattr(self, name) not in choices:
                raise SpecError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")

    @property
    def cached(self) -> bool:
        """Whether there is a cache."""
        return "cached" in (self.features, self.topology)

    @property
    def read_by_gpu(self) -> bool:
        """Whether a GPU reaches both by itself, so that sampling and fetching can be captured."""
        return "disk" not in (self.features, self.topology)

    @property
    def on_device(self) -> bool:
        """Whether everything is on the GPU."""
        return self.features == self.topology == "gpu"


def on_device(device: str) -> DataPlacement:
    """Everything in the memory of a ``device``, ``"cpu"`` or ``"cuda"``."""
    return DataPlacement() if device == "cuda" else DataPlacement("host", "host")


def within_device(placement: DataPlacement, device: str) -> DataPlacement:
    """``placement`` with ``"gpu"`` for all that is in the memory of ``device``: a CPU's own is the host's."""
    if device == "cuda":
        return placement
    features, topology = ("gpu" if place == "host" else place for place in (placement.features, placement.topology))
    return replace(placement, features=features, topology=topology)
