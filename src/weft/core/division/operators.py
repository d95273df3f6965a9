"""Registry of {phase, hardware, operator}: what prepares, transfers and trains batches, and what each occupies.

MorphGL's Table III. Hardware joins by registering operators; a planner reads routes off the registry and knows no
hardware by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.core.errors import SpecError

PHASES = ("batching", "transfer", "training")
HOST, BUS = "cpu", "pcie"  # who prepares batches in host memory, and what carries them to the trainer


@dataclass(frozen=True)
class Operator:
    """``name`` does ``phase`` on ``hardware`` and occupies every resource of ``occupies`` while it runs.

    Batching is sampling and, on the host, gathering; transfer brings features to the trainer.
    """

    phase: str
    hardware: str
    name: str
    occupies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise SpecError(f"operator {self.name!r}: phase={self.phase!r} must be one of {', '.join(PHASES)}")
        if not self.hardware or not self.name:
            raise SpecError(f"operator {self.name!r} on {self.hardware!r}: needs a name and the hardware it runs on")
        object.__setattr__(self, "occupies", tuple(self.occupies) or (self.hardware,))

    @property
    def key(self) -> str:
        """The name of the phase on this hardware, such as ``batching_cpu``."""
        return f"{self.phase}_{self.hardware}"


@dataclass(frozen=True)
class Route:
    """How a batch reaches the trainer: who begins it, and the operators before training in their order."""

    hardware: str
    operators: tuple[Operator, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of its phases."""
        return tuple(one.key for one in self.operators)


@dataclass(frozen=True)
class Registry:
    """Operators by phase and hardware, at most one each."""

    operators: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        keys = [one.key for one in self.operators]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise SpecError(f"{twice} is registered twice; replace the operator with Registry.replaced")

    def registered(self, *operators: Operator) -> Registry:
        """With more operators; hardware that is known under a phase already is an error."""
        return Registry((*self.operators, *operators))

    def replaced(self, *operators: Operator) -> Registry:
        """With these operators in place of those for the same phase and hardware."""
        keys = {one.key for one in operators}
        return Registry((*(one for one in self.operators if one.key not in keys), *operators))

    def find(self, phase: str, hardware: str) -> Operator | None:
        """The operator for ``phase`` on ``hardware``, None if there is none."""
        return next((one for one in self.operators if (one.phase, one.hardware) == (phase, hardware)), None)

    def trainers(self) -> tuple[str, ...]:
        """Hardware that trains."""
        return tuple(one.hardware for one in self.operators if one.phase == "training")

    def training(self, trainer: str) -> Operator:
        """The operator that trains on ``trainer``; a SpecError if there is none."""
        found = self.find("training", trainer)
        if found is None:
            known = ", ".join(self.trainers()) or "none"
            raise SpecError(f"nothing is registered to train on {trainer!r}; hardware that trains: {known}")
        return found

    def host_route(self) -> Route | None:
        """Batching on the host, then a copy to the trainer; None unless both are registered."""
        return _route(HOST, self.find("batching", HOST), self.find("transfer", BUS))

    def device_route(self, trainer: str) -> Route | None:
        """Batching by the trainer itself; None unless it has an operator for that."""
        batching, transfer = self.find("batching", trainer), self.find("transfer", trainer)
        return None if batching is None else _route(trainer, *filter(None, (batching, transfer)))

    def beside(self, trainer: str) -> bool:
        """Whether ``trainer`` prepares batches while it trains: its operators for that leave it free."""
        route = self.device_route(trainer)
        training = set(self.training(trainer).occupies)
        return route is not None and all(training.isdisjoint(one.occupies) for one in route.operators)

    def keys(self, trainer: str) -> tuple[str, ...]:
        """Names of all phases that training on ``trainer`` may have, the host's first and training last."""
        routes: Iterable[Route | None] = (self.host_route(), self.device_route(trainer))
        return (*(key for route in routes if route for key in route.keys), self.training(trainer).key)


def _route(hardware: str, *operators: Operator | None) -> Route | None:
    found = tuple(one for one in operators if one is not None)
    return Route(hardware, found) if len(found) == len(operators) else None


def built_in(beside: bool = False) -> Registry:
    """What Weft has: a CPU and a GPU that prepare batches, copies by DMA or reads over UVA, training on the GPU.

    ``beside``: the GPU samples and gathers on a stream of its own while it trains, by kernels that leave most of its
    multiprocessors to the training step; else it does one after the other, as MorphGL assumes.
    """
    gpu = ("gpu preparing", "pcie") if beside else ("gpu", "pcie")
    return Registry((
        Operator("batching", "cpu", "weft.flow: compiled sampler and gather", ("cpu",)),
        Operator("transfer", "pcie", "copy from pinned memory (DMA)", ("pcie",)),
        Operator("batching", "gpu", "weft.flow: Triton sampler over UVA", gpu),
        Operator("transfer", "gpu", "gather over UVA", gpu),
        Operator("training", "gpu", "training step", ("gpu",)),
    ))  # fmt: skip
