"""Batch preparation divided between CPU and GPU: simulator against reality, against either side alone, within budgets.

    python -m benchmarks.suites.division --out division.json --budget-seconds 470
    python -m benchmarks.suites.division --out division.json --budget-seconds 470 --resume     # what was left out

Sides: ``host`` (CPU threads prepare all batches), ``device`` (the GPU samples and gathers over PCIe) and ``weft`` (the
division that a profile leads to); ``share S``: an exhaustive search over the ratio. Per cell: measured and simulated
seconds of an epoch and the busy share of CPU, PCIe and GPU. An epoch has ``--batches`` batches of ``--seeds`` seeds,
fan-out [15, 10, 5], or as many as take ``--cell-seconds`` where a side is slow: from the first to the last, so that
beginning and end count as they do in the simulator. Evaluation is left out.

Features and edges lie in pinned host memory, or partly in a cache of the GPU. Shapes: products; papers100M, as much of
it as the host's memory holds; uk, which has the degrees of products and 256 random features, with random training
nodes (as MorphGL makes UK). Every graph is made once. In this order, the most telling first, so that a run that ends
early has them:

1. the first shape and model over all worker counts and every ratio;
2. the first model on the other shapes, with few worker counts;
3. what ``weft.plan`` chooses within the first of ``--budgets`` GiB of the GPU on ``--budget-shape``, for every model
   and all worker counts, beside both sides alone with the same cache; of the first model every ratio. Torch is given no
   more than the budget there, as in a run, and a plan that does not divide trains by the GPU alone;
4. the other models on the first shape, with few worker counts; ratios of those in ``--searched``;
5. as 3 within the other budgets;
6. the other models on the other shapes.

The last lines are what was left out, and a table of what was to be shown: pass, miss or not measured. The results
file is written after every cell; ``--resume`` runs the cells that are not in it. ``--quick`` runs the same on this CPU,
where a thread with given phase times stands in for the GPU.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.host_graph import PAPERS, fitting_scale, papers_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed
from benchmarks.harness.timing import profile, synchronize
from examples.thread_accelerator import ThreadAccelerator
from weft.batches.division.profiler import all_at_once
from weft.batches.division.source import DividedSampled
from weft.batches.placement import place_graph
from weft.batches.sampled import Sampling
from weft.core.division import Division, PhaseTime, PhaseTimes
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.dividing import divided_source, profile_group
from weft.engine.machine import find_machine
from weft.engine.memory import memory_cap
from weft.engine.plan import plan as make_plan
from weft.graph.generate import citation
from weft.graph.graph import Graph
from weft.planner.division.partitioner import Limits, Partition, overlap_for, partition
from weft.planner.division.simulator import simulate
from weft.runtime.group import GroupRun

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
IN_HOST = DataPlacement("host", "host")
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
        """The division of a side of the comparison; ``share S``: MorphGL's algorithms at that fixed share."""
        registry, trainer = self.source.hardware.registry(), self.source.hardware.name
        limits = replace(self.limits, workers=workers)
        if name in ("host", "device"):
            return overlap_for(float(name == "device"), limits, trainer)
        if name == "weft":
            if workers not in self.partitions:
                self.partitions[workers] = partition(self.times, registry, self.batches, limits, trainer)
            return self.partitions[workers].division
        return overlap_for(float(name.split()[1]), replace(limits, strategy="fixed"), trainer)


def shape_graph(shape: str, device: torch.device, args: Namespace) -> Graph:
    """The graph of a shape with as many training nodes as an epoch has seeds, in pinned host memory."""
    if args.quick:
        graph = citation(num_nodes=4000, num_edges=40000, num_features=32, num_classes=4, seed=1)
    elif shape == PAPERS:
        graph = papers_graph(device, fitting_scale(args.papers_scale) * args.scale)
    else:
        graph = make_graph("products" if shape == "uk" else shape, device, args.scale)
    count = min(args.batches * args.seeds, graph.num_nodes // 2)
    random = torch.Generator().manual_seed(7)
    drawn = torch.randint(graph.num_nodes, (count * 2,), generator=random).unique()  # no permutation of 10^8 nodes
    chosen = drawn[torch.randperm(drawn.numel(), generator=random)[:count]].sort().values
    changed: dict[str, Any] = {"train": chosen.to(graph.train.device)}
    if shape == "uk" and not args.quick:
        changed["x"] = torch.randn(graph.num_nodes, 256, device=graph.device)
    return place_graph(graph._changed(**changed), IN_HOST, device)


def task_of(graph: Graph, model: str, args: Namespace) -> Task:
    """A sampled task that is not evaluated."""
    about = {"layers": 3, "hidden": HIDDEN[model] if not args.quick else 8, "dropout": 0.5, "mode": "sampled"}
    about |= {"fanout": list(fanout(args)), "batch": args.seeds, "epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return Task(graph=graph, model=model, name=model, **about)


def fanout(args: Namespace) -> tuple[int, ...]:
    """Neighbours per hop."""
    return (5, 3, 2) if args.quick else (15, 10, 5)


def plan_of(model: str, place: DataPlacement, device: torch.device) -> Plan:
    """A group of one task."""
    return Plan((model,), device=device.type, replay=device.type == "cuda", mode="sampled", placement=place)


def make_case(
    graph: Graph, shape: str, model: str, args: Namespace, place: DataPlacement = IN_HOST, buffer: int = DEVICE_BUFFER
) -> Case:
    """A group on ``graph``, with things placed as ``place`` says, profiled with all workers.

    ``buffer``: batches that may wait on the device.
    """
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    place = replace(place, evaluation="whole")
    task, plan = task_of(graph, model, args), plan_of(model, place, device)
    fake = ThreadAccelerator("npu", QUICK[shape] | {"training_npu": QUICK_TRAINING[model]}) if args.quick else None
    sampling = Sampling(fanout(args), args.seeds, placement=place)
    trainer = "npu" if fake else "gpu"
    room = Division(1, 1, args.most_workers, args.most_workers + SPARE_SLOTS, buffer, trainer=trainer)
    make = partial(DividedSampled, sampling=sampling, division=room, hardware=fake)
    group = GroupRun([task], graph, plan, device, make_source=make)
    source = divided_source(group)
    assert source is not None
    if fake is not None:  # training steps run as commands of the accelerator, for at least as long as its phase
        (stack,) = group.stacks
        plain = stack.train_on
        stack.train_on = lambda batch: fake.train(lambda: plain(batch))  # type: ignore[method-assign]
    train_batches(group, min(args.most_workers + WARM, source.steps_per_epoch))  # compiles, captures, pins
    host = source.divided.host
    assert host is not None
    item = host.prepare(source.seeds()[0])
    host.discard(item)
    moved = source.steps_per_epoch * sum(tensor.numel() * tensor.element_size() for tensor in item.tensors())
    # Some epochs, each of which takes as long as the bus needs for its batches.
    limit = args.profile_seconds or max(PROFILE_EPOCHS * moved / PCIE / BUS_BUSY, SHORTEST_PROFILE)
    begin = time.perf_counter()
    times = profile_group(group, args.most_workers, limit=limit)
    seconds = time.perf_counter() - begin
    # Fill every buffer of the host once, so that no measured epoch pins one: 50 ms per batch where 22 are usual.
    prepare = partial(host.prepare, source.seeds()[0])
    for item in all_at_once([prepare] * source.slots):
        host.discard(item)
    limits = Limits(source.slots - 1, buffer, args.most_workers)
    return Case(group, source, times, limits, seconds, fake)


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


def phase_times(log: list[tuple[str, Any, Any, Any]]) -> dict[str, PhaseTime]:
    """Mean and variance of every phase that a :class:`DividedPipeline` has logged."""
    seconds: dict[str, list[float]] = {}
    for phase, clock, begin, end in list(log):
        seconds.setdefault(phase, []).append(clock.seconds(begin, end))
    return {phase: PhaseTime.of(taken) for phase, taken in seconds.items()}


def measure(case: Case, division: Division, repeats: int, seconds: float) -> dict[str, Any]:
    """An epoch under ``division``, measured and simulated, of as many batches as take about ``seconds``.

    Steps of both sides are captured and buffers pinned in the profile, so a few batches warm it up. Of repeated epochs
    the median counts, the lower of two. Where the host begins an epoch while the one before it ends, another epoch
    comes first, so that what was begun of the measured ones was begun in time that is measured of others.
    """
    case.source.divide(division)
    count = batches_of_cell(case, division, seconds)
    train_batches(case.group, count if division.elastic else min(WARM, count))
    case.source.divided.log = log = []
    found = [train_batches(case.group, count) for _ in range(repeats)]
    phases, took = phase_times(log), sorted(found)[(len(found) - 1) // 2]
    case.source.divided.log = None
    case.source.close()
    memory, device = {}, case.group.device
    if device.type == "cuda":  # since the case was made: what tensors needed at once, and what torch reserved for them
        peaks = {"needed_gb": torch.cuda.max_memory_allocated, "peak_gb": torch.cuda.max_memory_reserved}
        memory = {name: round(peak(device) / 1e9, 3) for name, peak in peaks.items()}
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
        **memory,
        "simulated_busy": {name: round(share, 3) for name, share in simulated.utilisation().items()},
        "batches": count,
        "phase_ms": {key: round(1e3 * one.mean, 3) for key, one in phases.items()},
    }


def plain_ms(graph: Graph, task: Task, place: DataPlacement, args: Namespace) -> float:
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


SIDES = ("device", "weft", "host")
NEAR, ENOUGH = 0.10, 12  # error of the simulator, and configurations that are to be within it
KINDS = 3  # of models, and of shapes, among them
OF_BEST, NEVER_BELOW, CLOSE_GAIN = 1.05, 0.97, 1.3
CLOSE = (1.25, 1.5)  # times the seconds of the better side, up to which the other one may be called close to it
PRODUCTS_BATCHES = 193  # of an epoch of ogbn-products with 1,024 seeds each
PROFILE_WITHIN = 2.0  # epochs of products that a profile may take
Cell = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Milliseconds per batch of the sides of one shape, model, budget and worker count, and of all ratios tried."""

    shape: str
    model: str
    budget: float | None
    workers: int
    device: Cell
    weft: Cell
    host: Cell | None
    ratios: tuple[float, ...]
    as_planned: bool = True  # of a plan within a budget: it divides if that does, and keeps to the budget

    @property
    def gain(self) -> float:
        """Of Weft over the better side."""
        sides = [one["ms_per_batch"] for one in (self.device, self.host) if one]
        return min(sides) / self.weft["ms_per_batch"]

    def close(self, within: float) -> bool:
        """Whether both sides take about as long."""
        if self.host is None:
            return False
        sides = self.device["ms_per_batch"], self.host["ms_per_batch"]
        return max(sides) <= within * min(sides)

    @property
    def of_best(self) -> float:
        """Weft's milliseconds over those of the fastest of all ratios."""
        return self.weft["ms_per_batch"] / min(self.ratios)

    def words(self) -> str:
        """Which one."""
        return f"{self.shape} {self.model}{_within(self.budget)} w={self.workers}"


def _within(budget: float | None) -> str:
    return "" if budget is None else f" {budget:g} GiB"


def rows_of(cells: list[Cell]) -> list[Row]:
    """A row per shape, model, budget and worker count that has at least the device's and Weft's side."""
    keys = {(c["shape"], c["model"], c.get("budget_gib"), c["workers"]) for c in cells if "workers" in c}
    found = []
    for shape, model, budget, workers in sorted(keys, key=lambda key: (*key[:2], key[2] or 0.0, key[3])):
        here = [c for c in cells if (c["shape"], c["model"], c.get("budget_gib")) == (shape, model, budget)]
        device, weft, host = (find(here, workers=workers, side=side) for side in SIDES)
        ratios = tuple(c["ms_per_batch"] for c in here if c.get("workers") == workers and "ms_per_batch" in c)
        if device and weft:
            kept = budget is None or _as_planned(weft, find(here, side="plan"), budget)
            found.append(Row(shape, model, budget, workers, device, weft, host, ratios, kept))
    return found


def _as_planned(weft: Cell, plan: Cell | None, budget: float) -> bool:
    """Whether what was measured is what the plan says: it divides only if that does, and keeps to the budget."""
    both = bool((weft.get("division") or {}).get("host_batches")) and "same_as" not in weft
    divides = plan is None or plan.get("divides", True)
    return plan is None or ((divides or not both) and weft.get("needed_gb", 0.0) * 1e9 <= budget * (1 << 30))


# ---- what was to be shown ----------------------------------------------------------------------------


def verdicts(cells: list[Cell]) -> list[list[str]]:
    """A line per thing to be shown: what, pass or miss or not measured, and the figures."""
    every = rows_of(cells)
    rows = [row for row in every if row.as_planned]
    close = [_where_close(rows, within) for within in CLOSE]
    return [_simulator(cells), _best_ratio(rows), _never_worse(rows), *close, _grid(rows, len(every) - len(rows)),
            _preprocessing(cells)]  # fmt: skip


def _line(what: str, passed: bool | None, found: str) -> list[str]:
    return [what, "not measured" if passed is None else "pass" if passed else "MISS", found]


def _simulator(cells: list[Cell]) -> list[str]:
    measured = [cell for cell in cells if "error" in cell and "same_as" not in cell]
    within = [cell for cell in measured if abs(cell["error"]) <= NEAR]
    worst = max(measured, key=lambda cell: abs(cell["error"]), default=None)
    told = f"{len(within)} of {len(measured)}, of models {_named(within, 'model')} on {_named(within, 'shape')}"
    if worst is not None:
        told += f"; worst {worst['error']:+.0%} ({worst['shape']} {worst['model']} {worst['side']})"
    what = f"simulator within {NEAR:.0%}, {ENOUGH} configurations, {KINDS} models and shapes"
    covered = all(len({cell[name] for cell in within}) >= KINDS for name in ("model", "shape"))
    return _line(what, covered and len(measured) == len(within) >= ENOUGH if measured else None, told)


def _named(cells: Iterable[Cell], name: str) -> str:
    return "/".join(sorted({cell[name] for cell in cells})) or "none"


def _best_ratio(rows: list[Row]) -> list[str]:
    searched = [row for row in rows if len(row.ratios) > len(SIDES)]
    worst = max(searched, key=lambda row: row.of_best, default=None)
    found = "-" if worst is None else f"worst of {len(searched)}: {worst.of_best:.3f} ({worst.words()})"
    return _line("chosen plan within 5 % of the best ratio", None if worst is None else worst.of_best <= OF_BEST, found)


def _never_worse(rows: list[Row]) -> list[str]:
    worst = min((row for row in rows if row.host), key=lambda row: row.gain, default=None)
    found = "-" if worst is None else f"least {worst.gain:.3f} ({worst.words()})"
    return _line(
        f"never below {NEVER_BELOW} of the better side", None if worst is None else worst.gain >= NEVER_BELOW, found
    )


def _where_close(rows: list[Row], within: float) -> list[str]:
    close = sorted((row for row in rows if row.close(within)), key=lambda row: row.gain)
    found = "no case in which they are"
    if close:
        reached = sum(row.gain >= CLOSE_GAIN for row in close)
        found = f"{reached} of {len(close)}; least {close[0].gain:.2f} ({close[0].words()}), most {close[-1].gain:.2f}"
    passed = all(row.gain >= CLOSE_GAIN for row in close) if close else None
    return _line(f"{CLOSE_GAIN}x where sides are close (within {within}x)", passed, found)


def _grid(rows: list[Row], others: int) -> list[str]:
    """Whether all three sides were measured for every model, budget and worker count; ``others`` not as planned."""
    there = [row for row in rows if row.budget is not None and row.host]
    counts = [len({getattr(row, name) for row in there}) for name in ("model", "budget", "workers")]
    whole = counts[0] * counts[1] * counts[2]
    found = f"{len(there)} cells: {counts[0]} models, {counts[1]} budgets, {counts[2]} worker counts"
    found += f"; {others} more were not measured as planned" if others else ""
    return _line("3 models x 3 budgets x 5 worker counts", len(there) == whole == 45 if there else None, found)


def _preprocessing(cells: list[Cell]) -> list[str]:
    """The longest profile of products, in epochs of its model at the number of workers that is fastest."""
    profiles = []
    here = [cell for cell in cells if cell["shape"] == "products" and cell["budget_gib"] is None]
    for model, seconds in ((cell["model"], cell["profile_seconds"]) for cell in here if cell["side"] == "profile"):
        batches = [cell["ms_per_batch"] for cell in here if (cell["side"], cell["model"]) == ("weft", model)]
        if batches:
            epoch = 1e-3 * min(batches) * PRODUCTS_BATCHES
            profiles.append((seconds / epoch, f"{seconds:.2f} s of epochs of {epoch:.2f} s ({model})"))
    if not profiles:
        return _line("profile within 2 epochs of products", None, "-")
    epochs, words = max(profiles)
    return _line("profile within 2 epochs of products", epochs <= PROFILE_WITHIN, f"{epochs:.2f} epochs: {words}")


BATCHES, QUICK_BATCHES = 193, 24  # of an epoch; products has 193
CASE_SECONDS = 9.0  # of a group's kernels, captures, pinned memory and profile: with less left it is not made
Key = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Cells that share a group, in their order; ``budget``: GiB that it is planned within, None: all in host memory."""

    shape: str
    model: str
    budget: float | None
    whole: bool  # all worker counts
    ratios: bool = False

    @property
    def label(self) -> str:
        """Which one."""
        within = "" if self.budget is None else f" within {self.budget:g} GiB"
        return f"{self.shape} {self.model}{within}"

    @property
    def base(self) -> Key:
        """What its cells have in common."""
        return {"shape": self.shape, "model": self.model, "budget_gib": self.budget}


def parts_of(args: Namespace) -> list[Part]:
    """All of them, the most telling first."""
    shapes, models, budgets = (listed(text) for text in (args.shapes, args.models, args.budgets))
    first, lead, place = shapes[0], models[0], args.budget_shape
    found = [Part(first, lead, None, whole=True, ratios=lead in listed(args.searched))]
    found += [Part(shape, lead, None, whole=False) for shape in shapes[1:]]
    within = [[Part(place, model, float(budget), whole=True) for model in models] for budget in budgets]
    if within:
        within[0][0] = replace(within[0][0], ratios=True)
    found += [one for some in within[:1] for one in some]
    found += [Part(first, model, None, whole=False, ratios=model in listed(args.searched)) for model in models[1:]]
    found += [one for some in within[1:] for one in some]
    return found + [Part(shape, model, None, whole=False) for shape in shapes[1:] for model in models[1:]]


class Suite:
    """The cells of a run, in their order; graphs and groups are made when the first cell that needs them runs."""

    def __init__(self, recorder: Recorder, args: Namespace) -> None:
        self.recorder, self.args = recorder, args
        self._graphs: dict[str, Graph] = {}

    def run(self) -> None:
        """Everything."""
        for part in parts_of(self.args):
            if part.budget is None:
                make = lambda p=part: make_case(self.graph(p.shape), p.shape, p.model, self.args)  # noqa: E731
                self._cells(part, self.keys(part), make)
            else:
                self.within_budget(part)

    # ---- one shape and model -------------------------------------------------------------------------

    def keys(self, part: Part) -> list[Key]:
        """Sides over worker counts, and ratios."""
        counts, base = _counts(self.args, part.whole), part.base
        keys = [{**base, "side": "profile"}] + [{**base, "workers": w, "side": side} for w in counts for side in SIDES]
        most, steps = {**base, "workers": self.args.most_workers}, self.args.ratios
        if part.ratios:
            keys += [{**most, "side": f"share {step / steps:.2f}"} for step in range(1, steps)]
        return keys

    def _cells(self, part: Part, keys: list[Key], make: Callable[[], Case]) -> None:
        """The cells of one case, which is made unless all of them are known, or the time does not suffice for it."""
        if all(find(self.recorder.cells, **key) for key in keys):
            self.recorder.say(f"{part.label}: done before")
            return
        gc.collect()  # the case before: two at once may not fit
        enough = self.recorder.left > CASE_SECONDS or self.args.quick
        case = self.recorder.prepare(part.label, make) if enough else None
        for key in keys:
            self.recorder.cell(key, partial(self._cell, case, key), free=False)

    def _cell(self, case: Case | None, key: Key) -> dict[str, Any]:
        if case is None:
            raise NotHere("its group was not made: there is no plan, no time was left, or it failed")
        side = key["side"]
        if side == "profile":
            return phases_of(case)
        return self._known(key) or self._measured(case, key)

    def _measured(self, case: Case, key: Key) -> dict[str, Any]:
        division = case.side(key["side"], key["workers"])
        if key["side"] == "weft" and (division.kind == "sequential" or not self._divides(key)):
            same = self._known({**key, "side": "device"})
            if same is not None:
                return {**same, "same_as": "device"}
        # Of what is compared most closely all repeats; what is slow varies little.
        closely = key["workers"] == self.args.most_workers and key["side"] in SIDES[:2]
        return measure(case, division, self.args.repeats if closely else 1, self.args.cell_seconds)

    def _divides(self, key: Key) -> bool:
        """Whether the plan that a cell is of lets the host prepare batches; without a budget a profile decides."""
        about = {name: key[name] for name in ("shape", "model", "budget_gib")}
        made = find(self.recorder.cells, **about, side="plan") if key["budget_gib"] is not None else None
        return made is None or bool(made.get("divides", True))

    def _known(self, key: Key, free: str = "workers") -> dict[str, Any] | None:
        """What was measured already of the device, which does not depend on the workers; ``free``: or on what else."""
        if key["side"] != "device" and free == "workers":
            return None
        found = find(self.recorder.cells, **{name: value for name, value in key.items() if name != free})
        dropped = (*key, "status", "cell_seconds")
        if found is None:
            return None
        return {**{name: value for name, value in found.items() if name not in dropped}, "same_as": key["side"]}

    def graph(self, shape: str) -> Graph:
        """The graph of a shape; all are kept, in host memory."""
        if shape not in self._graphs:
            made = self.recorder.prepare(f"graph {shape}", lambda: shape_graph(shape, self.recorder.device, self.args))
            if made is None:
                raise RuntimeError(f"the graph of shape {shape} could not be made")
            self._graphs[shape] = made
        return self._graphs[shape]

    # ---- budgets -------------------------------------------------------------------------------------

    def within_budget(self, part: Part) -> None:
        """The plan within a budget, and its sides over all worker counts."""
        make_plan_ = partial(self._planned, part.shape, part.model, part.budget)
        made = self.recorder.cell({**part.base, "side": "plan"}, make_plan_)
        keys = self.keys(part)
        if made["status"] != "ok":
            for key in keys:
                self.recorder.cell(key, partial(self._cell, None, key), free=False)
            return
        place = DataPlacement.from_dict(made["placement"])
        if place.on_device:
            for key in keys[1:]:
                if key["side"] in SIDES:
                    self.recorder.cell(key, partial(self._on_device, key, place), free=False)
            return
        about = (place, made["device_buffer"])
        machine, most = find_machine(self.args.machine), parse_bytes(f"{part.budget}GiB")

        def make() -> Case:
            graph = self.graph(part.shape)  # on the GPU first, which takes more than a small budget
            capped.enter_context(memory_cap(self.recorder.device, machine, most))
            return make_case(graph, part.shape, part.model, self.args, *about)

        with ExitStack() as capped:
            self._cells(part, keys, make)

    def _on_device(self, key: Key, place: DataPlacement) -> dict[str, Any]:
        """Of a plan that has everything on the GPU, so that Weft's way is the GPU's; the host as measured elsewhere."""
        host = key["side"] == "host"
        known = self._known(key, "budget_gib") if host else self._known({**key, "side": "device"})
        if known is None and host:
            raise NotHere("the host's side was not measured within another budget")
        if known is not None:
            return known
        graph = self.graph(key["shape"])
        return {"ms_per_batch": plain_ms(graph, task_of(graph, key["model"], self.args), place, self.args)}

    def _planned(self, shape: str, model: str, budget: float) -> dict[str, Any]:
        graph = self.graph(shape)
        task = task_of(graph, model, self.args)
        group = make_plan(task, machine=self.args.machine, budget=parse_bytes(f"{budget}GiB")).groups[0]
        seconds = group.cost.epoch_seconds / max(self.args.batches, 1)
        about = {"placement": group.plan.places.to_dict(), "predicted_gb": round(group.cost.total_bytes / 1e9, 3)}
        about |= {"nodes": graph.num_nodes, "edges": graph.num_edges}
        division = group.plan.division
        about["divides"] = division is not None
        about["device_buffer"] = DEVICE_BUFFER if division is None else division.device_buffer
        return {**about, "predicted_ms_per_batch": round(1e3 * seconds, 4), "why": list(group.plan.why)}


def _counts(args: Namespace, whole: bool) -> list[int]:
    """Worker counts from the most down: what takes longest comes last."""
    counts = sorted({int(text) for text in listed(args.workers)}, reverse=True)
    few = {int(text) for text in listed(args.few_workers)} & set(counts)
    return counts if whole else sorted(few, reverse=True) or counts[:2]


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="on this CPU, with a thread in place of the GPU")
    parser.add_argument("--shapes", default="products,uk")
    parser.add_argument("--models", default="sage,gcn,gat")
    parser.add_argument("--workers", default="1,2,4,8,14", help="threads of the host, for the first model and shape")
    parser.add_argument("--few-workers", default="4,14", help="of them for the others")
    parser.add_argument("--budgets", default="12,24,80", help="GiB of the GPU that plans are made for; empty: none")
    parser.add_argument("--budget-shape", default="papers100m", help="that they are for")
    parser.add_argument("--machine", default="h200", help="that they are made for")
    parser.add_argument("--searched", default="sage,gcn", help="models of which all ratios are measured")
    parser.add_argument("--papers-scale", type=float, default=0.5, help="of papers100M, if the host's memory holds it")
    parser.add_argument("--batches", type=int, help=f"per epoch; {BATCHES}, with --quick {QUICK_BATCHES}")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="of an epoch of a cell, or fewer batches")
    parser.add_argument("--seeds", type=int, default=1024, help="per batch")
    parser.add_argument("--ratios", type=int, default=6, help="steps of the search over the ratio")
    parser.add_argument("--repeats", type=int, default=2, help="timed epochs per cell with most workers")
    parser.add_argument("--profile-seconds", type=float, help="limit of a profile; 1.7 epochs, about, unless given")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    args = parser.parse_args()
    args.batches = args.batches or (QUICK_BATCHES if args.quick else BATCHES)
    if args.quick:
        torch.set_num_threads(1)  # threads of the host and of the accelerator share few cores
        args.device, args.seeds, args.profile_seconds, args.cell_seconds = "cpu", 8, 4.0, float("inf")
        args.workers = ",".join(text for text in listed(args.workers) if int(text) <= 4) or "2"
    args.most_workers = max(int(text) for text in listed(args.workers))
    return args


def main() -> None:
    """Run the cells and print the tables."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("division", args)
    Suite(recorder, args).run()
    recorder.print_tables(runs.division, runs.division_goals)


if __name__ == "__main__":
    main()
