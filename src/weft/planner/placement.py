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
from weft.planner.cost.roofline import FULL, Filled
from weft.planner.transfers import HIDDEN_BY_OVERLAP, BatchTraffic, cached_rows, row_bytes

CHUNKS = (EVALUATION_EDGES, EVALUATION_EDGES >> 2, EVALUATION_EDGES >> 4)  # edges of a chunk, tried in this order
WORTH_CACHING = 0.02  # of the features: a smaller cache is not worth its table
HOST_SHARE = 0.9  # of the host's memory that features may take
MOST_ROWS = 1 << 16  # nodes of a chunk


def candidates(task: Task, stats: GraphStats, machine: Machine, options: Placement) -> Iterator[DataPlacement]:
    """Placements to try, each taking less of the device than the one before; caches still without any bytes."""
    if machine.device != "cuda":
        yield _on_cpu(options)
        return
    cached = options.cache is not None or options.cache_policy is not None
    host = "disk" if feature_bytes(task, stats) > HOST_SHARE * machine.host.memory_bytes > 0 else "cached"
    features = [options.features or ("cached" if cached else "gpu")]
    features += [host] if options.features is None and not cached else []
    edges = [options.topology or "gpu"]
    edges += ["host"] if options.topology is None else []
    policy = policy_of(options, "cached" in edges)
    for topology in edges:
        for place in features if topology == edges[0] else features[-1:]:
            one = DataPlacement(place, topology, policy=policy)
            one = replace(one, overlap=HIDDEN_BY_OVERLAP > 0 and not one.on_device and one.read_by_gpu)
            if one.on_device:
                yield one
            if task.traits is not None:
                yield from (replace(one, evaluation="layers", chunk_edges=edges) for edges in CHUNKS)
            elif not one.on_device:
                yield one


def policy_of(options: Placement, lists: bool) -> str:
    """What chooses what a cache holds: as given, or by degree; by benefit where neighbour lists are cached as well."""
    given = options.cache_policy
    name = given if given is None or isinstance(given, str) else type(given).__name__
    if lists and name in ("degree", "presampling"):
        raise SpecError(
            f"topology='cached' with cache_policy={name!r}: only 'benefit' (or a policy of your own) ranks "
            "neighbour lists"
        )
    return name or ("benefit" if lists else "degree")


def _on_cpu(options: Placement) -> DataPlacement:
    """A CPU has memory and files; a cache may stand before the files."""
    for name in ("features", "topology"):
        place = getattr(options, name)
        if place == "gpu" or (place == "cached" and name == "topology"):
            raise SpecError(f"{name}={place!r} needs a GPU; on a CPU they lie in memory ('host') or files ('disk')")
    if options.features == "cached" or options.cache is not None or options.cache_policy is not None:
        if options.features not in (None, "cached"):
            raise SpecError(f"cache= needs features='cached', not features={options.features!r}")
        return DataPlacement("cached", options.topology or "host", policy=policy_of(options, False))
    return replace(on_device("cpu"), features=options.features or "host", topology=options.topology or "host")


def feature_bytes(task: Task, stats: GraphStats) -> int:
    """Bytes of all features as batches gather them."""
    return stats.num_nodes * row_bytes(task, stats)


def with_cache(placement: DataPlacement, task: Task, stats: GraphStats, options: Placement, left: int) -> DataPlacement:
    """``placement`` with the bytes of its cache: as given, or those ``left`` over; none if it would be too small."""
    if not placement.cached:
        return placement
    most = 4 * stats.num_nodes * 2
    most += feature_bytes(task, stats) if placement.features == "cached" else 0
    most += 4 * stats.num_edges if placement.topology == "cached" else 0
    if options.cache is not None:
        return replace(placement, cache_bytes=min(options.cache, most))
    found = replace(placement, cache_bytes=max(min(left, most), 0))
    wanted = placement.features == "cached" and options.features is None and options.cache_policy is None
    if wanted and cached_rows(found, stats, row_bytes(task, stats)) < WORTH_CACHING * stats.num_nodes:
        return replace(placement, features="host", cache_bytes=0)
    return found


def reasons(placement: DataPlacement, task: Task, stats: GraphStats, machine: Machine) -> tuple[str, ...]:
    """One sentence per decision."""
    traffic = BatchTraffic.of(task, stats, placement)
    told = [_batches(traffic, task, stats, machine)]
    if machine.device != "cuda":
        told += [_elsewhere("features", placement.features), _elsewhere("edges", placement.topology)]
        return tuple(one for one in told if one)
    size = show_bytes(feature_bytes(task, stats))
    told.append(_PLACES[placement.features].format("features", size))
    told.append(_PLACES[placement.topology].format("edges", show_bytes(4 * stats.num_edges)))
    if placement.cached:
        about = f", about {traffic.hits:.0%} of the rows that batches read" if placement.features == "cached" else ""
        told.append(f"cache: {show_bytes(placement.cache_bytes)} of the device, chosen by {placement.policy}{about}")
    if placement.overlap:
        told.append("the next batch is sampled and fetched while one trains: two buffers")
    told.append(_evaluated(placement, task, stats, machine))
    return tuple(told)


_PLACES = {
    "gpu": "{} on the GPU ({})",
    "host": "{} in pinned host memory ({}), read over PCIe",
    "cached": "{} in pinned host memory ({}), the most used of them also on the GPU",
    "disk": "{} in mapped files ({}), read by the CPU",
}


def _elsewhere(what: str, place: str) -> str:
    words = {"disk": f"{what} in mapped files", "cached": f"{what} in mapped files, the most used in memory"}
    return words.get(place, "")


def _batches(traffic: BatchTraffic, task: Task, stats: GraphStats, machine: Machine) -> str:
    most = nodes = min(task.batch, max(stats.num_train, 1))
    for fanout in picks_per_hop(task.fanouts, stats):
        nodes = min(nodes * (fanout + 1) if fanout >= 0 else stats.num_nodes, stats.num_nodes + most)
    large = large_batch(stats, task.fanouts, min(task.batch, max(stats.num_train, 1))).nodes
    likely = f"memory is counted for {min(large, nodes):,}, which hardly any batch exceeds"
    counted = "memory is counted for the most" if machine.device == "cuda" else likely
    return (
        f"a batch has about {traffic.batch.nodes:,.0f} nodes and {sum(traffic.batch.edges):,.0f} edges, at most "
        f"{nodes:,} nodes: {counted}"
    )


def _evaluated(placement: DataPlacement, task: Task, stats: GraphStats, machine: Machine) -> str:
    if placement.evaluation == "whole":
        return "evaluated on the whole graph at once"
    held, there = sum(host_activations(task, stats)), machine.host.memory_bytes
    short = f", more than its {show_bytes(there)}: temporary files take the rest" if 0 < there < held else ""
    return (
        f"evaluated layer by layer in chunks of up to {placement.chunk_edges:,} edges, with about {show_bytes(held)} "
        f"of activations per task in host memory{short}"
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


def chunk_filled(placement: DataPlacement, stats: GraphStats) -> float:
    """What a chunk has on average of the largest one, which a dry run has: most end at their nodes, not their edges."""
    count = chunks(placement, stats)
    if count == 1:
        return 1.0
    nodes, edges = max(stats.num_nodes, 1), max(stats.num_edges, 1)
    largest = min(max(placement.chunk_edges, stats.max_degree), edges)
    columns = min(nodes, min(MOST_ROWS, placement.chunk_edges) + largest)
    found = max(edges / count / largest, min(nodes, (nodes + edges) / count) / columns)
    return min(found, 1.0)


# ---- Shares of a padded batch that exist: batches are padded to the most that their fan-outs allow.


def filled(task: Task, stats: GraphStats) -> Filled:
    """Expected nodes, rows and edges of a batch of ``task`` over the most that there can be; 1 on the whole graph."""
    if not task.sampled:
        return FULL
    seeds = min(task.batch, max(stats.num_train, 1))
    found, nodes, rows, edges = expected_batch(stats, task.fanouts, seeds), seeds, 0, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        picked = nodes * (fanout if fanout >= 0 else stats.num_nodes)
        rows, edges = rows + nodes, edges + picked
        nodes = min(nodes + picked, stats.num_nodes + seeds)
    return Filled(_share(found.nodes, nodes), _share(sum(found.rows), rows), _share(sum(found.edges), edges))


def _share(part: float, whole: float) -> float:
    return min(part / max(whole, 1), 1.0)


# ---- Describe full and sampled training for a plan: steps per epoch, stages, and why.

QUEUE_DEPTH = 2  # finished batches that wait behind a stage
MODE_IS_SET = "mode='sampled' is set"


def steps_per_epoch(task: Task, stats: GraphStats) -> int:
    """Steps that an epoch of ``task`` has: one on the whole graph, else as many as there are batches of seeds."""
    return -(-max(stats.num_train, 1) // task.batch) if task.sampled else 1


def why_this_mode(task: Task, stats: GraphStats) -> str:
    """The sentence that a plan says about a sampled task."""
    given = MODE_IS_SET if task.mode == "sampled" else "the task says how to sample"
    fanout = ", ".join(show_hop(hop) for hop in task.fanouts)
    return (
        f"sampled: {given}; {steps_per_epoch(task, stats):,} steps per epoch of up to {task.batch:,} seeds, "
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
