"""What a group takes when its graph is spread over ranks: bytes per rank, seconds on links, and the speed-up.

A stated, simple model. Nodes are split into ranges of equally many edges, and neighbours are taken to be spread evenly
over the ranks (an order that keeps neighbours together does better). Then, for G ranks:

- an edge is remote with probability 1 - 1/G;
- a node with d out-edges is read by a given other rank with probability 1 - (1 - 1/G)^d, which gives the remote nodes
  h that a rank reads per exchange, each of them once;
- an exchange of F numbers per node moves 4 h F bytes into a rank, and waits for all ranks once;
- an epoch exchanges once per layer forward, once per layer but the first backward, once per layer in evaluation, and
  sums gradients of P weights, of which a rank receives 4 P (G - 1) bytes;
- compute of one device is divided by G; launches are not.

Bytes: values per node and edge are divided by G, weights and optimizer state are replicated, staging has two slots.

Sampled training has as many steps as on one device, each with 1/G of the batch's seeds on a rank:

- a rank's step takes what a step with so many seeds takes on one device, captured as there;
- of the features and edges that its part of a batch reads, 1 - 1/G come over the link, while the batch before trains;
- gradients are summed after every step: two barriers;
- an evaluation is that of the whole graph: compute divided by G, and one exchange per layer;
- a rank has all row offsets, where lists begin, degrees and a table of labels: some 36 bytes per node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.batch_sizes import expected_batch
from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import Task
from weft.core.units import show_bytes, show_seconds

REPLICATED = ("weight", "state", "rounding")  # kinds of value that every rank has in full
FLOAT = 4
PER_NODE = 36  # bytes of what every rank has of all nodes to sample


@dataclass(frozen=True)
class RankLink:
    """How ranks reach each other: bytes per second into one rank, seconds of a barrier, and where that is from."""

    name: str
    bytes_per_second: float
    barrier_seconds: float
    source: str

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_second / 1e9:.3g} GB/s into every rank at once and {show_seconds(self.barrier_seconds)} "
            f"per wait ({self.source}), neighbours spread evenly over the ranks"
        )


NVLINK4 = RankLink("nvlink", 450e9 * 0.8, 1.5e-5, "data sheet of NVLink 4 (450 GB/s each way), 80 % of it assumed")
INFINIBAND = RankLink("infiniband", 50e9 * 0.8, 3e-5, "data sheet of NDR InfiniBand (400 Gbit/s), 80 % of it assumed")
HOST_MEMORY = RankLink("host memory", 8e9, 1e-4, "assumed for CPU ranks of one host")


HOST_GPUS = 8  # of one host; more ranks than that reach each other over the network


def link_of(machine: Machine, ranks: int = 1) -> RankLink:
    """The link between ``ranks`` on machines like ``machine``: a measured one if it has one, else by its kind.

    Ranks beyond those of one host make all of them wait for the network between hosts.
    """
    if machine.device != "cuda":
        return HOST_MEMORY
    kind, default = ("nvlink", NVLINK4) if ranks <= HOST_GPUS else ("network", INFINIBAND)
    link = next((link for link in machine.links if link.kind == kind), None)
    if link is None:
        return default
    return RankLink(default.name, link.bytes_per_second, max(link.latency, 1e-5), link.source)


@dataclass(frozen=True)
class OverRanks:
    """How a group is spread. ``parameters``: of all its tasks; ``fixed_bytes``: of a rank besides tensors."""

    ranks: int
    link: RankLink
    parameters: int = 0
    fixed_bytes: int = 0


@dataclass(frozen=True)
class ShardingEstimate:
    """One epoch of a group over ``ranks``: of one rank, the one with most.

    ``remote_edges``: share of the edges. ``halo_nodes``: remote nodes that a rank reads. ``link_bytes`` and
    ``link_seconds``: into one rank per epoch, barriers included. ``epoch_seconds``: exchanges before aggregations, as
    ranks run today; ``overlapped_seconds``: if exchanges were hidden behind aggregations of local edges altogether.
    Of sampled training, ``halo_nodes``: nodes of other ranks in a rank's part of a batch, of ``batch_nodes``;
    ``epoch_seconds``: every batch is read before it trains, ``overlapped_seconds``: while the one before trains.
    ``assumes``: what is known of the link, and from where.
    """

    ranks: int
    link: str
    remote_edges: float
    halo_nodes: int
    bytes_per_rank: int
    link_bytes: int
    link_seconds: float
    epoch_seconds: float
    overlapped_seconds: float
    single_seconds: float
    assumes: str = ""
    batch_nodes: int = 0

    @property
    def speed_up(self) -> float:
        """Against one device."""
        return self.single_seconds / self.epoch_seconds if self.epoch_seconds else 1.0

    @property
    def overlapped_speed_up(self) -> float:
        """Against one device, with perfect overlap."""
        return self.single_seconds / self.overlapped_seconds if self.overlapped_seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "speed_up": self.speed_up, "overlapped_speed_up": self.overlapped_speed_up}

    def __str__(self) -> str:
        read, hidden = "remote nodes per rank", "exchanges overlap with local work"
        if self.batch_nodes:
            read = f"of {self.batch_nodes:,} nodes of a rank's part of a batch are remote"
            hidden = "the next batch is read while one trains"
        return (
            f"{self.ranks} ranks over {self.link}: {show_bytes(self.bytes_per_rank)} per rank, "
            f"{self.halo_nodes:,} {read} ({self.remote_edges:.0%} of the edges); "
            f"{show_bytes(self.link_bytes)} and {show_seconds(self.link_seconds)} on the link per epoch; "
            f"epoch {show_seconds(self.epoch_seconds)}, {self.speed_up:.2f}x one device "
            f"({self.overlapped_speed_up:.2f}x if {hidden}); assumes {self.assumes}"
        )


def remote_nodes(stats: GraphStats, ranks: int) -> int:
    """Remote nodes that one rank reads, expected, if neighbours are spread evenly."""
    if ranks == 1:
        return 0
    away = 1.0 - 1.0 / ranks
    if not stats.degree_histogram:
        read = stats.num_nodes * (1.0 - float(away ** (stats.num_edges / max(stats.num_nodes, 1))))
        return round(away * read)
    read = 0.0
    for bits, count in enumerate(stats.degree_histogram):
        degree = 1.0 if bits == 1 else 0.75 * 2**bits  # in the middle of a bin of the histogram
        read += count * (1.0 - float(away**degree)) if bits else 0.0
    return round(away * read)


def exchange_widths(task: Task, stats: GraphStats, first_once: bool = False) -> tuple[list[int], list[int]]:
    """Numbers per node in every exchange of an epoch: ``(forward, backward)``; evaluation repeats the forward ones.

    Attention adds its source scores. A layer aggregates on its narrower side.
    """
    heads = task.heads if task.traits is not None and task.traits.has_heads else 0
    widths = [stats.num_features, *[task.hidden] * (task.layers - 1), stats.num_classes]
    layers = [(outputs if heads else min(inputs, outputs)) + heads for inputs, outputs in itertools.pairwise(widths)]
    return layers[1:] if first_once else layers, layers[1:]


def estimate_sharding(
    tasks: Sequence[Task],
    cost: Cost,
    stats: GraphStats,
    over: OverRanks,
    first_once: bool = False,
    halo: int | None = None,
    remote_edges: float | None = None,
) -> ShardingEstimate:
    """One epoch of ``tasks`` on one graph over ranks; ``cost``: of the same on one device.

    ``halo`` and ``remote_edges``: remote nodes of a rank and share of the edges, if they were counted; else they are
    expected ones.
    """
    ranks, link = over.ranks, over.link
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks={ranks!r} must be a whole number, at least 1")
    halo = remote_nodes(stats, ranks) if halo is None else halo
    remote = 1.0 - 1.0 / ranks if remote_edges is None else remote_edges
    forward, backward, largest = 0, 0, 0
    exchanges = 0
    for task in tasks:
        ahead, back = exchange_widths(task, stats, first_once)
        forward, backward = forward + 2 * sum(ahead), backward + sum(back)
        largest, exchanges = largest + max([*ahead, *back], default=0), max(exchanges, 2 * len(ahead) + len(back))
    moved = FLOAT * halo * (forward + backward) + FLOAT * over.parameters * (ranks - 1)
    waits = (exchanges + 2) * link.barrier_seconds if ranks > 1 else 0.0
    link_seconds = moved / link.bytes_per_second + waits
    launches = min(cost.families.get("launch", 0.0), cost.epoch_seconds)
    compute = (cost.epoch_seconds - launches) / ranks
    local = compute * (1.0 - remote)
    hidden = min(moved / link.bytes_per_second, local)
    replicated = sum(cost.bytes.get(kind, 0) for kind in REPLICATED)
    divided = max(cost.peak_bytes - replicated, 0) // ranks
    staging = (2 * -(-stats.num_nodes // ranks) + halo) * largest * FLOAT if ranks > 1 else 0
    return ShardingEstimate(
        ranks=ranks,
        link=link.name,
        remote_edges=remote,
        halo_nodes=halo,
        bytes_per_rank=over.fixed_bytes + replicated + divided + staging,
        link_bytes=moved,
        link_seconds=link_seconds,
        epoch_seconds=launches + compute + link_seconds,
        overlapped_seconds=launches + compute + link_seconds - hidden,
        single_seconds=cost.epoch_seconds,
        assumes=str(link),
    )


def estimate_sampled_sharding(
    tasks: Sequence[Task], cost: Cost, part: Cost, stats: GraphStats, over: OverRanks, row_bytes: int
) -> ShardingEstimate:
    """One epoch of sampled ``tasks``, which share batches, over ranks; ``row_bytes``: of a node's features.

    ``cost``: of the same on one device; ``part``: of them with the seeds that a rank has of a batch, with a step for
    each such batch, evaluated on the whole graph.
    """
    ranks, link = over.ranks, over.link
    task, away, train = tasks[0], 1.0 - 1.0 / ranks, max(stats.num_train, 1)
    seeds, steps = min(task_part(task, ranks).batch, train), -(-train // task.batch)
    batch = expected_batch(stats, task.fanouts, seeds)
    evaluation = part.phases.get("evaluation", 0.0)
    step = (part.epoch_seconds - evaluation) / -(-train // seeds)
    read = away * (batch.nodes * row_bytes + FLOAT * sum(batch.edges))
    widths = [exchange_widths(each, stats)[0] for each in tasks]
    exchanged = FLOAT * remote_nodes(stats, ranks) * sum(map(sum, widths)) / task.eval_every
    moved = steps * (read + FLOAT * over.parameters * (ranks - 1)) + exchanged
    waits = (2 * steps + max(map(len, widths)) / task.eval_every) * link.barrier_seconds if ranks > 1 else 0.0
    link_seconds = moved / link.bytes_per_second + waits
    compute = steps * step + evaluation / ranks
    held = sum(part.bytes.get(kind, 0) for kind in ("graph", "input"))
    working = max(part.training_bytes - held, (part.peak_bytes - held) // ranks, 0)
    return ShardingEstimate(
        ranks=ranks,
        link=link.name,
        remote_edges=away,
        halo_nodes=round(away * batch.nodes),
        bytes_per_rank=over.fixed_bytes + held // ranks + PER_NODE * stats.num_nodes + working,
        link_bytes=round(moved),
        link_seconds=link_seconds,
        epoch_seconds=compute + link_seconds,
        overlapped_seconds=compute + link_seconds - steps * min(read / link.bytes_per_second, step),
        single_seconds=cost.epoch_seconds,
        assumes=str(link),
        batch_nodes=round(batch.nodes),
    )


def task_part(task: Task, ranks: int) -> Task:
    """``task`` with the seeds that a rank has of every batch."""
    return task.with_values(batch=-(-task.batch // ranks))
