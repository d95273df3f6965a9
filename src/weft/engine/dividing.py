"""Divide the batches of a group between the host and the trainer: profile, partition, and adapt while it trains."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from weft.batches.division.preparers import Hardware
from weft.batches.division.profiler import LIMIT_SECONDS
from weft.batches.division.source import DividedSampled, DividedSampling
from weft.batches.sampled import Sampling
from weft.batches.source import MakeSource
from weft.core.cost import Cost
from weft.core.division import Division, PhaseTimes
from weft.core.errors import WeftError
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.units import show_seconds
from weft.engine.machine import load_calibration, update_calibration
from weft.planner.division.adapting import Adapter
from weft.planner.division.partitioner import Limits, partition
from weft.runtime.group import GroupRun
from weft.runtime.profile_division import divided_source, profile_group

RESERVED_CORES = 2  # for the thread that trains and the one that transfers
MOST_WORKERS = 14
PROFILE_EPOCHS, SHORTEST_PROFILE = 1.7, 1.0  # a profile ends a little later than its limit: within two epochs
PINNED_SHARE = 0.25  # of the host's memory that prepared batches may take
DEVICE_BUFFER = 4
SPARE_SLOTS = 4


@dataclass(frozen=True)
class Dividing:
    """Divides groups on ``machine``; ``hardware``: who prepares batches beside the host (None: the GPU)."""

    machine: Machine
    hardware: Hardware | None = None

    def divides(self, plan: Plan) -> bool:
        """Whether batches of such a group can be prepared by both sides, and it may pay."""
        if plan.mode != "sampled" or len(plan.stack_members) != 1:
            return False
        return self.hardware is not None or plan.division is not None

    def source(self, source: MakeSource, plan: Plan) -> MakeSource:
        """``source``, with batches from both sides if the plan allows it."""
        if not isinstance(source, Sampling) or not self.divides(plan):
            return source
        return DividedSampling(source, plan.division or self._trial(), self.hardware)

    def _trial(self) -> Division:
        """Room for a profile and for what may be chosen after it."""
        trainer = "gpu" if self.hardware is None else self.hardware.name
        slots = self.workers + SPARE_SLOTS
        return Division(1, 1, self.workers, slots, DEVICE_BUFFER, trainer=trainer)

    @property
    def workers(self) -> int:
        """Threads of the host that prepare batches."""
        return max(1, min(self.machine.cores - RESERVED_CORES, MOST_WORKERS))

    def divide(self, group: GroupRun, key: str) -> tuple[Plan, Adapter | None, str]:
        """Choose a division for ``group``: its plan with it, who adapts it, and a sentence for the journal."""
        source = divided_source(group)
        if source is None:
            return group.plan, None, ""
        known = PhaseTimes.from_dict(group.plan.phases) if group.plan.phases else self._known(key)
        times = known or self._profiled(group, key)
        registry = source.hardware.registry()
        limits = self._limits(source, times)
        if group.plan.division is not None and group.plan.phases:
            found, division = None, group.plan.division
            told = f"as planned: {division.words()}"
        else:
            found = partition(times, registry, source.steps_per_epoch, limits, source.hardware.name, self.workers)
            division, told = found.division, _words(found.division, found.simulation.seconds, found.tried)
        source.divide(division)
        adapter = Adapter(times, source.division, registry, limits, source.steps_per_epoch, found)
        return replace(group.plan, division=source.division, phases=times.to_dict()), adapter, told

    def _limits(self, source: DividedSampled, times: PhaseTimes) -> Limits:
        memory = PINNED_SHARE * self.machine.host.memory_bytes / max(times.bytes, 1)
        slots = max(1, min(source.slots - 1, int(memory)))
        return Limits(slots, source.division.device_buffer, self.workers, buckets=source.division.buckets)

    def _known(self, key: str) -> PhaseTimes | None:
        calibration = load_calibration(self.machine)
        return None if calibration is None else calibration.phases.get(key)

    @staticmethod
    def _limit(plan: Plan) -> float:
        """Seconds that a profile may take: within two epochs, and at most fifteen."""
        predicted = Cost.from_dict(plan.cost).epoch_seconds if plan.cost else 0.0
        return min(max(PROFILE_EPOCHS * predicted, SHORTEST_PROFILE), LIMIT_SECONDS) if predicted else LIMIT_SECONDS

    def _profiled(self, group: GroupRun, key: str) -> PhaseTimes:
        times = profile_group(group, self.workers, limit=self._limit(group.plan))
        with suppress(WeftError, OSError):  # what is learned is kept if it can be
            update_calibration(self.machine, lambda known: known.with_phases(key, times))
        return times


def _words(division: Division, seconds: float, tried: tuple[tuple[Division, float], ...]) -> str:
    alone = [f"{show_seconds(per_batch)} by {_side(one)}" for one, per_batch in tried if not one.divided]
    return f"{division.words()}: {show_seconds(seconds)} predicted per epoch; per batch {', '.join(alone)} alone"


def _side(division: Division) -> str:
    return "the host" if division.host_batches else f"the {division.trainer}"
