"""choose: the fastest way to train a group within a byte budget, its runners-up, and why.

The search is over setups (the whole graph or sampled batches, where features and edges lie, the cache, how steps are
captured, precision, how many tasks share a batch) and, for batches that two sides can prepare, over workers, the ratio
of the sides and the buffers between them. Bounds in closed form come first; only the best are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from weft.core.cost import Cost
from weft.core.division import Division, PhaseTimes, built_in
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import Placement
from weft.core.settings.fanout import picks_per_hop
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds
from weft.planner.division.loads import bound, loads
from weft.planner.division.partitioner import Limits, Partition, best_share, partition
from weft.planner.division.predicted_times import predicted_times
from weft.planner.division.simulator import Simulation, simulate
from weft.planner.sampling.transfers import row_bytes, with_batches
from weft.planner.training_mode import steps_per_epoch

SIMULATED = 3  # of the setups with the lowest bounds
SEARCHED = 80  # batches of the epochs that divisions are compared by
DEVICE_BUFFERS = (4, 2, 1)
PINNED_SHARE = 0.25  # of the host's memory for prepared batches
RESERVED_CORES, MOST_WORKERS = 2, 14
RUNNERS_UP = 6
SPARE_SLOTS = 4  # prepared batches in host memory beyond one per worker


@dataclass(frozen=True)
class Setup:
    """Where things lie and how a step runs, with what training takes then.

    ``task``: the first of ``members`` tasks that share every batch, in the mode and precision of this setup.
    ``training``: cost of an epoch of all members without sampling and fetching, evaluation included.
    ``device_bytes``: with everything that is on the device. ``captured``: batches are padded to one size and steps
    replayed; else they have their own sizes and steps are launched one by one. ``condition``: what has to be set for it
    (empty: nothing). ``rough``: worked out from another setup, so that it is compared but not taken.
    """

    task: Task
    placement: Placement
    training: Cost
    device_bytes: int
    members: int = 1
    captured: bool = True
    condition: str = ""
    rough: bool = False


@dataclass(frozen=True)
class Candidate:
    """A setup, the division of its batches (None: one side prepares them), and what that takes.

    ``seconds`` of an epoch of all members; ``measured``: from measured phases.
    """

    setup: Setup
    seconds: float
    device_bytes: int
    division: Division | None = None
    host_bytes: int = 0
    simulation: Simulation | None = None
    times: PhaseTimes | None = None
    measured: bool = False

    @property
    def seconds_per_task(self) -> float:
        """Of an epoch."""
        return self.seconds / max(self.setup.members, 1)

    def words(self) -> str:
        """In one line."""
        setup, place = self.setup, self.setup.placement
        parts = ["whole graph"] if not setup.task.sampled else [f"sampled, {_places(place)}"]
        parts += [f"cache {show_bytes(place.cache_bytes)}"] if place.cache_bytes else []
        parts += [] if self.division is None else [self.division.words()]
        parts += [] if setup.captured or not setup.task.sampled else ["batches of their own sizes, steps not captured"]
        parts += [setup.task.precision] + ([f"{setup.members} tasks"] if setup.members > 1 else [])
        if setup.condition:
            parts.append(f"needs {setup.condition}")
        return "; ".join(parts)

    def figures(self) -> str:
        """Seconds and bytes in words."""
        host = f", {show_bytes(self.host_bytes)} pinned" if self.host_bytes else ""
        about = "about " if self.setup.rough else ""
        return f"{about}{show_seconds(self.seconds_per_task)} per epoch and task, {show_bytes(self.device_bytes)}{host}"


def _places(place: Placement) -> str:
    if place.features == place.topology:
        return f"features and edges: {place.features}"
    return f"features: {place.features}, edges: {place.topology}"


@dataclass(frozen=True)
class Choice:
    """The best candidate, the others by their seconds, and the reasons.

    ``simulated``: the best whose batches two sides prepare, if any. ``contender``: a rough one that would be faster
    than the best, if it proves true.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    why: tuple[str, ...]
    simulated: Candidate | None = None
    contender: Candidate | None = None


def choose(
    setups: Sequence[Setup],
    stats: GraphStats,
    machine: Machine,
    budget: int,
    measured: Callable[[Setup], PhaseTimes | None] = lambda setup: None,
    prefer: Callable[[Candidate], bool] = lambda candidate: False,
) -> Choice:
    """The fastest of ``setups`` within ``budget`` bytes of the device; ``prefer``: taken whatever its seconds.

    If nothing fits, the smallest is best and does not fit.
    """
    search = _Search(stats, machine, budget, measured)
    plain = [search.undivided(one) for one in setups]
    ranked = sorted((one for one in setups if search.divides(one)), key=search.bound)
    found = plain + [one for setup in ranked[:SIMULATED] for one in search.divided(setup)]
    drawn = min((one for one in found if one.simulation is not None), key=lambda one: one.seconds, default=None)
    sure = [one for one in found if not one.setup.condition and not one.setup.rough]
    allowed = [one for one in sure if one.device_bytes <= budget]
    rough = [one for one in found if one.setup.rough and not one.setup.condition and one.device_bytes <= budget]
    contender = min(rough, key=lambda one: one.seconds_per_task, default=None)
    if not allowed:
        smallest = min(sure or found, key=lambda one: one.device_bytes)
        told = ("nothing that was tried fits; this takes the least",)
        return Choice(smallest, _others(found, smallest), told, drawn, contender)
    best = min([one for one in allowed if prefer(one)] or allowed, key=lambda one: one.seconds_per_task)
    if contender is not None and (prefer(best) or contender.seconds_per_task >= best.seconds_per_task):
        contender = None
    return Choice(best, _others(found, best), _why(best, found, budget), drawn, contender)


def _others(found: Iterable[Candidate], best: Candidate) -> tuple[Candidate, ...]:
    ordered = sorted((one for one in found if one is not best), key=lambda one: one.seconds_per_task)
    return tuple(ordered[:RUNNERS_UP])


def _why(best: Candidate, found: Sequence[Candidate], budget: int) -> tuple[str, ...]:
    told = [f"chosen of {len(found)} ways to train: {best.words()} ({best.figures()})"]
    others = [one for one in found if one is not best]
    large = [one for one in others if one.device_bytes > budget and one.seconds_per_task < best.seconds_per_task]
    if large:
        fastest = min(large, key=lambda one: one.seconds_per_task)
        told.append(f"faster, but does not fit into {show_bytes(budget)}: {fastest.words()} ({fastest.figures()})")
    if best.division is not None and best.division.divided and best.simulation is not None:
        used = ", ".join(f"{name} {share:.0%}" for name, share in best.simulation.utilisation().items())
        told.append(f"busy meanwhile: {used}")
    return tuple(told)


def _shared(result: Partition) -> Division:
    """The best division in which the host has a part: what the device prepares alone is a candidate already."""
    tried = (division for division, _ in result.tried if division.host_batches)
    return result.division if result.division.host_batches else next(tried, result.division)


class _Search:
    def __init__(
        self, stats: GraphStats, machine: Machine, budget: int, measured: Callable[[Setup], PhaseTimes | None]
    ) -> None:
        self._stats, self._machine, self._budget, self._measured = stats, machine, budget, measured
        self._times: dict[int, tuple[PhaseTimes, bool]] = {}

    @property
    def _workers(self) -> list[int]:
        most = max(1, min(self._machine.cores - RESERVED_CORES, MOST_WORKERS))
        return sorted({max(most // 2, 1), most}, reverse=True)

    def divides(self, setup: Setup) -> bool:
        """Whether two sides can prepare its batches."""
        place = setup.placement
        return setup.task.sampled and self._machine.device == "cuda" and not place.on_device and place.read_by_gpu

    def undivided(self, setup: Setup) -> Candidate:
        """As one side does all of it."""
        cost = setup.training
        if self.divides(setup) and self.times(setup)[1]:
            registry, steps = built_in(setup.captured), steps_per_epoch(setup.task, self._stats)
            alone = simulate(Division(0, 2, beside=setup.captured), self.times(setup)[0], steps, registry)
            seconds = alone.seconds + cost.phases.get("evaluation", 0.0)
            return Candidate(setup, seconds, setup.device_bytes, measured=True)
        if setup.task.sampled:
            cost = with_batches(cost, setup.task, self._stats, setup.placement, self._machine)
        return Candidate(setup, cost.epoch_seconds, setup.device_bytes)

    def times(self, setup: Setup) -> tuple[PhaseTimes, bool]:
        """Phase times and whether they were measured."""
        if id(setup) not in self._times:
            known = self._measured(setup)
            self._times[id(setup)] = (known or self._predicted(setup), known is not None)
        return self._times[id(setup)]

    def _predicted(self, setup: Setup) -> PhaseTimes:
        steps = steps_per_epoch(setup.task, self._stats)
        about = (self._machine, setup.placement, setup.training, steps)
        return predicted_times(setup.task, self._stats, *about)

    def bound(self, setup: Setup) -> float:
        """Seconds of an epoch per task that no division goes below."""
        by_resource = loads(self.times(setup)[0], built_in(setup.captured), "gpu", self._workers[0])
        steps = steps_per_epoch(setup.task, self._stats)
        return steps * bound(by_resource, best_share(by_resource)) / max(setup.members, 1)

    def divided(self, setup: Setup) -> list[Candidate]:
        """The best division with all workers, and with fewer."""
        found = [self._partitioned(setup, workers) for workers in self._workers]
        return [one for one in found if one is not None]

    def _partitioned(self, setup: Setup, workers: int) -> Candidate | None:
        times, known = self.times(setup)
        size, registry = batch_bytes(setup.task, self._stats), built_in(setup.captured)
        left = (self._budget - setup.device_bytes) // max(size, 1) - 1
        device = next((count for count in DEVICE_BUFFERS if count <= left), None)
        pinned = int(PINNED_SHARE * self._machine.host_bytes // max(size, 1)) - 1
        if device is None or pinned < 1:
            return None
        limits = Limits(min(pinned, workers + SPARE_SLOTS), device, workers)
        steps = steps_per_epoch(setup.task, self._stats)
        division = _shared(partition(times, registry, min(steps, SEARCHED), limits))
        whole = simulate(division, times, steps, registry)
        evaluation = setup.training.phases.get("evaluation", 0.0)
        held = setup.device_bytes + (division.device_buffer + 1) * size
        host = division.pinned_batches * size
        return Candidate(setup, whole.seconds + evaluation, held, division, host, whole, times, known)


def batch_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of a batch at its largest: features and neighbours."""
    rows = min(task.batch, max(stats.num_train, 1))
    most, edges = rows, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        edges += most * max(fanout, 1)
        most = min(most * (max(fanout, 0) + 1), stats.num_nodes + rows)
    return most * (row_bytes(task, stats) + 4) + 8 * edges


def elsewhere(setup: Setup, placement: Placement, stats: GraphStats) -> Setup:
    """About what ``setup`` would take with features and edges elsewhere, without a dry run of its own."""
    moved = {
        "features": stats.num_nodes * row_bytes(setup.task, stats),
        "topology": 4 * stats.num_edges,
    }
    taken = setup.device_bytes - setup.placement.cache_bytes
    taken += batch_bytes(setup.task, stats) * (placement.overlap - setup.placement.overlap)
    for name, size in moved.items():
        before, after = getattr(setup.placement, name) == "gpu", getattr(placement, name) == "gpu"
        taken += size * (after - before)
    return replace(setup, placement=without_cache(placement), device_bytes=max(taken, 0), rough=True)


def without_cache(placement: Placement) -> Placement:
    """The same with everything in host memory and nothing of it cached."""
    place = {"cached": "host"}
    features, topology = (place.get(one, one) for one in (placement.features, placement.topology))
    return replace(placement, features=features, topology=topology, cache_bytes=0)
