"""Setup: where things lie and how a step runs, with what training takes then; and setups that follow from another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.placement import Placement
from weft.core.settings.fanout import picks_per_hop
from weft.core.task import Task
from weft.planner.division.buckets import Padding, padding
from weft.planner.sampling.transfers import row_bytes


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
    placement: Placement
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
