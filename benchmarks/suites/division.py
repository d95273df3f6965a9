"""Batch preparation divided between CPU and GPU: simulator against reality, against either side alone, over workers.

    python -m benchmarks.suites.division --out division.json --budget-seconds 390 --stress

Features and edges lie in pinned host memory, or partly in a cache of the GPU. An epoch has ``--batches`` batches of
``--seeds`` seeds with fan-out [15, 10, 5]; evaluation is left out. Shapes: products; papers100M, as much of it as the
host's memory holds; uk-like, which has the degrees of products and 256 random features, with random training nodes (as
MorphGL makes UK).
Sides: ``host`` (CPU threads prepare all batches), ``device`` (the GPU samples and gathers over PCIe beside training)
and ``weft`` (the division that a profile leads to); ``share S``: an exhaustive search over the ratio. Per cell: the
epoch's measured and simulated seconds and the busy share of CPU, PCIe and GPU. ``--stress`` adds busy processes in the
middle of a run and shows how epochs go on with and without adapting. ``--budgets``: the epoch of what ``weft.plan``
chooses within so many GiB of the GPU, beside both sides alone with the same cache.

Every shape has its share of ``--budget-seconds``, and the budgets have the last; a cell that no longer fits is skipped,
and the results file is written after each. ``--quick`` runs the same on this CPU: a thread with given phase times
stands in for the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness.busy import profile
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.host_graph import PAPERS, fitting_scale, papers_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import synchronize
from weft.core.division import Division, PhaseTimes
from weft.core.placement import Placement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.planning.plan_report_builder import plan as make_plan
from weft.flow.division.thread_accelerator import ThreadAccelerator
from weft.graph.data.graph import Graph
from weft.graph.generate import citation
from weft.planner.division.adapting import Adapter
from weft.planner.division.partitioner import Limits, overlap_for, partition
from weft.planner.division.simulator import simulate
from weft.runtime.batches.divided_source import DividedSampled, DividedSampling
from weft.runtime.batches.placing import place_graph
from weft.runtime.batches.sampled_source import Sampling
from weft.runtime.group import GroupRun
from weft.runtime.profile_division import divided_source, profile_group

MOST_EPOCHS = 1000
PROFILED = 12  # steps
HIDDEN = {"sage": 256, "gcn": 64, "gat": 64}
SHARES = {
    "products": 0.45,
    "papers100m": 0.45,
    "uk": 0.5,
}  # of what is left of the time, by shape; budgets have the rest
PCIE = 55.2e9  # bytes per second of a copy
DEVICE_BUFFER, SPARE_SLOTS = 4, 4
SIDES = ("host", "device", "weft")
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

    @property
    def batches(self) -> int:
        return self.source.steps_per_epoch

    def side(self, name: str, workers: int) -> Division:
        """The division of a side of the comparison."""
        registry, trainer = self.source.hardware.registry(), self.source.hardware.name
        limits = replace(self.limits, workers=workers, beside=registry.beside(trainer))
        if name == "host":
            return overlap_for(0.0, limits, trainer, workers)
        if name == "device":
            return overlap_for(1.0, limits, trainer, workers)
        if name.startswith("share "):
            return overlap_for(float(name.split()[1]), limits, trainer, workers)
        return partition(self.times, registry, self.batches, limits, trainer, workers).division


# ---- graphs and groups -------------------------------------------------------------------------------


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
    return place_graph(graph._changed(**changed), Placement("host", "host", overlap=True), device)


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


def make_case(graph: Graph, shape: str, model: str, args: Namespace, cache: int = 0) -> Case:
    """A group on ``graph``, profiled with all workers."""
    device = torch.device(args.device)
    place = Placement("cached" if cache else "host", "host", cache_bytes=cache, overlap=True)
    task, plan = task_of(graph, model, args), plan_of(model, place, device)
    fake = ThreadAccelerator("npu", QUICK[shape] | {"training_npu": QUICK_TRAINING[model]}) if args.quick else None
    sampling = Sampling(fanout(args), args.seeds, placement=place)
    trainer = "npu" if fake else "gpu"
    room = Division(1, 1, args.most_workers, args.most_workers + SPARE_SLOTS, DEVICE_BUFFER, trainer=trainer)
    group = GroupRun([task], graph, plan, device, make_source=DividedSampling(sampling, room, fake))
    source = divided_source(group)
    assert source is not None
    if fake is not None:
        _pace_training(group, fake)
    group.advance(1)  # compiles, captures, pins
    synchronize(device)
    begin = time.perf_counter()
    times = profile_group(group, args.most_workers, limit=args.profile_seconds)
    seconds = time.perf_counter() - begin
    limits = Limits(source.slots - 1, DEVICE_BUFFER, args.most_workers)
    return Case(group, source, times, limits, seconds, fake)


def _pace_training(group: GroupRun, fake: ThreadAccelerator) -> None:
    """Let training steps run as commands of the accelerator, for at least as long as its phase."""
    (stack,) = group.stacks
    plain = stack.train_on
    stack.train_on = lambda batch: fake.train(lambda: plain(batch))  # type: ignore[method-assign]


# ---- cells -------------------------------------------------------------------------------------------


def measure(case: Case, division: Division, repeats: int) -> dict[str, Any]:
    """Seconds of an epoch under ``division``, measured and simulated."""
    device = case.group.device
    case.source.divide(division)
    case.group.advance(1)  # buffers and captures of this division
    synchronize(device)
    case.source.phases()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        case.group.advance(1)
        synchronize(device)
        found.append(time.perf_counter() - begin)
    busy = {key: time.mean * time.count / repeats for key, time in case.source.phases().items()}
    seconds = sorted(found)[len(found) // 2]
    registry = case.source.hardware.registry()
    simulated = simulate(case.source.division, case.times, case.batches, registry)
    return {
        "epoch_seconds": round(seconds, 5),
        "ms_per_batch": round(1e3 * seconds / case.batches, 4),
        "simulated_seconds": round(simulated.seconds, 5),
        "error": round(simulated.seconds / seconds - 1, 4),
        "device_share": round(division.device_share, 3),
        "division": division.to_dict(),
        "busy": _busy(busy, seconds, division) or _busy_alone(case, seconds),
        "bus_gb_s": round(case.times.bytes * case.batches / seconds / 1e9, 2),
        "simulated_busy": {name: round(share, 3) for name, share in simulated.utilisation().items()},
        "batches": case.batches,
    }


def _busy(seconds: dict[str, float], epoch: float, division: Division) -> dict[str, float]:
    """Busy share of each resource; empty where captured steps do everything on the device."""
    host = seconds.get("batching_cpu", 0.0) / division.workers
    bus = sum(value for key, value in seconds.items() if key.startswith("transfer") or key == "batching_gpu")
    device = sum(value for key, value in seconds.items() if key.startswith("training"))
    found = {"cpu": host, "pcie": bus, "gpu": device}
    return {name: round(value / epoch, 3) for name, value in found.items()} if seconds else {}


def _busy_alone(case: Case, epoch: float) -> dict[str, float]:
    """Of a GPU that prepares all batches in captured steps: by its kernels, and by the bytes that cross the bus."""
    if case.group.device.type != "cuda":
        return {}
    left = iter(range(PROFILED - 1))
    found = profile(lambda: case.group.advance(1, lambda: next(left, None) is None), PROFILED)
    case.group.advance(1)  # the rest of that epoch
    bus = case.times.bytes * case.batches / epoch / PCIE
    return {"cpu": 0.0, "pcie": round(bus, 3), "gpu": found["busy"]} if found["busy"] is not None else {}


def phases_of(case: Case) -> dict[str, Any]:
    """The profile as a cell."""
    means = {key: round(1e3 * time.mean, 4) for key, time in case.times.phases.items()}
    stds = {key: round(1e3 * time.std, 4) for key, time in case.times.phases.items()}
    about = {"crowding": round(case.times.crowding, 4), "batch_mb": round(case.times.bytes / 1e6, 2)}
    factors = {key: {k: round(v, 3) for k, v in others.items()} for key, others in case.times.interference.items()}
    captured = {key: round(1e3 * one.mean, 4) for key, one in case.times.captured.items()}
    about |= {"beside": factors, "captured_ms": captured}
    return {"profile_seconds": round(case.profile_seconds, 3), "ms": means, "std_ms": stds, **about}


def compare(recorder: Recorder, case: Case, key: dict[str, Any], workers: int, args: Namespace) -> None:
    """Host alone, device alone (the same for any number of workers), and Weft's division."""
    for side in SIDES:
        about = {**key, "workers": workers, "side": side}
        recorder.cell(about, within(args, recorder, partial(one_side, recorder, case, about, args)), free=False)


def one_side(recorder: Recorder, case: Case, key: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The epoch of a side; of the device alone as measured before, if it was."""
    same = {name: value for name, value in key.items() if name != "workers"}
    known = find(recorder.cells, **same) if key["side"] == "device" else None
    if known is None:
        return measure(case, case.side(key["side"], key["workers"]), args.repeats)
    return {name: value for name, value in known.items() if name not in (*key, "status", "cell_seconds")}


def search(recorder: Recorder, case: Case, key: dict[str, Any], workers: int, args: Namespace) -> None:
    """Every ratio, measured."""
    for step in range(1, args.ratios):
        side = f"share {step / args.ratios:.2f}"
        about = {**key, "workers": workers, "side": side}
        work = lambda s=side: measure(case, case.side(s, workers), args.repeats)  # noqa: E731
        recorder.cell(about, within(args, recorder, work), free=False)


def within(args: Namespace, recorder: Recorder, work: Callable[[], Any]) -> Callable[[], Any]:
    """``work``, unless the shape has had its share of the time."""

    def limited() -> Any:
        if recorder.elapsed > args.deadline:
            raise NotHere("the shape's share of the time was spent")
        return work()

    return limited


def run_all(recorder: Recorder, args: Namespace) -> None:
    """Models and shapes over worker counts, with a noisy neighbour and ratios beside the first; then the budgets."""
    shapes = listed(args.shapes)
    for shape in shapes:
        args.deadline = recorder.elapsed + SHARES.get(shape, 0.5) * recorder.left
        run_shape(recorder, shape, args, first=shape == shapes[0])
    args.deadline = float("inf")
    if listed(args.budgets):
        run_budgets(recorder, shapes[0], args)


def run_shape(recorder: Recorder, shape: str, args: Namespace, first: bool) -> None:
    """Every model on one shape; all worker counts for the first model of the first shape, few for the others."""
    graph = recorder.prepare(
        f"graph {shape}", within(args, recorder, lambda: shape_graph(shape, recorder.device, args))
    )
    if graph is None:
        return
    for model in listed(args.models):
        key = {"shape": shape, "model": model, "cache_gib": 0.0, "nodes": graph.num_nodes}
        make = within(args, recorder, lambda m=model: make_case(graph, shape, m, args))
        case = recorder.prepare(f"{shape} {model}", make)
        if case is None:
            continue
        leads = model == listed(args.models)[0]
        recorder.cell({**key, "side": "profile"}, lambda c=case: phases_of(c), free=False)
        for workers in _counts(args, whole=first and leads):
            compare(recorder, case, key, workers, args)
        if args.stress and first and leads:
            for adapting in (True, False):
                about = {**key, "side": "stress", "adapting": adapting}
                recorder.cell(
                    about, within(args, recorder, lambda c=case, a=adapting: stressed(c, a, args)), free=False
                )
        if model in listed(args.searched):
            search(recorder, case, key, args.most_workers, args)
        del case


def _counts(args: Namespace, whole: bool) -> list[int]:
    """Worker counts from the most down: what takes longest comes last."""
    counts = sorted({int(text) for text in listed(args.workers)}, reverse=True)
    few = {int(text) for text in listed(args.few_workers)} & set(counts)
    return counts if whole or args.all_workers else sorted(few, reverse=True) or counts[:2]


# ---- budgets -----------------------------------------------------------------------------------------


def run_budgets(recorder: Recorder, shape: str, args: Namespace) -> None:
    """What is planned within so many bytes of the GPU, for every model."""
    graph = recorder.prepare(f"graph {shape}", lambda: shape_graph(shape, recorder.device, args))
    for budget in (float(text) for text in listed(args.budgets)):
        for model in listed(args.models) if graph is not None else ():
            key = {"shape": shape, "model": model, "budget_gib": budget, "side": "planned"}
            recorder.cell(key, lambda b=budget, m=model: planned(graph, shape, m, b, args))


def planned(graph: Graph, shape: str, model: str, budget: float, args: Namespace) -> dict[str, Any]:
    """Seconds of an epoch as planned within ``budget`` GiB; beside both sides alone where things are in host memory."""
    task = task_of(graph, model, args)
    report = make_plan(task, machine=args.machine, budget=parse_bytes(f"{budget}GiB"))
    group = report.groups[0]
    place = group.plan.places
    about = {"features": place.features, "topology": place.topology, "cache_gb": round(place.cache_bytes / 1e9, 3)}
    about |= {"predicted_gb": round(group.cost.total_bytes / 1e9, 3), "why": list(group.plan.why)}
    about |= {"predicted_ms_per_batch": round(1e3 * group.cost.epoch_seconds / args.batches, 4)}
    if place.on_device:
        return {"weft_ms": _plain(graph, task, place, args), **about}
    case = make_case(graph, shape, model, args, place.cache_bytes if place.features == "cached" else 0)
    sides = {
        side: measure(case, case.side(side, args.most_workers), args.repeats) for side in ("host", "device", "weft")
    }
    return {**{f"{side}_ms": found["ms_per_batch"] for side, found in sides.items()}, **about,
            "division": sides["weft"]["division"]}  # fmt: skip


def _plain(graph: Graph, task: Task, place: Placement, args: Namespace) -> float:
    """Milliseconds per batch with everything on the device."""
    device = torch.device(args.device)
    place = replace(place, evaluation="whole")
    make = Sampling(fanout(args), args.seeds, placement=place)
    run = GroupRun([task], graph, plan_of(task.label, place, device), device, make_source=make)
    run.advance(1)
    synchronize(device)
    begin = time.perf_counter()
    run.advance(args.repeats)
    synchronize(device)
    steps = run.stacks[0].source.steps_per_epoch
    return round(1e3 * (time.perf_counter() - begin) / args.repeats / steps, 4)


# ---- a noisy neighbour -------------------------------------------------------------------------------


CALM, BUSY = 3, 6  # epochs


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that keep as many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def stressed(case: Case, adapting: bool, args: Namespace) -> dict[str, Any]:
    """Epochs before and after other processes take the cores; ``adapting``: divide anew when phases drift.

    Begins with a division in which the host has a part, since a busy neighbour does nothing to a GPU.
    """
    chosen = case.side("weft", args.most_workers)
    case.source.divide(chosen if chosen.host_batches else case.side("share 0.33", args.most_workers))
    begun, registry = case.source.division, case.source.hardware.registry()
    adapter = Adapter(case.times, case.source.division, registry, case.limits, case.batches)
    seconds: list[float] = []
    notes: list[str] = []
    changed: list[int] = []

    def epochs(count: int) -> None:
        for _ in range(count):
            case.source.phases()
            begin = time.perf_counter()
            case.group.advance(1)
            synchronize(case.group.device)
            seconds.append(time.perf_counter() - begin)
            measured = {key: one.mean for key, one in case.source.phases().items()}
            change = adapter.observe(measured) if adapting and measured else None
            notes.extend(adapter.told(seconds[-1], change))
            if change is not None:
                case.source.divide(change.division)
                changed.append(len(seconds))

    epochs(CALM)
    with busy_processes(2 * (os.cpu_count() or 2)):
        time.sleep(0.5)
        epochs(BUSY)
    after = seconds[CALM:]
    within_two = [one - CALM for one in changed if one > CALM]
    return {
        "begun": begun.words(),
        "before_seconds": round(sorted(seconds[1:CALM])[(CALM - 1) // 2], 4),
        "first_two_seconds": round(sum(after[:2]) / 2, 4),
        "later_seconds": round(sorted(after[3:])[len(after[3:]) // 2], 4),
        "adapted_after_epochs": within_two[0] if within_two else None,
        "epochs": [round(one, 4) for one in seconds],
        "notes": notes,
    }


# ---- report ------------------------------------------------------------------------------------------


def print_report(recorder: Recorder) -> None:
    """Sides beside each other, errors of the simulator, and the chosen ratio against the best measured."""
    compared, errors = [], []
    keys = {(c["shape"], c["model"], c["workers"]) for c in recorder.cells if "workers" in c}
    for shape, model, workers in sorted(keys):
        key = {"shape": shape, "model": model, "workers": workers}
        found = {side: find(recorder.cells, **key, side=side) for side in ("host", "device", "weft")}
        if not all(found.values()):
            continue
        host, device, weft = (found[side]["ms_per_batch"] for side in ("host", "device", "weft"))
        ratios = [c["ms_per_batch"] for c in recorder.cells
                  if c["status"] == "ok" and all(c.get(k) == v for k, v in key.items())]  # fmt: skip
        errors += [cell["error"] for cell in found.values()]
        busy = found["weft"]["busy"] or found["weft"]["simulated_busy"]
        compared.append([shape, model, workers, host, device, weft, found["weft"]["device_share"],
                         min(host, device) / weft, weft / min(ratios), found["weft"]["error"],
                         " ".join(f"{k} {v:.0%}" for k, v in busy.items())])  # fmt: skip
    print_table(["shape", "model", "workers", "host ms", "device ms", "weft ms", "device share",
                 "better side / weft", "weft / best ratio", "sim error", "busy"], compared)  # fmt: skip
    for cell in recorder.cells:
        if cell.get("side") == "profile" and cell["status"] == "ok":
            print(f"{cell['shape']} {cell['model']}: profile {cell['profile_seconds']} s, ms {cell['ms']}, "
                  f"crowding {cell['crowding']}")  # fmt: skip
        if cell.get("side") == "stress" and cell["status"] == "ok":
            print(f"stress, adapting {cell['adapting']}: before {cell['before_seconds']} s, first two epochs "
                  f"{cell['first_two_seconds']}, later {cell['later_seconds']}, divided anew after "
                  f"{cell['adapted_after_epochs']} epochs; {cell['notes']}")  # fmt: skip
        if cell.get("side") == "planned" and cell["status"] == "ok":
            sides = ", ".join(
                f"{side} {cell[f'{side}_ms']}" for side in ("host", "device", "weft") if f"{side}_ms" in cell
            )
            print(f"{cell['shape']} {cell['model']} within {cell['budget_gib']:g} GiB: features {cell['features']}, "
                  f"edges {cell['topology']}, cache {cell['cache_gb']} GB; ms per batch {sides}")  # fmt: skip
    if errors:
        within = sum(abs(error) <= 0.1 for error in errors)
        print(f"simulator within 10 % of measured epochs: {within} of {len(errors)} configurations")
    recorder.save()


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="on this CPU, with a thread in place of the GPU")
    parser.add_argument("--shapes", default="products,papers100m,uk")
    parser.add_argument("--models", default="sage,gcn,gat")
    parser.add_argument("--workers", default="1,2,4,8,14", help="threads of the host, for the first model and shape")
    parser.add_argument("--few-workers", default="4,14", help="of them for the others")
    parser.add_argument("--all-workers", action="store_true", help="all worker counts for every model")
    parser.add_argument(
        "--budgets", default="12,24,80", help="GiB of the GPU that plans are made for, on the first shape"
    )
    parser.add_argument("--machine", default="h200", help="that they are made for")
    parser.add_argument("--searched", default="sage,gcn", help="models of which all ratios are measured")
    parser.add_argument("--papers-scale", type=float, default=1.0, help="of papers100M, if the host's memory holds it")
    parser.add_argument("--batches", type=int, default=48, help="per epoch")
    parser.add_argument("--seeds", type=int, default=1024, help="per batch")
    parser.add_argument("--ratios", type=int, default=6, help="steps of the search over the ratio")
    parser.add_argument("--repeats", type=int, default=2, help="timed epochs per cell")
    parser.add_argument("--profile-seconds", type=float, default=3.0)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    parser.add_argument("--stress", action="store_true", help="also epochs beside busy processes")
    args = parser.parse_args()
    if args.quick:
        torch.set_num_threads(1)  # threads of the host and of the accelerator share few cores
        args.device, args.seeds, args.profile_seconds = "cpu", 8, 4.0
        args.workers = ",".join(text for text in listed(args.workers) if int(text) <= 4) or "2"
    args.most_workers = max(int(text) for text in listed(args.workers))
    return args


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("division", args)
    run_all(recorder, args)
    print_report(recorder)


if __name__ == "__main__":
    main()
