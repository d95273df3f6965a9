"""Partitioner: the share of batches that the trainer prepares itself: Equation 6 in closed form, then feedback.

The bound is the largest of a few straight lines in the share, so its minimum is at 0, at 1 or where two of them cross.
A share becomes an overlap of whole batches; from there one batch at a time moves to the side that the simulator
finds idle, until that gains nothing. A trainer that prepares beside training may also do so inside of its steps, where
those were measured: then it is decided during training which side prepares a batch, and the share is only where that
begins. Both ways are simulated, the first one further only if it begins ahead, since it has to save more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from weft.core.division import Division, PhaseTimes, Registry
from weft.planner.division.simulator import Load, Simulation, bound, loads, simulate

DEVICE_BATCHES = 10  # per overlap at most; MorphGL's gbs in all of its experiments
LARGEST = 4  # overlaps may have so many times as many device batches as their buffer holds, for shares near 1
NEAR = 0.01  # difference of shares that does not matter
MOST_ROUNDS = 24
GAIN = 0.002  # of an epoch that a move must save
PAYS = 0.04  # of an epoch that dividing must save: of small savings the simulator is not sure (10 % off on an H200)
UNSURE = 0.12  # more that dividing beside training must save over inside of steps: simulated 16 % too fast there
LEADS = (0.0, 0.5, 1.5)  # times the batches that the trainer makes while the host makes its first, tried beside those
MOST_LEAD = 0.34  # of an epoch


@dataclass(frozen=True)
class Limits:
    """The most batches that may wait in host and in device memory, the most workers, and how the device prepares.

    ``beside``, ``in_step``, ``lead`` and ``elastic`` as of a :class:`Division`; ``buckets``: sizes that batches are
    padded to.
    """

    host_buffer: int = 64
    device_buffer: int = DEVICE_BATCHES
    workers: int = 1
    beside: bool = False
    buckets: int = 1
    in_step: bool = False
    lead: int = 0
    elastic: bool = False


@dataclass(frozen=True)
class Partition:
    """A division, its simulation, and the divisions tried on the way with their seconds per batch."""

    division: Division
    simulation: Simulation
    tried: tuple[tuple[Division, float], ...] = ()


def best_share(by_resource: Mapping[str, Load]) -> float:
    """The share of the device with the lowest bound; of several, the smallest."""
    shares = {0.0, 1.0, *(share for pair in combinations(by_resource.values(), 2) for share in _crossing(*pair))}
    return min(sorted(shares), key=lambda share: (round(bound(by_resource, share), 15), share))


def _crossing(one: Load, other: Load) -> list[float]:
    slope = (one.device - one.host) - (other.device - other.host)
    if slope == 0:
        return []
    share = (other.host - one.host) / slope
    return [share] if 0.0 < share < 1.0 else []


def equation_6(times: PhaseTimes, registry: Registry, trainer: str, workers: int, in_step: bool = False) -> float:
    """The initial share; 0 or 1 where one route is missing, and 0 where training dominates (plain pipeline)."""
    if registry.device_route(trainer) is None:
        return 0.0
    if registry.host_route() is None:
        return 1.0
    return best_share(loads(times, registry, trainer, workers, in_step))


def first_batches(times: PhaseTimes, registry: Registry, trainer: str, workers: int, batches: int) -> int:
    """How many batches the trainer makes and trains on while the host prepares its first ones, all at once."""
    host, device = registry.host_route(), registry.device_route(trainer)
    if host is None or device is None:
        return 0
    alone = times.in_step()
    own = sum(alone.of(key).mean for key in (*device.keys, registry.training(trainer).key))
    first = sum(times.of(key, workers).mean for key in host.keys)
    return min(round(first / max(own, 1e-9)), int(MOST_LEAD * batches))


def overlap_for(share: float, limits: Limits, trainer: str, workers: int) -> Division:
    """The overlap of whole batches nearest to ``share`` within the buffers.

    MorphGL writes ``cbs = floor(x * gbs)`` and the ratio of CPU to GPU as ``1 : x``; of the two only
    ``cbs = gbs / x`` gives that ratio, so here the batches of the host follow from the share.
    """
    most_device, most_host = max(limits.device_buffer, 1), max(limits.host_buffer, 1)
    if share >= 1.0 - 1e-9:
        return Division(0, most_device, trainer=trainer, beside=limits.beside)
    if share <= 1e-9:
        return Division(1, 0, workers, limits.host_buffer, limits.device_buffer, False, trainer, limits.beside)
    pairs = [(_host_batches(device, share, most_host), device) for device in range(1, LARGEST * most_device + 1)]
    host, device = min(pairs, key=lambda pair: _mismatch(pair[0], pair[1], most_device, share))
    return divided(host, device, limits, trainer, workers)


def _host_batches(device: int, share: float, most: int) -> int:
    return min(max(round(device * (1.0 - share) / share), 1), most)


def _mismatch(host: int, device: int, most_device: int, share: float) -> tuple[bool, bool, float, int]:
    """Near ones that fit into the buffer first; of equally near ones the largest, which switches phases least."""
    off = abs(device / (host + device) - share)
    return off > NEAR, device > most_device, round(off, 3), -(host + device)


def divided(host: int, device: int, limits: Limits, trainer: str, workers: int) -> Division:
    """An overlap of both sides; the host's buffer holds its part of two overlaps where memory allows."""
    buffer = min(max(2 * host, workers + 1), max(limits.host_buffer, 1))
    most = max(limits.device_buffer, 1)
    if limits.elastic:
        buffer = max(limits.host_buffer, 1)  # batches that are done before their turn wait there
    whole = Division(host, device, workers, buffer, most, True, trainer, limits.beside)
    return replace(whole, in_step=limits.in_step, lead=limits.lead, elastic=limits.elastic)


def partition(
    times: PhaseTimes,
    registry: Registry,
    batches: int,
    limits: Limits,
    trainer: str = "gpu",
    workers: int | None = None,
) -> Partition:
    """The division for an epoch of ``batches``: the initial share, one-sided ones, and what feedback makes of them."""
    count = workers or limits.workers
    limits = replace(limits, beside=registry.beside(trainer), in_step=False, lead=0, elastic=False)

    def run(division: Division) -> Simulation:
        return simulate(replace(division, buckets=limits.buckets), times, batches, registry)

    ways = _ways(limits, times)
    search = _Search(run, trainer, count, UNSURE if len(ways) > 1 else 0.0)
    host, device = registry.host_route() is not None, registry.device_route(trainer) is not None
    if host:
        search.try_(overlap_for(0.0, limits, trainer, count))
    if device:
        search.try_(overlap_for(1.0, limits, trainer, count))
    if host and device:
        lead = first_batches(times, registry, trainer, count, batches) if limits.beside else 0
        for way in (replace(one, lead=lead) for one in ways):
            share = equation_6(times, registry, trainer, count, way.in_step)
            search.refine(overlap_for(share, way, trainer, count), way)
    return search.best()


def _ways(limits: Limits, times: PhaseTimes) -> list[Limits]:
    """How the device may prepare its part: as registered, and inside of its steps where those were measured."""
    inside = limits.beside and bool(times.captured) and limits.buckets == 1
    return ([replace(limits, beside=False, in_step=True, elastic=True)] if inside else []) + [limits]


class _Search:
    """Divisions that were simulated, and the moves between them."""

    def __init__(self, run: Callable[[Division], Simulation], trainer: str, workers: int, unsure: float) -> None:
        self._run, self._trainer, self._workers, self._unsure = run, trainer, workers, unsure
        self._found: dict[Division, Simulation] = {}

    def try_(self, division: Division) -> Simulation:
        if division not in self._found:
            self._found[division] = self._run(division)
        return self._found[division]

    def refine(self, division: Division, limits: Limits) -> None:
        """Move one batch of the overlap to the idle side until that gains nothing; try smaller overlaps likewise.

        Then other numbers of batches that the device begins with.
        """
        if not division.divided or self._hopeless(division):
            return
        if division.elastic:
            self.try_(division)
            return
        ends = [self._moved(start, limits) for start in (division, self._smaller(division, limits))]
        best = min(ends, key=lambda one: one.seconds_per_batch).division
        for times in LEADS if limits.lead else ():
            self.try_(replace(best, lead=round(times * limits.lead)))

    def _hopeless(self, division: Division) -> bool:
        """Whether a division in a way that has to save more than another begins behind what was found."""
        doubt = self._unsure if division.beside else 0.0
        fastest = min(one.seconds_per_batch for one in self._found.values())
        return doubt > 0.0 and self.try_(division).seconds_per_batch > fastest

    def _moved(self, start: Division, limits: Limits) -> Simulation:
        here = self.try_(start)
        for _ in range(MOST_ROUNDS):
            moved = [self.try_(one) for one in self._moves(here, limits)]
            best = min(moved, key=lambda one: one.seconds_per_batch, default=here)
            if best.seconds_per_batch >= here.seconds_per_batch * (1.0 - GAIN):
                break
            here = best
        return here

    def _moves(self, here: Simulation, limits: Limits) -> list[Division]:
        """One batch more for the idle side, or one less for the busy one."""
        host, device = here.division.host_batches, here.division.device_batches
        step = 1 if here.host_is_late else -1  # towards the device if the host is late
        pairs = [(host - step, device), (host, device + step), (host - step, device + step)]
        return [self._overlap(*pair, limits) for pair in pairs if _allowed(*pair, limits)]

    def _smaller(self, division: Division, limits: Limits) -> Division:
        host, device = max(division.host_batches // 2, 1), max(division.device_batches // 2, 1)
        return self._overlap(host, device, limits)

    def _overlap(self, host: int, device: int, limits: Limits) -> Division:
        return divided(host, device, limits, self._trainer, self._workers)

    def best(self) -> Partition:
        """The fastest, a one-sided one unless dividing pays; of nearly equal ones the one with smaller buffers."""

        def seconds(one: Simulation) -> float:
            doubt = PAYS + self._unsure * one.division.beside if one.division.divided else 0.0
            return one.seconds_per_batch * (1.0 + doubt)

        fastest = min(map(seconds, self._found.values()))
        near = [one for one in self._found.values() if seconds(one) <= fastest * (1.0 + GAIN)]
        chosen = min(near, key=lambda one: (one.division.divided, one.division.overlap, one.division.host_buffer))
        runs = self._found.values()
        tried = sorted(((run.division, run.seconds_per_batch) for run in runs), key=lambda pair: pair[1])
        return Partition(chosen.division, chosen, tuple(tried))


def _allowed(host: int, device: int, limits: Limits) -> bool:
    most = LARGEST * max(limits.device_buffer, 1)
    return 1 <= host <= max(limits.host_buffer, 1) and 1 <= device <= most
