"""Where features and edges may lie, the best first, and the sentences that a plan says about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.core.batch_sizes import expected_batch, large_batch
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.placement import EVALUATION_EDGES, DataPlacement, on_device
from weft.core.plan import Stage
from weft.core.run_options import Placement
from weft.core.settings import picks_per_hop, show_hop
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.core.wording import option
from weft.planner.cost.roofline import FULL, PaddingShare
from weft.planner.transfers import BatchTraffic, cached_rows, row_bytes

CHUNKS = (EVALUATION_EDGES, EVALUATION_EDGES >> 2, EVALUATION_EDGES >> 4)  # edges of a chunk, tried in this order
WORTH_CACHING = 0.02  # of the features: a smaller cache is not worth its table
HOST_SHARE = 0.9  # of the host's memory that features may take
MOST_ROWS = 1 << 16  # nodes of a chunk


def candidates(task: Task, stats: GraphStats, machine: Machine, options: Placement) -> Iterator[DataPlacement]:
    """Placements to try, each taking less of the device than the one before; caches still without any bytes."""
    if machine.device != "cuda":  # a CPU has memory and files; a cache may stand before the files
        topology = options.topology or "host"
        if options.features == "cached" or options.cache is not None or options.cache_policy is not None:
            yield DataPlacement("cached", topology, policy=policy_of(options, False))
        else:
            yield replace(on_device("cpu"), features=options.features or "host", topology=topology)
        return
    if options.sampler != "default" and options.topology == "disk":
        on_disk = option("topology", "disk")
        raise SpecError(f"{option('sampler', options.sampler)} needs edges that a GPU reads, not {on_disk}")
    cached = options.cache is not None or options.cache_policy is not None
    host = "disk" if feature_bytes(task, stats) > HOST_SHARE * machine.host.memory_bytes > 0 else "cached"
    features = [options.features or ("cached" if cached else "gpu")]
    features += [host] if options.features is None and not cached else []
    edges = [options.topology or "gpu"]
    edges += ["host"] if options.topology is None else []
    policy = policy_of(options, "cached" in edges)
    for topology in edges:
        for tier in features if topology == edges[0] else features[-1:]:
            placement = DataPlacement(tier, topology, policy=policy, sampler=options.sampler)
            placement = replace(placement, overlap=options.overlap and placement.read_by_gpu)
            if placement.on_device:
                yield placement
            if task.traits is not None:
                yield from (replace(placement, evaluation="layers", chunk_edges=edges) for edges in CHUNKS)
            elif not placement.on_device:
                yield placement


def policy_of(options: Placement, lists: bool) -> str:
    """What chooses what a cache holds: as given, or by degree; by benefit where neighbour lists are cached as well."""
    policy = options.cache_policy
    name = policy if policy is None or isinstance(policy, str) else type(policy).__name__
    if lists and name in ("degree", "presampling"):
        raise SpecError(
            f"{option('topology', 'cached')} with {option('cache_policy', name)}: only 'benefit' (or a policy of your "
            "own) ranks neighbour lists"
        )
    return name or ("benefit" if lists else "degree")


def feature_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of all features as batches gather them."""
    return stats.num_nodes * row_bytes(task, stats)


def with_cache(placement: DataPlacement, task: Task, stats: GraphStats, options: Placement, room: int) -> DataPlacement:
    """``placement`` with the bytes of its cache: as given, or all of ``room``; none if it would be too small."""
    if not placement.cached:
        return placement
    most = 4 * stats.num_nodes * 2
    most += feature_bytes(task, stats) if placement.features == "cached" else 0
    most += 4 * stats.num_edges if placement.topology == "cached" else 0
    if options.cache is not None:
        return replace(placement, cache_bytes=min(options.cache, most))
    filled = replace(placement, cache_bytes=max(min(room, most), 0))
    optional = placement.features == "cached" and options.features is None and options.cache_policy is None
    if optional and cached_rows(filled, stats, row_bytes(task, stats)) < WORTH_CACHING * stats.num_nodes:
        return replace(placement, features="host", cache_bytes=0)
    return filled


TIERS = {
    "gpu": "{} on the GPU ({})",
    "host": "{} in pinned host memory ({}), read over PCIe",
    "cached": "{} in pinned host memory ({}), the most used of them also on the GPU",
    "disk": "{} in mapped files ({}), read by the CPU",
}
CPU_TIERS = {"disk": "{} in mapped files", "cached": "{} in mapped files, the most used in memory"}


def reasons(placement: DataPlacement, task: Task, stats: GraphStats, machine: Machine) -> tuple[str, ...]:
    """One sentence per decision."""
    traffic, gpu = BatchTraffic.of(task, stats, placement), machine.device == "cuda"
    most = nodes = min(task.batch, max(stats.num_train, 1))
    for fanout in picks_per_hop(task.fanouts, stats):
        nodes = min(nodes * (fanout + 1) if fanout >= 0 else stats.num_nodes, stats.num_nodes + most)
    counted = "the most"
    if not gpu:
        counted = f"{min(large_batch(stats, task.fanouts, most).nodes, nodes):,}, which hardly any batch exceeds"
    why = [
        f"a batch has about {traffic.batch.nodes:,.0f} nodes and {sum(traffic.batch.edges):,.0f} edges, at most "
        f"{nodes:,} nodes: memory is counted for {counted}"
    ]
    things = (("features", placement.features), ("edges", placement.topology))
    if not gpu:
        return (*why, *(CPU_TIERS[tier].format(thing) for thing, tier in things if tier in CPU_TIERS))
    sizes = (feature_bytes(task, stats), 4 * stats.num_edges)
    why += [TIERS[tier].format(thing, show_bytes(size)) for (thing, tier), size in zip(things, sizes, strict=True)]
    if placement.cached:
        hits = f", about {traffic.hits:.0%} of the rows that batches read" if placement.features == "cached" else ""
        why.append(f"cache: {show_bytes(placement.cache_bytes)} of the device, chosen by {placement.policy}{hits}")
    if placement.sampler != "default":
        why.append(f"neighbours are drawn by sampler='{placement.sampler}', one draw per neighbour")
    if placement.overlap:
        why.append("the next batch is sampled and fetched while one trains: two buffers")
    if placement.evaluation == "whole":
        return (*why, "evaluated on the whole graph at once")
    held, there = sum(host_activations(task, stats)), machine.host.memory_bytes
    short = f", more than its {show_bytes(there)}: temporary files take the rest" if 0 < there < held else ""
    return (
        *why,
        f"evaluated layer by layer in chunks of up to {placement.chunk_edges:,} edges, with about {show_bytes(held)} "
        f"of activations per task in host memory{short}",
    )


def host_activations(task: Task, stats: GraphStats) -> list[int]:
    """Bytes of host memory for the activations of one task after each layer, of the nodes that the splits depend on."""
    splits = min(stats.num_train + stats.num_val + stats.num_test, stats.num_nodes)
    reached = expected_batch(stats, [-1] * (task.layers - 1), splits)
    nodes = [*reached.rows, reached.nodes]  # of the last layer, the one before it, ...
    widths = [max(stats.num_classes, 1), *[task.hidden] * (task.layers - 1)]
    size = 2 if task.precision == "bf16" else 4
    return [int(size * count * width) for count, width in zip(nodes, widths, strict=True)][::-1]


def chunks(placement: DataPlacement, stats: GraphStats) -> int:
    """Chunks of a layer, at most: all nodes."""
    if placement.evaluation == "whole":
        return 1
    rows = min(MOST_ROWS, placement.chunk_edges)
    return max(-(-stats.num_edges // placement.chunk_edges), -(-stats.num_nodes // rows), 1)


def chunk_padding_share(placement: DataPlacement, stats: GraphStats) -> float:
    """What a chunk has on average of the largest one, which a dry run has: most end at their nodes, not their edges."""
    count = chunks(placement, stats)
    if count == 1:
        return 1.0
    nodes, edges = max(stats.num_nodes, 1), max(stats.num_edges, 1)
    largest = min(max(placement.chunk_edges, stats.max_degree), edges)
    columns = min(nodes, min(MOST_ROWS, placement.chunk_edges) + largest)
    return min(max(edges / count / largest, min(nodes, (nodes + edges) / count) / columns), 1.0)


def padding_share(task: Task, stats: GraphStats) -> PaddingShare:
    """Expected nodes, rows and edges of a batch over the most that its fan-outs allow; 1 on the whole graph."""
    if not task.sampled:
        return FULL
    seeds = min(task.batch, max(stats.num_train, 1))
    expected, nodes, rows, edges = expected_batch(stats, task.fanouts, seeds), seeds, 0, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        picked = nodes * (fanout if fanout >= 0 else stats.num_nodes)
        rows, edges = rows + nodes, edges + picked
        nodes = min(nodes + picked, stats.num_nodes + seeds)
    parts = ((expected.nodes, nodes), (sum(expected.rows), rows), (sum(expected.edges), edges))
    return PaddingShare(*(min(part / max(whole, 1), 1.0) for part, whole in parts))


# ---- Full and sampled training in a plan: steps per epoch, stages, and why.

QUEUE_DEPTH = 2  # finished batches that wait behind a stage
MODE_IS_SET = "mode='sampled' is set"


def steps_per_epoch(task: Task, stats: GraphStats) -> int:
    """Steps that an epoch of ``task`` has: one on the whole graph, else as many as there are batches of seeds."""
    return -(-max(stats.num_train, 1) // task.batch) if task.sampled else 1


def why_this_mode(task: Task, stats: GraphStats) -> str:
    """The sentence that a plan says about a sampled task."""
    reason = MODE_IS_SET if task.mode == "sampled" else "the task says how to sample"
    fanout = ", ".join(show_hop(hop) for hop in task.fanouts)
    return (
        f"sampled: {reason}; {steps_per_epoch(task, stats):,} steps per epoch of up to {task.batch:,} seeds, "
        f"neighbours per hop {fanout}"
    )


def stages_of(task: Task, device: str) -> tuple[Stage, ...]:
    """The way of a batch: of the whole graph one stage; of sampled batches those that overlap."""
    train = Stage("train", "gpu" if device == "cuda" else "cpu")
    if not task.sampled:
        return (train,)
    names = ("sample", "fetch", "transfer")
    return (*(Stage(name, train.resource, depth=QUEUE_DEPTH) for name in names), train)


def may_sample(task: Task) -> bool:
    """Whether the choice is left to the plan, and Weft can sample for the model."""
    return task.mode == "auto" and not task.sampled and task.traits is not None and task.norm != "batch"
