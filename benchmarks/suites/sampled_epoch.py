"""Sampled training end to end: seconds per epoch of SAGE, by where features lie, how stages overlap, and for sweeps.

    python -m benchmarks.suites.sampled_epoch --out sampled_epoch.json --budget-seconds 220

SAGE, 3 layers of 256, fan-out [15, 10, 5], batches of 1,024 seeds, on the products shape (196,615 training nodes: 193
steps per epoch); whole epochs, without evaluation, after one that compiles and captures. Cases:

    gpu              everything on the GPU, sampling, fetching and training as one CUDA graph
    host             features in pinned host memory, read over PCIe: in stages without CUDA graphs, serial in one CUDA
                     graph, pipelined (the next batch is fetched while one trains); edges there too
    cached           a part of the rows also on the GPU, by degree and by presampling
    sweeps           8 tasks on shared batches, in fp32, tf32 and bf16
    stages           on a CPU: one after another, and overlapped
    pyg              PyG's GraphSAGE, eager, on the local subgraphs of the same sampler
    papers100M       the shape of ogbn-papers100M within 40 GiB of the GPU, placed as planned

``busy`` is the share of the time in which a kernel runs (torch's profiler, some steps after the timed epoch);
``predicted`` is what ``weft.plan`` says beside what was measured. ``--quick`` leaves out what is not asked for most.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness.graphs import fresh, full_name, make_graph
from benchmarks.harness.host_graph import PAPERS, fitting_scale, papers_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed
from benchmarks.harness.timing import Memory, profile, synchronize
from weft.batches.placement import place_graph
from weft.batches.sampled import Sampling, source_for
from weft.batches.sampler import NeighbourSampler, SeedOrder
from weft.core.errors import WeftError
from weft.core.host_memory import free_host_bytes
from weft.core.placement import DataPlacement, on_device
from weft.core.plan import Plan
from weft.core.run_options import Placement, RunOptions
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.machine import machine_with
from weft.engine.memory import memory_cap
from weft.engine.plan import plan as make_plan
from weft.graph.graph import Graph
from weft.runtime.device.process import matmul_precision
from weft.runtime.group import GroupRun

Cell = dict[str, Any]
PLAIN = {"tasks": 1, "precision": "fp32"}
PIPELINED = {"case": "host, pipelined"}
ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("without CUDA graphs over pipelined", {"case": "host, stages without CUDA graphs"}, PIPELINED),
    ("serial over pipelined", {"case": "host, serial"}, PIPELINED),
    ("serial over cached, pipelined", {"case": "host, serial"}, {"case": "cached by degree, pipelined"}),
    ("PyG over Weft, all on the GPU", {"case": "eager"}, {"case": "gpu"}),
    *(
        (
            f"8 tasks over one, {kind}",
            {"case": "gpu", "tasks": 8, "precision": kind},
            {"case": "gpu", "precision": kind},
        )
        for kind in ("fp32", "tf32", "bf16")
    ),
    ("8 tasks over one, host, pipelined", {**PIPELINED, "tasks": 8}, PIPELINED),
]


def ratios(cells: Sequence[Cell]) -> Iterator[tuple[str, float]]:
    """What is compared, and how many times as long an epoch takes; of one run each, where cells are of several."""
    for words, *sides in ASKED:
        upper, lower = (find(cells, **{**PLAIN, **wanted}) for wanted in sides)
        if upper is not None and lower is not None and upper.get("run") == lower.get("run"):
            yield words, upper["epoch_seconds"] / lower["epoch_seconds"]


SHAPE_PARTS = {"papers100m": "papers"}
MOST_EPOCHS = 200  # more than are trained: nothing is evaluated
PROFILED = 24  # steps
WARMUP = 10  # steps of papers100M that are not timed
CACHED = 0.4  # share of the features' bytes, of a cache


@dataclass(frozen=True)
class Case:
    """One cell: where things lie, how they are trained, and the options by which a plan comes to the same."""

    name: str
    placement: DataPlacement | None
    tasks: int = 1
    precision: str = "fp32"
    sampling: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] | None = None
    profiled: bool = False
    quick: bool = True


def cases(graph: Graph, args: Namespace) -> list[Case]:
    """Those of the machine at hand."""
    if args.device == "cpu":
        return [
            Case("stages, one after another", None, sampling={"depth": 1}),
            Case("stages, overlapped", None, sampling={"depth": 3}),
            Case("stages, overlapped", None, tasks=2, sampling={"depth": 3}),
        ]
    cache = int(CACHED * graph.x.numel() * graph.x.element_size()) + 4 * graph.num_nodes
    host, ahead = DataPlacement("host"), DataPlacement("host", overlap=True)
    degree = DataPlacement("cached", cache_bytes=cache, overlap=True)
    return [
        Case("gpu", DataPlacement(), planned={}, profiled=True),
        Case("gpu, next batch fetched meanwhile", DataPlacement(overlap=True), quick=False),
        Case("host, stages without CUDA graphs", host, sampling={"captured": False, "depth": 1}),
        Case("host, serial", host),
        Case("host, pipelined", ahead, planned={"features": "host"}, profiled=True),
        Case("host, edges too, pipelined", DataPlacement("host", "host", overlap=True), quick=False,
             planned={"features": "host", "topology": "host"}),
        Case("cached by degree, pipelined", degree, planned={"cache": cache}, profiled=True),
        Case("cached by presampling, pipelined",
             DataPlacement("cached", cache_bytes=cache, policy="presampling", overlap=True), quick=False),
        Case("gpu", DataPlacement(), tasks=8, planned={}, profiled=True),
        Case("gpu", DataPlacement(), precision="tf32"),
        Case("gpu", DataPlacement(), tasks=8, precision="tf32", profiled=True),
        Case("gpu", DataPlacement(), precision="bf16"),
        Case("gpu", DataPlacement(), tasks=8, precision="bf16", profiled=True),
        Case("host, pipelined", ahead, tasks=8, planned={"features": "host"}, quick=False),
    ]  # fmt: skip


def tasks_of(graph: Graph | str, count: int, args: Namespace, precision: str = "fp32") -> list[Task]:
    """``count`` tasks that differ in their rate and seed."""
    hops = fanouts(args)
    about = {"layers": len(hops), "hidden": args.hidden, "dropout": 0.5, "precision": precision}
    about |= {"mode": "sampled", "fanout": list(hops), "batch": args.batch}
    often = {"epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
    return [
        Task(graph=graph, model="sage", name=f"sage-{place}", seed=place, lr=0.003 * (1 + place / 8), **about, **often)
        for place in range(count)
    ]


def fanouts(args: Namespace) -> tuple[int, ...]:
    """Neighbours per hop."""
    return tuple(int(text) for text in listed(args.fanout))


def run_of(graph: Graph, case: Case, args: Namespace) -> GroupRun:
    """The group of a case, ready to train."""
    device, tasks = torch.device(args.device), tasks_of(graph, case.tasks, args, case.precision)
    placement = case.placement or on_device(device.type)
    join = "stacked" if case.tasks > 1 else "solo"
    about = {"device": device.type, "replay": device.type == "cuda", "placement": placement}
    plan = Plan(tuple(task.name for task in tasks), join=join, **about)
    given = None if case.placement is None else placement
    make = Sampling(fanouts(args), args.batch, **{"placement": given, **case.sampling})
    return GroupRun(tasks, graph, plan, device, make_source=make)


def measure(graph: Graph, case: Case, args: Namespace) -> dict[str, Any]:
    """Seconds of an epoch, memory, what caches had and how busy the device was."""
    device = torch.device(args.device)
    with matmul_precision(case.precision):
        memory, run = Memory(device), run_of(graph, case, args)
        begin = time.perf_counter()
        run.advance(1)
        synchronize(device)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        run.advance(args.epochs)
        synchronize(device)
        seconds = (time.perf_counter() - begin) / args.epochs
        source, members = run.stacks[0].source, case.tasks
        busy = profile(lambda: some_steps(run, PROFILED), PROFILED) if case.profiled and device.type == "cuda" else {}
        steps = source.steps_per_epoch
        return {
            "epoch_seconds": round(seconds, 4),
            "ms": round(1e3 * seconds / steps, 4),
            "ms_per_task": round(1e3 * seconds / steps / members, 4),
            "first_epoch_seconds": round(first, 2),
            "steps_per_epoch": steps,
            "recorded": run.recorded,
            "peak_gb": memory.peak_gb(),
            "stages": {  # milliseconds per item, by their host threads
                one.name: round(1e3 * one.busy_seconds / one.items, 4) for one in source.pipeline.reports if one.items
            },
            **source.reads(),
            **busy,
            **predicted(case, args),
            "notes": run.notes,
        }


def some_steps(run: GroupRun, steps: int) -> None:
    """Train ``steps`` steps of the next epoch, or the whole of it if it has fewer."""
    left = iter(range(steps - 1))
    run.advance(1, lambda: next(left, None) is None)


def predicted(case: Case, args: Namespace) -> dict[str, Any]:
    """What a plan of the same says; nothing where there is none."""
    if case.planned is None or args.scale != 1.0:
        return {}
    tasks = tasks_of(f"shape:{full_name(args.shape)}", case.tasks, args, case.precision)
    try:
        options = RunOptions(placement=Placement(**case.planned))
        report = make_plan(tasks, machine=args.machine, budget=args.budget, options=options)
    except WeftError as error:
        return {"plan_error": str(error)}
    group = report.groups[0]
    return {
        "predicted_seconds": round(group.cost.epoch_seconds, 4),
        "predicted_gb": round(group.cost.total_bytes / 1e9, 3),
        "predicted_training_gb": round(group.cost.training_bytes / 1e9, 3),
        "planned_groups": len(report.groups),
    }


def measure_pyg(graph: Graph, args: Namespace) -> dict[str, Any]:
    """PyG's GraphSAGE, eager, with fused Adam, on local subgraphs that Weft's sampler makes on the same device."""
    try:
        from torch_geometric.nn import GraphSAGE
    except ImportError as error:
        raise NotHere("needs torch_geometric") from error
    device, hops = graph.device, fanouts(args)
    sampler = NeighbourSampler(graph, hops, subgraph=True)
    order = SeedOrder(graph.train, args.batch)
    model = GraphSAGE(graph.num_features, args.hidden, len(hops), graph.num_classes, dropout=0.5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=device.type == "cuda")
    model.train()
    steps = min(args.pyg_steps, len(order))
    seconds = 0.0
    for _ in range(2):  # the first time warms up
        synchronize(device)
        begin = time.perf_counter()
        for seeds in islice(order.epoch(0), steps):
            local = sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)
            optimizer.zero_grad()
            logits = model(graph.x[local.nodes.long()], local.edge_index)[: local.num_seeds]
            F.cross_entropy(logits, graph.y[local.seeds.long()]).backward()
            optimizer.step()
        synchronize(device)
        seconds = time.perf_counter() - begin
    step = seconds / steps
    ms = round(1e3 * step, 4)
    about = {"steps_per_epoch": len(order), "extrapolated": steps != len(order)}
    return {"epoch_seconds": round(step * len(order), 4), "ms": ms, "ms_per_task": ms, **about}


def run_papers(recorder: Recorder, args: Namespace) -> None:
    """The shape of papers100M, placed as planned within the budget."""
    scale = fitting_scale(args.papers_scale)
    if scale < args.papers_scale:
        recorder.say(
            f"papers100M: host memory is short ({free_host_bytes() / 2**30:.0f} GiB), so {scale:g} of the shape"
        )
    begin = recorder.elapsed
    graph = recorder.prepare(f"graph {PAPERS} x {scale:g}", lambda: papers_graph(recorder.device, scale))
    if graph is None and recorder.elapsed - begin < args.papers_seconds:
        scale = args.papers_scale / 2
        recorder.say("papers100M: it could not be made as a whole, so half of the shape")
        graph = recorder.prepare(f"graph {PAPERS} x {scale:g}", lambda: papers_graph(recorder.device, scale))
    if graph is None:
        return
    within, about = f"within {args.papers_budget}", {"tasks": 1, "precision": "fp32", "side": "weft"}
    key = {"shape": f"{PAPERS} x {scale:g}", **about}
    by_gpu = {**key, "case": f"{within}, as planned, by the GPU"}
    recorder.cell(by_gpu, lambda: measure_papers(graph, recorder.device, args))


def measure_papers(graph: Graph, device: torch.device, args: Namespace) -> dict[str, Any]:
    """Seconds of steps, extrapolated to an epoch, within the budget; memory as predicted and as taken."""
    budget = parse_bytes(args.papers_budget)
    (task,) = tasks_of(graph, 1, args)
    report = make_plan(task, machine=args.machine, budget=budget)
    group = report.groups[0]
    plan: Plan = group.plan
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with memory_cap(device, machine_with(device), budget) if gpu else nullcontext():
        begin = time.perf_counter()
        # Edges that a plan keeps in host memory leave the device.
        graph.adj = place_graph(graph, plan.places, device).adj
        run = GroupRun([task], graph, plan, device, make_source=source_for(task, plan))
        made = time.perf_counter() - begin
        source = run.stacks[0].source
        steps = min(args.papers_steps, source.steps_per_epoch - WARMUP - 1)
        step = timed_steps(run, steps) / steps
    places = plan.places
    return {
        "epoch_seconds": round(step * source.steps_per_epoch, 3),
        "ms": round(1e3 * step, 4),
        "ms_per_task": round(1e3 * step, 4),
        "steps": steps,
        "steps_per_epoch": source.steps_per_epoch,
        "extrapolated": True,
        "set_up_seconds": round(made, 2),
        "peak_gb": round(torch.cuda.max_memory_reserved(device) / 1e9, 3) if gpu else None,
        "predicted_gb": round(group.cost.total_bytes / 1e9, 3),
        "predicted_seconds": round(group.cost.epoch_seconds, 3),
        "features": places.features,
        "topology": places.topology,
        "cache_gb": round(places.cache_bytes / 1e9, 3),
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "recorded": run.recorded,
        **source.reads(),
        "why": list(plan.why),
        "notes": run.notes,
    }


def timed_steps(run: GroupRun, steps: int) -> float:
    """Seconds of ``steps`` steps, after some that are not timed."""
    times, places = {}, iter(range(1, WARMUP + steps + 1))

    def stop() -> bool:
        done = next(places)
        if done in (WARMUP, WARMUP + steps):
            synchronize(run.device)
            times[done] = time.perf_counter()
        return done == WARMUP + steps

    run.advance(1, stop)
    return times[WARMUP + steps] - times[WARMUP]


def run_all(recorder: Recorder, args: Namespace) -> None:
    """Every part in the order in which they are named, each within its share of the time."""
    for part in listed(args.parts):
        if part == "papers":
            run_papers(recorder, args)
            continue
        graph = recorder.prepare(f"graph {args.shape}", lambda: make_graph(args.shape, recorder.device, args.scale))
        if graph is not None:
            run_products(recorder, graph, args)
        del graph


def run_products(recorder: Recorder, graph: Graph, args: Namespace) -> None:
    """The first case, PyG, then the other cases."""
    begin = recorder.elapsed

    def run_case(case: Case) -> None:
        about = {"tasks": case.tasks, "precision": case.precision, "side": "weft"}
        work = within(recorder, begin, args, lambda: measure(fresh(graph), case, args))
        recorder.cell({"shape": args.shape, "case": case.name, **about}, work)

    first, *others = [case for case in cases(graph, args) if case.quick or not args.quick]
    run_case(first)
    key = {"shape": args.shape, "case": "eager", "tasks": 1, "precision": "fp32", "side": "pyg"}
    recorder.cell(key, within(recorder, begin, args, lambda: measure_pyg(graph, args)))
    for case in others:
        run_case(case)


def within(recorder: Recorder, begin: float, args: Namespace, work: Callable[[], dict[str, Any]]) -> Any:
    """``work``, unless this part has had its time."""

    def limited() -> dict[str, Any]:
        if recorder.elapsed - begin > args.part_seconds:
            raise NotHere(f"the part's {args.part_seconds:g} seconds were spent")
        return work()

    return limited


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--parts", default="", help="of products, papers, in this order")
    parser.add_argument("--shapes", default="", help="the same by the names of shapes: products, papers100M")
    parser.add_argument("--shape", default="products")
    parser.add_argument("--quick", action="store_true", help="leave out what is not asked for most")
    parser.add_argument(
        "--part-seconds", type=float, default=150.0, help="of a part, after which its cells are skipped"
    )
    parser.add_argument("--epochs", type=int, default=1, help="timed, after one that compiles and captures")
    parser.add_argument("--fanout", default="15,10,5", help="neighbours per hop, a layer for each")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--budget", default="16GiB", help="of the plans that predictions are from")
    parser.add_argument("--machine", default="h200", help="whose rates predictions are from")
    parser.add_argument("--pyg-steps", type=int, default=40, help="of PyG, extrapolated to an epoch")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    parser.add_argument("--papers-scale", type=float, default=1.0)
    parser.add_argument("--papers-budget", default="40GiB")
    parser.add_argument("--papers-steps", type=int, default=300, help="timed, extrapolated to an epoch")
    parser.add_argument("--papers-seconds", type=float, default=70.0, help="that making the graph may take")
    args = parser.parse_args()
    named = ",".join(SHAPE_PARTS.get(shape.lower(), shape) for shape in listed(args.shapes))
    args.parts = named or args.parts or ("products" if args.device == "cpu" else "products,papers")
    return args


def main() -> None:
    """Run the cells and print the table."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("sampled_epoch", args)
    run_all(recorder, args)
    recorder.print_tables(runs.sampled_epoch)


if __name__ == "__main__":
    main()
