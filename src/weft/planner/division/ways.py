"""Price the ways to train a group: where things lie, which batches the host prepares, and what an epoch then takes.

A :class:`Way` is listed without a price (task, placement, cost of training and bytes). :meth:`Pricing.price` prices
each as one side prepares all batches, and the most promising also with batches divided between host and GPU: bounds in
closed form come first, and only the ways with the lowest are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.core.cost import Cost
from weft.core.division import Division, PhaseTimes, built_in
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import DataPlacement
from weft.core.run_options import Placement
from weft.core.settings import picks_per_hop
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds
from weft.planner.division.partitioner import Limits, best_share, partition
from weft.planner.division.predicted_times import predicted_times
from weft.planner.division.simulator import Simulation, bound, loads, simulate
from weft.planner.placement import steps_per_epoch
from weft.planner.transfers import row_bytes, with_batches

SIMULATED = 3  # of the ways with the lowest bounds
ALSO_SIMULATED = 1  # of those that need a setting: named, never taken, so they take no room from the others
SEARCHED = 80  # batches of the epochs that divisions are compared by
DEVICE_BUFFERS = (4, 2, 1)
PINNED_SHARE = 0.25  # of the host's memory for prepared batches
RESERVED_CORES, MOST_WORKERS = 2, 14  # cores for the threads that train and transfer; threads that prepare
SPARE_SLOTS = 4  # prepared batches in host memory beyond one per worker
# Batches of the host on the device besides those that wait there: what steps are captured on, the one in training, and
# one whose memory is not free yet. With one alone 13.5 GB were taken where 12.9 were predicted (H200, papers100M).
BESIDES_WAITING = 3


@dataclass(frozen=True, eq=False)
class Way:
    """One way to train ``members`` tasks that share every batch, of which ``task`` is the first.

    ``training``: cost of an epoch of all members without sampling and fetching, evaluation included. ``device_bytes``:
    everything on the device. ``condition``: the setting that it needs (empty: none). ``rough``: worked out from another
    way without a dry run, so that it is compared but not taken.

    Its price: ``seconds`` of an epoch of all members; ``division`` of the batches (None: one side prepares them), with
    ``host_bytes`` for prepared batches, the ``simulation`` and the phase ``times``; ``measured``: from measured phases.
    """

    task: Task
    placement: DataPlacement
    training: Cost
    device_bytes: int
    members: int = 1
    condition: str = ""
    rough: bool = False
    seconds: float = 0.0
    division: Division | None = None
    host_bytes: int = 0
    simulation: Simulation | None = None
    times: PhaseTimes | None = None
    measured: bool = False

    @property
    def seconds_per_task(self) -> float:
        """Of an epoch."""
        return self.seconds / max(self.members, 1)

    def words(self) -> str:
        """What it is and takes, in one line."""
        placement, parts = self.placement, ["whole graph"]
        if self.task.sampled:
            where = f"features: {placement.features}, edges: {placement.topology}"
            if placement.features == placement.topology:
                where = f"features and edges: {placement.features}"
            parts = [f"sampled, {where}"]
        parts += [f"cache {show_bytes(placement.cache_bytes)}"] if placement.cache_bytes else []
        parts += [] if self.division is None else [self.division.words()]
        parts += [self.task.precision] + ([f"{self.members} tasks"] if self.members > 1 else [])
        parts += [f"needs {self.condition}"] if self.condition else []
        return f"{'; '.join(parts)}: {self.figures()}"

    def figures(self) -> str:
        """Seconds and bytes in words."""
        host = f", {show_bytes(self.host_bytes)} pinned" if self.host_bytes else ""
        rough = "about " if self.rough else ""
        return f"{rough}{show_seconds(self.seconds_per_task)} per epoch and task, {show_bytes(self.device_bytes)}{host}"

    def elsewhere(self, placement: DataPlacement, stats: GraphStats) -> Way:
        """About what it would take with features and edges elsewhere, without a dry run of its own."""
        size = self.device_bytes - self.placement.cache_bytes
        size += batch_bytes(self.task, stats) * (placement.overlap - self.placement.overlap)
        moved = {"features": stats.num_nodes * row_bytes(self.task, stats), "topology": 4 * stats.num_edges}
        for name, taken in moved.items():
            size += taken * ((getattr(placement, name) == "gpu") - (getattr(self.placement, name) == "gpu"))
        return replace(self, placement=without_cache(placement), device_bytes=max(size, 0), rough=True)


def batch_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of a batch at its largest: features and neighbours."""
    rows: int = min(task.batch, max(stats.num_train, 1))
    most, edges = rows, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        edges += most * max(fanout, 1)
        most = min(most * (max(fanout, 0) + 1), stats.num_nodes + rows)
    return most * (row_bytes(task, stats) + 4) + 8 * edges


def without_cache(placement: DataPlacement) -> DataPlacement:
    """The same with everything in host memory and nothing of it cached."""
    features, topology = ("host" if tier == "cached" else tier for tier in (placement.features, placement.topology))
    return replace(placement, features=features, topology=topology, cache_bytes=0)


def host_workers(machine: Machine) -> int:
    """Threads of the host that prepare batches."""
    return max(1, min(machine.host.cores - RESERVED_CORES, MOST_WORKERS))


def strategy_of(options: Placement) -> tuple[str, float | None]:
    """The strategy of divisions that the option ``division`` selects, and the share of the device if it is given."""
    if options.division is None or isinstance(options.division, str):
        return options.division or "elastic", None
    return "fixed", options.division


@dataclass
class Pricing:
    """Prices ways on ``machine`` within ``budget`` bytes; ``measured`` phases of a way, None if there are none.

    Simulations are kept: pricing a way again takes no time.
    """

    stats: GraphStats
    machine: Machine
    budget: int
    measured: Callable[[Way], PhaseTimes | None] = lambda way: None
    options: Placement = field(default_factory=Placement)
    _times: dict[Way, tuple[PhaseTimes, bool]] = field(default_factory=dict)
    _divided: dict[tuple[Way, int], Way | None] = field(default_factory=dict)

    def price(self, ways: Sequence[Way]) -> list[Way]:
        """Every way with one side, then the best also with divided batches, by all workers and by fewer."""
        # A way without room for batches on the device would displace others: the larger a cache, the lower the bound.
        ranked = sorted((way for way in ways if self._divides(way) and self._device_buffer(way)), key=self._bound)
        simulated = [way for way in ranked if not way.condition][:SIMULATED]
        simulated += [way for way in ranked if way.condition][:ALSO_SIMULATED]
        priced = [self._undivided(way) for way in ways]
        most = host_workers(self.machine)
        counts = sorted({max(most // 2, 1), most}, reverse=True)
        for position, way in enumerate(simulated):
            for workers in counts if position == 0 else counts[:1]:
                if (way, workers) not in self._divided:
                    self._divided[way, workers] = self._with_division(way, workers)
                divided = self._divided[way, workers]
                priced += [] if divided is None else [divided]
        return priced

    def _divides(self, way: Way) -> bool:
        """Whether two sides can prepare its batches: the host has the default sampler alone."""
        placement, hosted = way.placement, self.machine.device == "cuda" and not way.placement.on_device
        return way.task.sampled and hosted and placement.read_by_gpu and placement.sampler == "default"

    def _device_buffer(self, way: Way) -> int:
        """How many batches of the host may wait on the device; 0 if there is no room for any."""
        room = (self.budget - way.device_bytes) // max(batch_bytes(way.task, self.stats), 1) - BESIDES_WAITING
        return next((count for count in DEVICE_BUFFERS if count <= room), 0)

    def _phase_times(self, way: Way) -> tuple[PhaseTimes, bool]:
        """Phase times and whether they were measured."""
        if way not in self._times:
            times, steps = self.measured(way), steps_per_epoch(way.task, self.stats)
            predicted = times or predicted_times(way.task, self.stats, self.machine, way.placement, way.training, steps)
            self._times[way] = (predicted, times is not None)
        return self._times[way]

    def _bound(self, way: Way) -> float:
        """Seconds of an epoch per task that no division goes below."""
        elastic = strategy_of(self.options)[0] == "elastic"
        by_resource = loads(self._phase_times(way)[0], built_in(), "gpu", host_workers(self.machine), elastic)
        seconds = steps_per_epoch(way.task, self.stats) * bound(by_resource, best_share(by_resource))
        return seconds / max(way.members, 1)

    def _undivided(self, way: Way) -> Way:
        """As one side prepares all batches."""
        if self._divides(way) and self._phase_times(way)[1]:
            steps = steps_per_epoch(way.task, self.stats)
            alone = simulate(Division(0, 2), self._phase_times(way)[0], steps, built_in(), most=SEARCHED)
            return replace(way, seconds=alone.seconds + way.training.phases.get("evaluation", 0.0), measured=True)
        cost = way.training
        if way.task.sampled:
            cost = with_batches(cost, way.task, self.stats, way.placement, self.machine)
        return replace(way, seconds=cost.epoch_seconds)

    def _with_division(self, way: Way, workers: int) -> Way | None:
        """With the best division in which the host has a part; None if there is no room for its batches."""
        times, measured = self._phase_times(way)
        size, device = batch_bytes(way.task, self.stats), self._device_buffer(way)
        pinned = int(PINNED_SHARE * self.machine.host.memory_bytes // max(size, 1)) - 1
        if not device or pinned < 1:
            return None
        limits = Limits(min(pinned, workers + SPARE_SLOTS), device, workers, *strategy_of(self.options))
        steps = steps_per_epoch(way.task, self.stats)
        chosen = partition(times, built_in(), min(steps, SEARCHED), limits)
        division = chosen.division
        if not division.host_batches:  # what the device prepares alone is a way already
            if limits.share is not None:
                return None
            division = next((tried for tried, _ in chosen.tried if tried.host_batches), division)
        epoch = simulate(division, times, steps, built_in(), most=SEARCHED)
        return replace(
            way,
            seconds=epoch.seconds + way.training.phases.get("evaluation", 0.0),
            device_bytes=way.device_bytes + (division.device_buffer + BESIDES_WAITING) * size,
            division=division,
            host_bytes=division.pinned_batches * size,
            simulation=epoch,
            times=times,
            measured=measured,
        )
