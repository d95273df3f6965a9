"""Neighbour sampling and row gathering: the default GPU sampler against the reservoir's and the paper's, and the CPU.

One hop gives a CSR of global ids; three hops [15, 10, 5] include compaction to local ids. GPU cells run as they are
launched and replayed from a CUDA graph; samples are compared with the torch reference before that.

    python -m benchmarks.suites.sampling --out sampling.json
    python -m benchmarks.suites.sampling --works "one hop" --shapes products,reddit \
        --seeds 4000,20000,80000,200000 --cell-seconds 0.02 --out sampling.json

Sides of one hop: ``default`` (O(k)); ``reservoir`` (O(degree), leaner than DGL's) and ``reservoir, DGL's layout``; and
TurboGNN's sampler, with the names that its Figure 6 gives to the optimisations: ``none`` (the paper's baseline in the
same CUDA C++ kernel: slots in global memory, rows as given), ``B`` (rows sorted by degree and scheduled), ``S`` (all
slots in shared memory), ``B+S``, and ``paper``, which is B+A (slots of rows of high degree in shared memory), as
published. ``classes`` is B by a counting sort of classes of degrees, ``classes, S`` with all slots in shared memory.
``picks alone`` only reads the neighbours at picked places that are known before: what no sampler of this graph can be
faster than.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.harness.timing import record_graph, time_until
from weft.batches.sampler import cpu_hops
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.compact_triton import Compactor, sample_hops_triton
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.gather_rows import GatherLaunch, gather_rows_cpu, gather_rows_triton
from weft.ops.sampling.paper_cuda import ALWAYS, NEVER, PaperLaunch, sample_paper
from weft.ops.sampling.reference import HopSample, make_clock, sample_reservoir_torch, sample_torch
from weft.ops.sampling.reservoir_triton import AS_DGL, sample_reservoir_triton
from weft.ops.sampling.sample_triton import sample_triton

SAMPLERS = {
    "default": (sample_triton, sample_torch),
    "reservoir": (sample_reservoir_triton, sample_reservoir_torch),
    "reservoir, DGL's layout": (partial(sample_reservoir_triton, edges=True, launch=AS_DGL), sample_reservoir_torch),
    "paper": (sample_paper, sample_reservoir_torch),
    **{
        f"paper: {name}": (partial(sample_paper, launch=launch), sample_reservoir_torch)
        for name, launch in {
            "none": PaperLaunch("given", NEVER),
            "B": PaperLaunch("sorted", NEVER),
            "S": PaperLaunch("given", ALWAYS),
            "B+S": PaperLaunch("sorted", ALWAYS),
            "classes": PaperLaunch("classes"),
            "classes, S": PaperLaunch("classes", ALWAYS),
        }.items()
    },
}
WORKS = ("one hop", "three hops", "gather", "cpu")
FANOUTS = [15, 10, 5]
SETS = 4  # of seeds, used in turn, so that their neighbours are not always in the cache
CHECKED_SEEDS, CHECKED_DEGREE = 1000, 300  # the reference of the reservoir takes one step per neighbour
ROW_FLOATS = 100  # 400 bytes


def seed_sets(adj: Adjacency, count: int) -> list[Tensor]:
    """Sets of ``count`` different nodes each, int32."""
    count = min(count, adj.num_rows)
    random = torch.Generator(adj.device).manual_seed(0)
    return [
        torch.randperm(adj.num_rows, generator=random, device=adj.device)[:count].to(torch.int32) for _ in range(SETS)
    ]


def timed(calls: list[Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of one call: launched one by one, and replayed from one CUDA graph."""

    def together() -> list[Any]:
        return [call() for call in calls]

    launched = time_until(together, device, warmup=3, repeats=50, seconds=seconds, least=5).scaled(1 / len(calls))
    graph, _ = record_graph(together)
    replayed = time_until(graph.replay, device, warmup=3, repeats=50, seconds=seconds, least=5).scaled(1 / len(calls))
    return {"ms": round(replayed.ms, 4), "launched_ms": round(launched.ms, 4), "timing": replayed.to_dict()}


def check(adj: Adjacency, name: str, fanout: int, clock: Tensor) -> None:
    """Raise if a sampler differs from its reference on nodes of moderate degree."""
    sampler, reference = SAMPLERS[name]
    nodes = (adj.degrees() <= CHECKED_DEGREE).nonzero().squeeze(1)[:CHECKED_SEEDS].to(torch.int32)
    mine = sampler(adj.indptr, adj.indices, nodes, fanout, clock).trimmed()
    theirs = reference(adj.indptr, adj.indices, nodes, fanout, clock)
    if not (torch.equal(mine.indptr, theirs.indptr) and torch.equal(mine.sources, theirs.sources)):
        raise RuntimeError(f"the {name} sampler differs from its reference")


def one_hop(recorder: Recorder, adj: Adjacency, name: str, fanout: int, count: int, args: Namespace) -> dict[str, Any]:
    """Time of one hop and edges per second."""
    recorder.need_gpu()
    clock, sampler = make_clock(0, 0, 0, adj.device), SAMPLERS[name][0]
    if count == int(listed(args.seeds)[0]):
        check(adj, name, fanout, clock)
    seeds = seed_sets(adj, count)

    def call(nodes: Tensor) -> HopSample:
        return sampler(adj.indptr, adj.indices, nodes, fanout, clock)

    edges = sum(int(call(nodes).indptr[-1]) for nodes in seeds) / len(seeds)
    found = timed([partial(call, nodes) for nodes in seeds], adj.device, args.cell_seconds)
    return {**found, "edges": edges, "giga_edges_s": round(edges / found["ms"] / 1e6, 3)}


def picks_alone(recorder: Recorder, adj: Adjacency, fanout: int, count: int, args: Namespace) -> dict[str, Any]:
    """Time to read the neighbours at given places, as many as one hop picks."""
    recorder.need_gpu()
    clock = make_clock(0, 0, 0, adj.device)
    places = [
        sample_triton(adj.indptr, adj.indices, nodes, fanout, clock, edges=True).trimmed().edges
        for nodes in seed_sets(adj, count)
    ]
    narrow = [place.to(torch.int32) for place in places] if adj.num_edges < 2**31 else places
    out = [torch.empty(place.numel(), dtype=torch.int32, device=adj.device) for place in narrow]
    reads = [
        partial(torch.index_select, adj.indices, 0, place, out=into) for place, into in zip(narrow, out, strict=True)
    ]
    return timed(reads, adj.device, args.cell_seconds)


def three_hops(recorder: Recorder, adj: Adjacency, count: int, args: Namespace) -> dict[str, Any]:
    """Time of three hops with compaction, nothing read back."""
    recorder.need_gpu()
    clock, compactor = make_clock(0, 0, 0, adj.device), Compactor(adj.num_rows, adj.device)
    seeds = seed_sets(adj, count)

    def call(nodes: Tensor) -> Any:
        return sample_hops_triton(adj.indptr, adj.indices, nodes, FANOUTS, clock, compactor)

    last = call(seeds[0])[-1]
    found = timed([partial(call, nodes) for nodes in seeds], adj.device, args.cell_seconds)
    return {**found, "input_nodes": int(last.num_nodes), "last_hop_edges": int(last.indptr[-1])}


def gather(recorder: Recorder, num_nodes: int, place: str, args: Namespace) -> dict[str, Any]:
    """GB/s of 400-byte rows from pinned host memory, from device memory, or by the CPU."""
    device = recorder.device
    if place != "cpu":
        recorder.need_gpu()
    pinned = place.startswith("pinned")
    x = torch.empty(num_nodes, ROW_FLOATS, pin_memory=pinned, device=device if place == "device" else "cpu")
    x[:] = torch.arange(num_nodes, device=x.device)[:, None]
    count, where = min(args.rows, num_nodes), torch.device("cpu") if place == "cpu" else device
    ids = torch.randperm(num_nodes, device=where)[:count].to(torch.int32)
    out = torch.empty(count, ROW_FLOATS, device=where)
    run = partial(gather_rows_cpu if place == "cpu" else gather_rows_triton, x, ids, out)
    if place == "pinned, not aligned":
        run = partial(run, launch=GatherLaunch(64, 64))
    timing = time_until(run, where, warmup=2, repeats=20, seconds=args.cell_seconds, least=3)
    if not torch.equal(out[:, -1].long(), ids.long()):
        raise RuntimeError("wrong rows were gathered")
    return {
        "ms": round(timing.ms, 4),
        "gb_s": round(count * ROW_FLOATS * 4 / timing.ms / 1e6, 2),
        "timing": timing.to_dict(),
    }


def cpu_seeds(adj: Adjacency, number: int) -> Tensor:
    """The seeds of a batch that the CPU samples, the same for every side."""
    random = torch.Generator().manual_seed(number)
    return torch.randint(0, adj.num_rows, (1024,), generator=random, dtype=torch.int32).unique()


def cpu_batches(adj: Adjacency, workers: int, expand: str, args: Namespace) -> dict[str, Any]:
    """Batches of 1,024 seeds per second by ``workers`` threads, each making whole batches.

    ``expand="all"`` samples the rows of blocks, "new" a local subgraph as PyG's ``NeighborLoader`` does.
    """
    samplers = [CpuSampler(adj.indptr, adj.indices) for _ in range(workers)]
    seeds = [cpu_seeds(adj, number) for number in range(args.batches)]
    sizes = [[0, 0] for _ in range(workers)]

    def batch(sampler: CpuSampler, number: int) -> tuple[int, int]:
        hops = cpu_hops(sampler, seeds[number], FANOUTS, make_clock(0, 0, number), expand)
        return sum(hop.indices.numel() for hop in hops), hops[-1].nodes.numel()

    def work(place: int) -> None:
        for number in range(place, args.batches, workers):
            edges, nodes = batch(samplers[place], number)
            sizes[place][0] += edges
            sizes[place][1] += nodes

    for sampler in samplers:
        batch(sampler, 0)  # compiles, and fills the pools of arrays
    threads = [Thread(target=work, args=(place,)) for place in range(workers)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - start
    edges, nodes = (sum(parts) for parts in zip(*sizes, strict=True))
    return {"ms": round(seconds / args.batches * 1e3, 3), "mega_edges_s": round(edges / seconds / 1e6, 2),
            "input_nodes": nodes // args.batches}  # fmt: skip


def run(recorder: Recorder, shape: str, works: list[str], args: Namespace) -> None:
    """All cells of one shape."""
    adj = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale).adj)
    if adj is None:
        return
    recorder.say(f"{shape}: {adj.num_rows:,} nodes, {adj.num_edges:,} edges, degree up to {int(adj.degrees().max()):,}")
    sizes = itertools.product(listed(args.seeds), listed(args.fanouts))
    for count, fanout in ((int(seeds), int(picks)) for seeds, picks in sizes if "one hop" in works):
        about = {"work": "one hop", "shape": shape, "seeds": count, "fanout": fanout}
        for name in SAMPLERS:
            work = partial(one_hop, recorder, adj, name, fanout, count, args)
            recorder.cell({**about, "side": name}, work, free=False)
        work = partial(picks_alone, recorder, adj, fanout, count, args)
        recorder.cell({**about, "side": "picks alone"}, work, free=False)
    for count in (1024, 8192) if "three hops" in works else ():
        key = {"work": "three hops", "seeds": count, "fanout": "15,10,5", "side": "default"}
        recorder.cell(key, partial(three_hops, recorder, adj, count, args))
    for place in ("pinned", "pinned, not aligned", "device", "cpu") if "gather" in works else ():
        key = {"work": "gather", "rows": args.rows, "side": place}
        recorder.cell(key, partial(gather, recorder, adj.num_rows, place, args))
    if "cpu" not in works:
        return
    host = Adjacency(adj.indptr.cpu(), adj.indices.cpu(), adj.num_cols)
    for work, expand in (("three hops", "all"), ("local subgraph", "new")):
        for workers in dict.fromkeys((1, torch.get_num_threads())):
            key = {"work": work, "seeds": 1024, "fanout": "15,10,5", "side": f"cpu x {workers}"}
            recorder.cell(key, partial(cpu_batches, host, workers, expand, args))


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="products", help="of one hop; other work is done on the first alone")
    parser.add_argument("--fanouts", default="10,15,30")
    parser.add_argument("--works", default=",".join(WORKS), help="which of " + ", ".join(WORKS))
    parser.add_argument("--seeds", default="200000", help="of one hop")
    parser.add_argument("--rows", type=int, default=734_000, help="to gather")
    parser.add_argument("--batches", type=int, default=32, help="of 1,024 seeds, sampled by the CPU")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph, to try this out")
    parser.add_argument("--cell-seconds", type=float, default=0.5, help="timed seconds of one variant")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    from benchmarks.report import training

    args = arguments()
    recorder = Recorder("sampling", args)
    for number, shape in enumerate(listed(args.shapes)):
        run(recorder, shape, listed(args.works) if number == 0 else ["one hop"], args)
    recorder.print_tables(training.samplers, training.sampling)


if __name__ == "__main__":
    main()
