"""Partition batches between host and device: Equation 6 in closed form, then the simulator's feedback.

The bound on an epoch is the largest of a few straight lines in the share of the device, so its minimum is at 0, at 1 or
where two of them cross. A share becomes an overlap of whole batches. An elastic division only begins with that share.
Of a fixed one, one batch at a time moves to the side that the simulator finds idle, until that gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from weft.core.division import Division, PhaseTimes, Registry
from weft.planner.division.simulator import Load, Simulation, bound, loads, simulate

DEVICE_BATCHES = 10  # per overlap at most; MorphGL's gbs in all of its experiments
LARGEST = 4  # overlaps may have so many times as many device batches as their buffer holds, for shares near 1
NEAR = 0.01  # difference of shares that does not matter
MOST_ROUNDS = 24
GAIN = 0.002  # of an epoch that a move must save
PAYS = 0.04  # of an epoch that dividing must save: of small savings the simulator is not sure (10 % off on an H200)
MOST_LEAD = 0.34  # of an epoch


@dataclass(frozen=True)
class Limits:
    """The most batches that may wait in host and in device memory, and the most workers.

    ``strategy`` as of a :class:`Division`; ``share`` of the device, if it is given and not to be searched.
    """

    host_buffer: int = 64
    device_buffer: int = DEVICE_BATCHES
    workers: int = 1
    strategy: str = "elastic"
    share: float | None = None


@dataclass(frozen=True)
class Partition:
    """A division, its simulation, and all simulated divisions with their seconds per batch, the fastest first."""

    division: Division
    simulation: Simulation
    tried: tuple[tuple[Division, float], ...] = ()


def best_share(by_resource: Mapping[str, Load]) -> float:
    """The share of the device with the lowest bound; of several, the smallest."""
    shares = {0.0, 1.0}
    for a, b in combinations(by_resource.values(), 2):
        slope = (a.device - a.host) - (b.device - b.host)
        if slope != 0 and 0.0 < (b.host - a.host) / slope < 1.0:
            shares.add((b.host - a.host) / slope)
    return min(sorted(shares), key=lambda share: (round(bound(by_resource, share), 15), share))


def equation_6(times: PhaseTimes, registry: Registry, trainer: str, workers: int, elastic: bool = False) -> float:
    """The initial share; 0 or 1 if one route is missing, and 0 if training dominates (plain pipeline)."""
    if not registry.device_route(trainer):
        return 0.0
    if not registry.host_route():
        return 1.0
    return best_share(loads(times, registry, trainer, workers, elastic))


def overlap_for(share: float, limits: Limits, trainer: str = "gpu", lead: int = 0) -> Division:
    """The overlap of whole batches nearest to ``share`` within the buffers.

    MorphGL writes ``cbs = floor(x * gbs)`` and the ratio of CPU to GPU as ``1 : x``; of the two only
    ``cbs = gbs / x`` gives that ratio, so here the batches of the host follow from the share.
    """
    most_device, most_host = max(limits.device_buffer, 1), max(limits.host_buffer, 1)
    if share >= 1.0 - 1e-9:
        return Division(0, most_device, trainer=trainer, strategy=limits.strategy)
    if share <= 1e-9:
        return Division(1, 0, limits.workers, limits.host_buffer, limits.device_buffer, trainer, limits.strategy)

    def mismatch(pair: tuple[int, int]) -> tuple[bool, bool, float, int]:
        """Near ones that fit into the buffer first; of equally near ones the largest, which switches phases least."""
        off = abs(pair[1] / sum(pair) - share)
        return off > NEAR, pair[1] > most_device, round(off, 3), -sum(pair)

    counts = range(1, LARGEST * most_device + 1)
    pairs = [(min(max(round(count * (1.0 - share) / share), 1), most_host), count) for count in counts]
    return _overlap(*min(pairs, key=mismatch), limits, trainer, lead)


def _overlap(host: int, device: int, limits: Limits, trainer: str, lead: int = 0) -> Division:
    """Both sides. The host's buffer holds two overlaps if memory allows; of an elastic one, all that memory allows."""
    most = max(limits.host_buffer, 1)
    buffer = min(max(2 * host, limits.workers + 1), most) if limits.strategy == "fixed" else most
    return Division(host, device, limits.workers, buffer, max(limits.device_buffer, 1), trainer, limits.strategy, lead)


def partition(times: PhaseTimes, registry: Registry, batches: int, limits: Limits, trainer: str = "gpu") -> Partition:
    """The division for an epoch of ``batches``: the initial share, one-sided ones, and the result of feedback."""
    simulations: dict[Division, Simulation] = {}

    def run(division: Division) -> Simulation:
        if division not in simulations:
            simulations[division] = simulate(division, times, batches, registry)
        return simulations[division]

    def refined(here: Simulation) -> None:
        """Move one batch of the overlap to the idle side until that gains nothing."""
        for _ in range(MOST_ROUNDS):
            host, device = here.division.host_batches, here.division.device_batches
            step = 1 if here.host_is_late else -1  # towards the device if the host is late
            pairs = [(host - step, device), (host, device + step), (host - step, device + step)]
            moves = [
                run(_overlap(*pair, limits, trainer))
                for pair in pairs
                if 1 <= pair[0] <= max(limits.host_buffer, 1) and 1 <= pair[1] <= LARGEST * max(limits.device_buffer, 1)
            ]
            best = min(moves, key=lambda moved: moved.seconds_per_batch, default=here)
            if best.seconds_per_batch >= here.seconds_per_batch * (1.0 - GAIN):
                return
            here = best

    host, device = registry.host_route(), registry.device_route(trainer)
    if host:
        run(overlap_for(0.0, limits, trainer))
    if device:
        run(overlap_for(1.0, limits, trainer))
    start = None
    if host and device:
        elastic = limits.strategy == "elastic"
        lead = 0
        if elastic:  # as many as the trainer makes and trains on while the host prepares its first ones, all at once
            own = sum(times.in_step().of(each.key).mean for each in (*device, registry.training(trainer)))
            first = sum(times.of(each.key, limits.workers).mean for each in host)
            lead = min(round(first / max(own, 1e-9)), int(MOST_LEAD * batches))
        share = limits.share
        if share is None:
            share = equation_6(times, registry, trainer, limits.workers, elastic)
        start = run(overlap_for(share, limits, trainer, lead))
        if not elastic and limits.share is None and start.division.divided:
            refined(start)
            whole = start.division
            refined(run(_overlap(max(whole.host_batches // 2, 1), max(whole.device_batches // 2, 1), limits, trainer)))
    if limits.share is None or start is None:
        start = _best(list(simulations.values()))
    tried = sorted(((each.division, each.seconds_per_batch) for each in simulations.values()), key=lambda pair: pair[1])
    return Partition(start.division, start, tuple(tried))


def _best(simulations: list[Simulation]) -> Simulation:
    """The fastest, a one-sided one unless dividing pays; of nearly equal ones the one with smaller buffers."""
    seconds = [each.seconds_per_batch * (1.0 + PAYS * each.division.divided) for each in simulations]
    near = [
        each for each, penalised in zip(simulations, seconds, strict=True) if penalised <= min(seconds) * (1.0 + GAIN)
    ]
    return min(near, key=lambda each: (each.division.divided, each.division.overlap, each.division.host_buffer))
