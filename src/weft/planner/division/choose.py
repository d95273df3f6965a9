"""choose: the fastest way to train a group within a byte budget, its runners-up, and why.

The search is over setups (the whole graph or sampled batches, where features and edges lie, the cache, how steps are
captured, precision, how many tasks share a batch) and, for batches that two sides can prepare, over workers, the ratio
of the sides, the buffers between them and the sizes that batches are padded to. Bounds in closed form come first; only
the best are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.batch_sizes import MOST_BUCKETS, LargeBatch, bucket_shares, bucket_sizes
from weft.core.cost import Cost
from weft.core.division import Division, PhaseTimes, built_in
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import DataPlacement
from weft.core.settings import picks_per_hop
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds
from weft.planner.division.partitioner import Limits, Partition, best_share, partition
from weft.planner.division.predicted_times import predicted_times
from weft.planner.division.simulator import Simulation, bound, loads, simulate
from weft.planner.placement import steps_per_epoch
from weft.planner.transfers import row_bytes, with_batches

# ---- Batch buckets: what padding to several sizes saves of training, and what its recordings take.
#
# Rows that only pad are multiplied, activated and stored like others; edges that do not exist are not followed. So of
# a
# captured step the products and pointwise passes shrink with the rows of the size that a batch is padded to, and the
# aggregations and launches stay. Every size more is another recording.

RECORDING_SECONDS = 0.4  # of a warm-up and a capture of a step: 0.3 s were measured on an H200 for a stacked GCN
FOLLOWS_EDGES = ("spmm", "attention", "scatter", "launch")  # families of operators that padding rows do not lengthen


@dataclass(frozen=True)
class Padding:
    """Batches in ``buckets`` sizes: the share of the largest size's rows that is computed, on average.

    ``training``: what is left of the training's seconds; ``device_bytes``: of the inputs of the recordings beyond the
    first; ``seconds``: of making those, once.
    """

    buckets: int
    rows: float
    training: float
    device_bytes: int
    seconds: float

    def per_epoch(self, epochs: int) -> float:
        """Seconds of recordings that an epoch pays for."""
        return self.seconds / max(epochs, 1)


def padding(task: Task, stats: GraphStats, training: Cost, buckets: int) -> Padding:
    """Of the batches of ``task``; ``training``: cost of an epoch with batches of one size."""
    seeds = min(task.batch, max(stats.num_train, 1))
    sizes = bucket_sizes(stats, task.fanouts, seeds, buckets)
    whole = max(sum(sizes[-1].rows), 1)
    rows = sum(share * sum(size.rows) / whole for share, size in zip(bucket_shares(buckets), sizes, strict=True))
    padded = _padded_share(training.families)
    held = sum(_bytes(size, row_bytes(task, stats)) for size in sizes[:-1])
    return Padding(buckets, rows, 1.0 - padded * (1.0 - rows), held, (buckets - 1) * RECORDING_SECONDS)


def _padded_share(families: Mapping[str, float]) -> float:
    """Of the seconds by family of operator those that grow with the rows; half of them if no families are known."""
    whole = sum(families.values())
    if not whole:
        return 0.5
    return sum(seconds for name, seconds in families.items() if name not in FOLLOWS_EDGES) / whole


def _bytes(size: LargeBatch, row: int) -> int:
    return size.nodes * (row + 4) + 4 * (sum(size.rows) + sum(size.edges))


# ---- Setup: where things lie and how a step runs, with what training takes then; and setups that follow from another.


@dataclass(frozen=True)
class Setup:
    """Where things lie and how a step runs, with what training takes then.

    ``task``: the first of ``members`` tasks that share every batch, in the mode and precision of this setup.
    ``training``: cost of an epoch of all members without sampling and fetching, evaluation included.
    ``device_bytes``: with everything that is on the device. ``captured``: batches are padded to one size and steps
    replayed; else they have their own sizes and steps are launched one by one. ``condition``: what has to be set for it
    (empty: nothing). ``rough``: worked out from another setup, so that it is compared but not taken. ``padding``: to
    several sizes instead of one, with what that leaves of the training (None: to one); ``one_size``: the same without.
    """

    task: Task
    placement: DataPlacement
    training: Cost
    device_bytes: int
    members: int = 1
    captured: bool = True
    condition: str = ""
    rough: bool = False
    padding: Padding | None = None
    one_size: Setup | None = None

    @property
    def buckets(self) -> int:
        """Sizes that batches are padded to."""
        return 1 if self.padding is None else self.padding.buckets


def batch_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of a batch at its largest: features and neighbours."""
    rows = min(task.batch, max(stats.num_train, 1))
    most, edges = rows, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        edges += most * max(fanout, 1)
        most = min(most * (max(fanout, 0) + 1), stats.num_nodes + rows)
    return most * (row_bytes(task, stats) + 4) + 8 * edges


def elsewhere(setup: Setup, placement: DataPlacement, stats: GraphStats) -> Setup:
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


def without_cache(placement: DataPlacement) -> DataPlacement:
    """The same with everything in host memory and nothing of it cached."""
    place = {"cached": "host"}
    features, topology = (place.get(one, one) for one in (placement.features, placement.topology))
    return replace(placement, features=features, topology=topology, cache_bytes=0)


def may_have_buckets(setup: Setup, stats: GraphStats) -> bool:
    """Whether its batches can be padded to several sizes: captured steps of Weft's models, a number per hop."""
    task = setup.task
    plain = all(isinstance(hop, int) and hop > 0 for hop in task.fanouts) and not stats.relation_edges
    return setup.captured and plain and task.traits is not None and not setup.rough and not setup.condition


def with_buckets(setup: Setup, stats: GraphStats, buckets: int) -> Setup:
    """The same with batches padded to one of ``buckets`` sizes, at least 2."""
    about, before = padding(setup.task, stats, setup.training, buckets), setup.training
    kept = {name: 1.0 if name == "evaluation" else about.training for name in before.phases}
    phases = {name: seconds * kept[name] for name, seconds in before.phases.items()}
    left = sum(phases.values()) / max(sum(before.phases.values()), 1e-12)
    seconds, families = (
        {name: amount * left for name, amount in amounts.items()} for amounts in (before.seconds, before.families)
    )
    training = replace(before, phases=phases, seconds=seconds, families=families)
    taken = setup.device_bytes + about.device_bytes
    return replace(setup, training=training, device_bytes=taken, padding=about, one_size=setup)


# ---- Candidate: one way to train a group, with the seconds and bytes that it takes.


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


def _places(place: DataPlacement) -> str:
    if place.features == place.topology:
        return f"features and edges: {place.features}"
    return f"features: {place.features}, edges: {place.topology}"


SIMULATED = 3  # of the setups with the lowest bounds
ALSO_SIMULATED = 1  # of those that need a setting: named, never taken, so they take no place from the others
SEARCHED = 80  # batches of the epochs that divisions are compared by
DEVICE_BUFFERS = (4, 2, 1)
PINNED_SHARE = 0.25  # of the host's memory for prepared batches
RESERVED_CORES, MOST_WORKERS = 2, 14
RUNNERS_UP = 6
BUCKETS_GAIN = 0.1  # of an epoch that batches of several sizes must be predicted to save: nobody has measured them yet
SPARE_SLOTS = 4  # prepared batches in host memory beyond one per worker
# Batches of the host's on the device beside those that wait there: what steps are captured on, the one in training, and
# one whose memory is not free yet. With one alone 13.5 GB were taken where 12.9 were predicted (H200, papers100M).
BESIDE_WAITING = 3


@dataclass(frozen=True)
class Choice:
    """The best candidate, the others by their seconds, and the reasons.

    ``simulated``: the best whose batches two sides prepare, if any. ``contender``: a rough one that would be faster
    than the best, if it proves true. ``ways``: all of them, in no order.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    why: tuple[str, ...]
    simulated: Candidate | None = None
    contender: Candidate | None = None
    ways: tuple[Candidate, ...] = ()


def choose(
    setups: Sequence[Setup],
    stats: GraphStats,
    machine: Machine,
    budget: int,
    measured: Callable[[Setup], PhaseTimes | None] = lambda setup: None,
    prefer: Callable[[Candidate], bool] = lambda candidate: False,
    search: Search | None = None,
) -> Choice:
    """The fastest of ``setups`` within ``budget`` bytes of the device; ``prefer``: taken whatever its seconds.

    If nothing fits, the smallest is best and does not fit. ``search``: of an earlier call with the same arguments,
    whose simulations are not repeated.
    """
    search = search or Search(stats, machine, budget, measured)
    plain = [search.undivided(one) for one in setups]
    ranked = _to_simulate(setups, search)
    found = plain + [one for place, setup in enumerate(ranked) for one in search.divided(setup, every=not place)]
    drawn = min((one for one in found if one.simulation is not None), key=lambda one: one.seconds, default=None)
    sure = [one for one in found if not one.setup.condition and not one.setup.rough]
    allowed = [one for one in sure if one.device_bytes <= budget]
    rough = [one for one in found if one.setup.rough and not one.setup.condition and one.device_bytes <= budget]
    contender = min(rough, key=lambda one: one.seconds_per_task, default=None)
    if not allowed:
        smallest = min(sure or found, key=lambda one: one.device_bytes)
        told = ("nothing that was tried fits; this takes the least",)
        return Choice(smallest, _others(found, smallest), told, drawn, contender, tuple(found))
    best = min([one for one in allowed if prefer(one)] or allowed, key=worth)
    if contender is not None and (prefer(best) or contender.seconds_per_task >= best.seconds_per_task):
        contender = None
    asked = best.setup.task.sampled and any(may_have_buckets(one, stats) for one in ranked)
    why = (*_why(best, found, budget), *(_about_buckets(best, found, budget) if asked else ()))
    return Choice(best, _others(found, best), why, drawn, contender, tuple(found))


def _to_simulate(setups: Sequence[Setup], search: Search) -> list[Setup]:
    """Setups whose batches two sides can prepare, those with the lowest bounds, also with batches of several sizes.

    Those that leave no room for batches on the device would take the place of others: the larger a cache, the lower
    the bound.
    """
    ranked = sorted((one for one in setups if search.divides(one) and search.device_buffer(one)), key=search.bound)
    free = [one for one in ranked if not one.condition][:SIMULATED]
    padded = [one for one in map(search.in_buckets, free) if one is not None]
    return free + padded + [one for one in ranked if one.condition][:ALSO_SIMULATED]


def worth(one: Candidate) -> float:
    """Seconds that a candidate is chosen by: several sizes of batches have to be worth their recordings for sure."""
    return one.seconds_per_task / (1.0 if one.setup.padding is None else 1.0 - BUCKETS_GAIN)


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


def _about_buckets(best: Candidate, found: Sequence[Candidate], budget: int) -> list[str]:
    """Padding against recordings."""
    tried = [one for one in found if one.setup.padding is not None]
    chosen = best if best.setup.padding is not None else min(tried, key=lambda one: one.seconds_per_task, default=None)
    if chosen is None or chosen.setup.padding is None:
        return ["batches are padded to one size: with more of them the busiest resource is no less busy"]
    about, epochs = chosen.setup.padding, chosen.setup.task.epochs
    told = f"{about.buckets} sizes have {about.rows:.0%} of the rows and {about.buckets - 1} more to record"
    told += f" ({show_seconds(about.per_epoch(epochs))} of each of {epochs} epochs)"
    if chosen is best:
        return [f"batches are padded to one of {about.buckets} sizes, not to one: {told}"]
    gains = chosen.seconds_per_task < best.seconds_per_task
    reason = f"which saves less than {BUCKETS_GAIN:.0%}" if gains else "which is slower"
    reason = "which does not fit" if chosen.device_bytes > budget else reason
    return [f"batches are padded to one size: {told}, {chosen.figures()}, {reason}"]


def _shared(result: Partition) -> Division:
    """The best division in which the host has a part: what the device prepares alone is a candidate already."""
    if result.division.buckets > 1:  # only by itself in captured steps, of one size
        return result.division
    tried = (division for division, _ in result.tried if division.host_batches)
    return result.division if result.division.host_batches else next(tried, result.division)


class Search:
    """What setups take on ``machine``, and the divisions that were simulated for them."""

    def __init__(
        self, stats: GraphStats, machine: Machine, budget: int, measured: Callable[[Setup], PhaseTimes | None]
    ) -> None:
        self._stats, self._machine, self._budget, self._measured = stats, machine, budget, measured
        self._times: dict[int, tuple[PhaseTimes, bool]] = {}  # by identity
        self._kept: list[Setup] = []  # of those, so that no other has it
        self._sized: dict[int, Setup | None] = {}  # the same with batches of several sizes, by identity
        self._divided: dict[tuple[int, int], Candidate | None] = {}  # by identity and workers

    @property
    def _workers(self) -> list[int]:
        most = max(1, min(self._machine.cores - RESERVED_CORES, MOST_WORKERS))
        return sorted({max(most // 2, 1), most}, reverse=True)

    def divides(self, setup: Setup) -> bool:
        """Whether two sides can prepare its batches."""
        place = setup.placement
        return setup.task.sampled and self._machine.device == "cuda" and not place.on_device and place.read_by_gpu

    def device_buffer(self, setup: Setup) -> int:
        """How many batches of the host's may wait on the device; 0 if there is no room for any."""
        left = (self._budget - setup.device_bytes) // max(batch_bytes(setup.task, self._stats), 1) - BESIDE_WAITING
        return next((count for count in DEVICE_BUFFERS if count <= left), 0)

    def undivided(self, setup: Setup) -> Candidate:
        """As one side does all of it."""
        cost = setup.training
        if self.divides(setup) and self.times(setup)[1]:
            registry, steps = built_in(setup.captured), steps_per_epoch(setup.task, self._stats)
            sides = Division(0, 2, beside=setup.captured)
            alone = simulate(sides, self.times(setup)[0], steps, registry, most=SEARCHED)
            seconds = alone.seconds + cost.phases.get("evaluation", 0.0)
            return Candidate(setup, seconds, setup.device_bytes, measured=True)
        if setup.task.sampled:
            cost = with_batches(cost, setup.task, self._stats, setup.placement, self._machine)
        return Candidate(setup, cost.epoch_seconds, setup.device_bytes)

    def times(self, setup: Setup) -> tuple[PhaseTimes, bool]:
        """Phase times and whether they were measured."""
        if id(setup) not in self._times:
            known = self._measured(setup)
            self._times[id(setup)] = (known or self._with_padding(setup) or self._predicted(setup), known is not None)
            self._kept.append(setup)
        return self._times[id(setup)]

    def _with_padding(self, setup: Setup) -> PhaseTimes | None:
        """What was measured with batches of one size, with what several sizes leave of the training."""
        if setup.padding is None or setup.one_size is None:
            return None
        known = self._measured(setup.one_size)
        return None if known is None else known.scaled(training_gpu=setup.padding.training)

    def _predicted(self, setup: Setup) -> PhaseTimes:
        steps = steps_per_epoch(setup.task, self._stats)
        about = (self._machine, setup.placement, setup.training, steps)
        return predicted_times(setup.task, self._stats, *about)

    def bound(self, setup: Setup) -> float:
        """Seconds of an epoch per task that no division goes below."""
        by_resource = loads(self.times(setup)[0], built_in(setup.captured), "gpu", self._workers[0])
        steps = steps_per_epoch(setup.task, self._stats)
        seconds = steps * bound(by_resource, best_share(by_resource)) + self._recordings(setup)
        return seconds / max(setup.members, 1)

    @staticmethod
    def _recordings(setup: Setup) -> float:
        """Seconds of an epoch that recordings of more than one size take."""
        return 0.0 if setup.padding is None else setup.padding.per_epoch(setup.task.epochs)

    def in_buckets(self, setup: Setup) -> Setup | None:
        """The same with batches of the number of sizes that has the lowest bound; None if that is one."""
        if not may_have_buckets(setup, self._stats):
            return None
        if id(setup) not in self._sized:
            self._kept.append(setup)
            ways = [setup, *(with_buckets(setup, self._stats, count) for count in range(2, MOST_BUCKETS + 1))]
            best = min(ways, key=self.bound)
            self._sized[id(setup)] = None if best is setup else best
        return self._sized[id(setup)]

    def _beyond_simulation(self, setup: Setup) -> float:
        """How many times as long the device alone is predicted to take as it is simulated: 1 if phases were measured.

        Batches of several sizes are simulated, those of one size are not before they are measured.
        """
        if setup.one_size is None:
            return 1.0
        steps, base = steps_per_epoch(setup.task, self._stats), setup.one_size
        alone = Division(0, 2, beside=True)
        simulated = simulate(alone, self.times(base)[0], steps, built_in(setup.captured), most=SEARCHED).seconds
        evaluation = base.training.phases.get("evaluation", 0.0)
        return max(self.undivided(base).seconds - evaluation, 0.0) / max(simulated, 1e-12)

    def divided(self, setup: Setup, every: bool = True) -> list[Candidate]:
        """The best division with all workers, and with fewer if ``every``."""
        found = [self._once(setup, workers) for workers in self._workers[: None if every else 1]]
        return list({one.division: one for one in reversed(found) if one is not None}.values())[::-1]

    def _once(self, setup: Setup, workers: int) -> Candidate | None:
        if (id(setup), workers) not in self._divided:
            self._kept.append(setup)
            self._divided[id(setup), workers] = self._partitioned(setup, workers)
        return self._divided[id(setup), workers]

    def _partitioned(self, setup: Setup, workers: int) -> Candidate | None:
        times, known = self.times(setup)
        size, registry = batch_bytes(setup.task, self._stats), built_in(setup.captured)
        device = self.device_buffer(setup)
        pinned = int(PINNED_SHARE * self._machine.host.memory_bytes // max(size, 1)) - 1
        if not device or pinned < 1:
            return None
        limits = Limits(min(pinned, workers + SPARE_SLOTS), device, workers, buckets=setup.buckets)
        steps = steps_per_epoch(setup.task, self._stats)
        division = _shared(partition(times, registry, min(steps, SEARCHED), limits))
        whole = simulate(division, times, steps, registry, most=SEARCHED)
        seconds = whole.seconds * (self._beyond_simulation(setup) if not division.host_batches else 1.0)
        more = setup.training.phases.get("evaluation", 0.0) + self._recordings(setup)
        held = setup.device_bytes + (division.device_buffer + BESIDE_WAITING) * size
        host = division.pinned_batches * size
        return Candidate(setup, seconds + more, held, division, host, whole, times, known)
