"""A group in training whose batches the host and the device prepare: its graph, its phases, the seconds of an epoch.

Features and edges lie in pinned host memory, or partly in a cache of the GPU. Shapes: products; papers100M, as much of
it as the host's memory holds; uk-like, which has the degrees of products and 256 random features, with random training
nodes (as MorphGL makes UK). ``--quick`` makes a small graph, and a thread with given phase times in place of the GPU.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness.busy import profile
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.host_graph import PAPERS, fitting_scale, papers_graph
from benchmarks.harness.timing import synchronize
from weft.batches.division.measuring import all_at_once
from weft.batches.division.source import DividedSampled, DividedSampling
from weft.batches.division.thread_accelerator import ThreadAccelerator
from weft.batches.placing import place_graph
from weft.batches.sampled import Sampling
from weft.core.division import Division, PhaseTime, PhaseTimes
from weft.core.placement import Placement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.graph.graph import Graph
from weft.planner.division.partitioner import Limits, Partition, overlap_for, partition
from weft.planner.division.simulator import simulate
from weft.runtime.group import GroupRun
from weft.runtime.profile_division import divided_source, profile_group

MOST_EPOCHS = 1000
PROFILED = 12  # steps
WARM = 6  # batches before a cell
LEAST_BATCHES, ROUNDS = 16, 4  # of a cell, and per worker
WHOLE_EPOCH = 2.0  # times the seconds of a cell that an epoch may take to be measured as a whole
PLAIN_BATCHES = 96
HIDDEN = {"sage": 256, "gcn": 64, "gat": 64}
PCIE = 55.2e9  # bytes per second of a copy
PROFILE_EPOCHS, SHORTEST_PROFILE = 1.7, 1.7  # as a run limits it; seconds
BUS_BUSY = 0.77  # of an epoch, about, where both sides prepare batches
DEVICE_BUFFER, SPARE_SLOTS = 4, 4
IN_HOST = Placement("host", "host")
QUICK = {  # seconds of the phases of a fake accelerator, by shape: a device that is slow, even, and fast at batching
    "products": {"batching_cpu": 0.16, "transfer_pcie": 0.01, "batching_npu": 0.02, "transfer_npu": 0.04},
    "papers100m": {"batching_cpu": 0.12, "transfer_pcie": 0.02, "batching_npu": 0.04, "transfer_npu": 0.08},
    "uk": {"batching_cpu": 0.2, "transfer_pcie": 0.03, "batching_npu": 0.03, "transfer_npu": 0.03},
}
QUICK_TRAINING = {"sage": 0.03, "gcn": 0.02, "gat": 0.04}


@dataclass(frozen=True)
class Case:
    """A group in training and all that is known of its phases."""

    group: GroupRun
    source: DividedSampled
    times: PhaseTimes
    limits: Limits
    profile_seconds: float
    train: ThreadAccelerator | None = None
    partitions: dict[int, Partition] = field(default_factory=dict)  # by workers

    @property
    def batches(self) -> int:
        return self.source.steps_per_epoch

    def side(self, name: str, workers: int) -> Division:
        """The division of a side of the comparison.

        ``share S``: that share in the way that Weft would divide, ``share S otherwise``: in the other way, inside of
        steps or beside them.
        """
        registry, trainer = self.source.hardware.registry(), self.source.hardware.name
        limits = replace(self.limits, workers=workers, beside=registry.beside(trainer))
        if name in ("host", "device"):
            return overlap_for(float(name == "device"), limits, trainer, workers)
        found = self._partition(limits, workers)
        if name == "weft":
            return found.division
        way = next((one for one, _ in found.tried if one.divided), found.division)
        inside = way.in_step != name.endswith("otherwise")
        limits = replace(limits, beside=limits.beside and not inside, in_step=inside, lead=way.lead)
        return overlap_for(float(name.split()[1]), limits, trainer, workers)

    def _partition(self, limits: Limits, workers: int) -> Partition:
        if workers not in self.partitions:
            about = (self.source.hardware.registry(), self.batches, limits, self.source.hardware.name, workers)
            self.partitions[workers] = partition(self.times, *about)
        return self.partitions[workers]


def shape_graph(shape: str, device: torch.device, args: Namespace) -> Graph:
    """The graph of a shape with as many training nodes as an epoch has seeds, in pinned host memory."""
    graph = _made(shape, device, args)
    count = min(args.batches * args.seeds, graph.num_nodes // 2)
    random = torch.Generator().manual_seed(7)
    drawn = torch.randint(graph.num_nodes, (count * 2,), generator=random).unique()  # no permutation of 10^8 nodes
    chosen = drawn[torch.randperm(drawn.numel(), generator=random)[:count]].sort().values
    changed: dict[str, Any] = {"train": chosen.to(graph.train.device)}
    if shape == "uk" and not args.quick:
        changed["x"] = torch.randn(graph.num_nodes, 256, device=graph.device)
    return place_graph(graph._changed(**changed), IN_HOST, device)


def _made(shape: str, device: torch.device, args: Namespace) -> Graph:
    if args.quick:
        return citation(num_nodes=4000, num_edges=40000, num_features=32, num_classes=4, seed=1)
    if shape == PAPERS:
        return papers_graph(device, fitting_scale(args.papers_scale) * args.scale)
    return make_graph("products" if shape == "uk" else shape, device, args.scale)


def task_of(graph: Graph, model: str, args: Namespace) -> Task:
    """A sampled task that is not evaluated."""
    about = {"layers": 3, "hidden": HIDDEN[model] if not args.quick else 8, "dropout": 0.5, "mode": "sampled"}
    about |= {"fanout": list(fanout(args)), "batch": args.seeds, "epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return Task(graph=graph, model=model, name=model, **about)


def fanout(args: Namespace) -> tuple[int, ...]:
    """Neighbours per hop."""
    return (5, 3, 2) if args.quick else (15, 10, 5)


def plan_of(model: str, place: Placement, device: torch.device) -> Plan:
    """A group of one task."""
    return Plan((model,), device=device.type, replay=device.type == "cuda", mode="sampled", placement=place)


def make_case(
    graph: Graph, shape: str, model: str, args: Namespace, place: Placement = IN_HOST, buffer: int = DEVICE_BUFFER
) -> Case:
    """A group on ``graph``, with things placed as ``place`` says, profiled with all workers.

    ``buffer``: batches that may wait on the device.
    """
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    place = replace(place, overlap=False, evaluation="whole")
    task, plan = task_of(graph, model, args), plan_of(model, place, device)
    fake = ThreadAccelerator("npu", QUICK[shape] | {"training_npu": QUICK_TRAINING[model]}) if args.quick else None
    sampling = Sampling(fanout(args), args.seeds, placement=place)
    trainer = "npu" if fake else "gpu"
    room = Division(1, 1, args.most_workers, args.most_workers + SPARE_SLOTS, buffer, trainer=trainer)
    group = GroupRun([task], graph, plan, device, make_source=DividedSampling(sampling, room, fake))
    source = divided_source(group)
    assert source is not None
    if fake is not None:
        _pace_training(group, fake)
    train_batches(group, min(args.most_workers + WARM, source.steps_per_epoch))  # compiles, captures, pins
    limit = args.profile_seconds or profile_limit(_batch_bytes(source), source.steps_per_epoch)
    begin = time.perf_counter()
    times = profile_group(group, args.most_workers, limit=limit)
    seconds = time.perf_counter() - begin
    _pin_all(source)
    limits = Limits(source.slots - 1, buffer, args.most_workers)
    return Case(group, source, times, limits, seconds, fake)


def profile_limit(batch_bytes: int, batches: int) -> float:
    """Seconds of a profile where batches are in host memory: of some epochs, which take as long as the bus needs."""
    return max(PROFILE_EPOCHS * batches * batch_bytes / PCIE / BUS_BUSY, SHORTEST_PROFILE)


def _batch_bytes(source: DividedSampled) -> int:
    """Of a batch of the host's that crosses the bus."""
    host = source.divided.host
    assert host is not None
    item = host.prepare(source.seeds()[0])
    host.discard(item)
    return sum(tensor.numel() * tensor.element_size() for tensor in item.tensors())


def _pin_all(source: DividedSampled) -> None:
    """Fill every buffer of the host once, so that no measured epoch pins one: 50 ms per batch where 22 are usual."""
    host, seeds = source.divided.host, source.seeds()[0]
    assert host is not None
    prepare = partial(host.prepare, seeds)
    first, others = all_at_once(prepare, [prepare] * (source.slots - 1))
    for item in (first, *others):
        host.discard(item)


def _pace_training(group: GroupRun, fake: ThreadAccelerator) -> None:
    """Let training steps run as commands of the accelerator, for at least as long as its phase."""
    (stack,) = group.stacks
    plain = stack.train_on
    stack.train_on = lambda batch: fake.train(lambda: plain(batch))  # type: ignore[method-assign]


@contextmanager
def shortened(group: GroupRun, count: int) -> Iterator[None]:
    """Epochs end after ``count`` batches: threads of the host begin none beyond, whose end would be waited for."""
    source = divided_source(group)
    if source is None or not source.division.host_batches:  # nobody prepares ahead
        yield
        return
    plain, steps = source.divided.run, source.steps_per_epoch
    source.divided.run = lambda seeds, then=(): plain(seeds[:count], then[:count])  # type: ignore[method-assign]
    source.steps_per_epoch = min(count, steps)
    try:
        yield
    finally:
        source.divided.run = plain  # type: ignore[method-assign]
        source.steps_per_epoch = steps


def train_batches(group: GroupRun, count: int) -> float:
    """Seconds of an epoch of ``count`` batches, from its beginning to its end."""
    group.step_in_epoch, left = 0, iter(range(count - 1))
    synchronize(group.device)
    begin = time.perf_counter()
    with shortened(group, count):
        group.advance(1, lambda: next(left, None) is None)
    synchronize(group.device)
    seconds = time.perf_counter() - begin
    group.step_in_epoch = 0
    return seconds


def batches_of_cell(case: Case, division: Division, seconds: float) -> int:
    """As many as take about ``seconds``, an epoch at most, and enough for all workers to have had several."""
    each = simulate(division, case.times, case.batches, case.source.hardware.registry()).seconds_per_batch
    if case.batches * each <= WHOLE_EPOCH * seconds:
        return case.batches
    least = max(LEAST_BATCHES, ROUNDS * division.workers if division.host_batches else 0)
    return min(max(int(seconds / each), least), case.batches)


def measure(case: Case, division: Division, repeats: int, seconds: float) -> dict[str, Any]:
    """An epoch under ``division``, measured and simulated, of as many batches as take about ``seconds``.

    Steps of both sides are captured and buffers pinned in the profile, so a few batches warm it up. Of repeated epochs
    the median counts, the lower of two. Where the host begins an epoch while the one before it ends, another epoch
    comes first, so that what was begun of the measured ones was begun in time that is measured of others.
    """
    case.source.divide(division)
    count = batches_of_cell(case, division, seconds)
    train_batches(case.group, count if division.elastic else min(WARM, count))
    case.source.phases()
    found = [train_batches(case.group, count) for _ in range(repeats)]
    phases, took = case.source.phases(), sorted(found)[(len(found) - 1) // 2]
    case.source.close()
    registry = case.source.hardware.registry()
    simulated = simulate(case.source.division, case.times, count, registry)
    return {
        "epoch_seconds": round(took, 5),
        "ms_per_batch": round(1e3 * took / count, 4),
        "simulated_seconds": round(simulated.seconds, 5),
        "error": round(simulated.seconds / took - 1, 4),
        "device_share": round(division.device_share, 3),
        "division": division.to_dict(),
        "busy": _busy(case, phases, repeats * took, division) or _busy_alone(case, took / count),
        "bus_gb_s": round(_crossing(case) * count / took / 1e9, 2),
        **_memory(case.group.device),
        "simulated_busy": {name: round(share, 3) for name, share in simulated.utilisation().items()},
        "batches": count,
        "phase_ms": {key: round(1e3 * one.mean, 3) for key, one in phases.items()},
    }


def plain_ms(graph: Graph, task: Task, place: Placement, args: Namespace) -> float:
    """Milliseconds per batch with everything on the device."""
    device = torch.device(args.device)
    place = replace(place, evaluation="whole")
    make = Sampling(fanout(args), args.seeds, placement=place)
    run = GroupRun([task], graph, plan_of(task.label, place, device), device, make_source=make)
    steps = min(run.stacks[0].source.steps_per_epoch, PLAIN_BATCHES)
    train_batches(run, min(WARM, steps))
    return round(1e3 * train_batches(run, steps) / steps, 4)


def _busy(case: Case, phases: Mapping[str, PhaseTime], epoch: float, division: Division) -> dict[str, float]:
    """Busy share of each resource; empty where captured steps do everything on the device.

    Of steps that read their batch themselves the bus is taken to be busy for as long as a copy of its bytes takes.
    """
    seconds = {key: one.mean * one.count for key, one in phases.items()}
    host = seconds.get("batching_cpu", 0.0) / division.workers
    bus = sum(value for key, value in seconds.items() if key.startswith("transfer") or key == "batching_gpu")
    bus += sum(one.count for key, one in phases.items() if key.startswith("step")) * _crossing(case) / PCIE
    device = sum(value for key, value in seconds.items() if key.startswith(("training", "step")))
    found = {"cpu": host, "pcie": bus, "gpu": device}
    return {name: round(value / epoch, 3) for name, value in found.items()} if seconds else {}


def _busy_alone(case: Case, batch: float) -> dict[str, float]:
    """Of a GPU that prepares all batches in captured steps: by its kernels, and by the bytes that cross the bus."""
    if case.group.device.type != "cuda":
        return {}
    found = profile(lambda: train_batches(case.group, min(PROFILED, case.batches)), PROFILED)
    bus = _crossing(case) / batch / PCIE
    return {"cpu": 0.0, "pcie": round(bus, 3), "gpu": found["busy"]} if found["busy"] is not None else {}


def _crossing(case: Case) -> float:
    """Bytes of a batch that cross the bus: not those of rows that a cache on the GPU has."""
    return case.times.bytes * (1.0 - case.source.reads().get("feature_hit_rate", 0.0))


def _memory(device: torch.device) -> dict[str, float]:
    """GB of the GPU since the case was made: what tensors needed at once, and what torch reserved for them."""
    if device.type != "cuda":
        return {}
    about = {"needed_gb": torch.cuda.max_memory_allocated(device), "peak_gb": torch.cuda.max_memory_reserved(device)}
    return {name: round(size / 1e9, 3) for name, size in about.items()}


def phases_of(case: Case) -> dict[str, Any]:
    """The profile as a cell."""
    means = {key: round(1e3 * time.mean, 4) for key, time in case.times.phases.items()}
    stds = {key: round(1e3 * time.std, 4) for key, time in case.times.phases.items()}
    about = {"crowding": round(case.times.crowding, 4), "batch_mb": round(case.times.bytes / 1e6, 2)}
    factors = {key: {k: round(v, 3) for k, v in others.items()} for key, others in case.times.interference.items()}
    captured = {key: round(1e3 * one.mean, 4) for key, one in case.times.captured.items()}
    about |= {"beside": factors, "captured_ms": captured, "nodes": case.group.graph.num_nodes}
    about["times"] = case.times.to_dict()  # all that a simulation needs
    return {"profile_seconds": round(case.profile_seconds, 3), "ms": means, "std_ms": stds, **about}
