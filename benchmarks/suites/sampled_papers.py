"""Sampled training on the shape of ogbn-papers100M within a budget: features in host memory, placed as a plan says.

A part of ``benchmarks.suites.sampled_epoch``. The graph is made on the GPU in half precision, its features are
copied to pinned host memory in float32 (53 GiB), and torch is then held to the budget. Where host memory or time is
short, a part of the shape is made, and the cell says so.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.harness.division_case import DEVICE_BUFFER, make_case
from benchmarks.harness.division_case import measure as measure_division
from benchmarks.harness.host_graph import PAPERS, fitting_scale, papers_graph
from benchmarks.harness.recorder import Recorder
from benchmarks.harness.timing import synchronize
from weft.batches.placing import place_graph
from weft.batches.sampled import source_for
from weft.core.host_memory import free_host_bytes
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.machine import machine_with
from weft.engine.memory_budget import memory_cap
from weft.engine.plan import plan as make_plan
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun

WARMUP = 10  # steps


def run_all(recorder: Recorder, args: Namespace, tasks_of: Callable[..., list[Task]]) -> None:
    """Two cells: placed as planned within the budget, prepared by the GPU alone, and by host and GPU."""
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
    recorder.cell(by_gpu, lambda: measure(graph, recorder.device, args, tasks_of))
    if recorder.device.type == "cuda":  # a CPU alone has nothing to divide
        prepared = {**key, "case": f"{within}, as planned, divided"}
        recorder.cell(prepared, lambda: divided(graph, recorder.device, args, tasks_of))


def measure(graph: Graph, device: torch.device, args: Namespace, tasks_of: Callable[..., list[Task]]) -> dict[str, Any]:
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
        graph.adj = place_graph(
            graph, plan.places, device
        ).adj  # edges that a plan keeps in host memory leave the device
        run = GroupRun([task], graph, plan, device, make_source=source_for(task, plan))
        made = time.perf_counter() - begin
        source = run.stacks[0].source
        steps = min(args.papers_steps, source.steps_per_epoch - WARMUP - 1)
        clock = _Clock(device, steps)
        run.advance(1, clock.stop)
    step = clock.seconds / steps
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


def divided(graph: Graph, device: torch.device, args: Namespace, tasks_of: Callable[..., list[Task]]) -> dict[str, Any]:
    """The same with batches that host and GPU prepare as a profile says; of a part of the seeds, extrapolated."""
    budget = parse_bytes(args.papers_budget)
    (task,) = tasks_of(graph, 1, args)
    plan = make_plan(task, machine=args.machine, budget=budget).groups[0].plan
    place, buffer = plan.places, DEVICE_BUFFER if plan.division is None else plan.division.device_buffer
    steps = -(-graph.train.numel() // task.batch)
    part = graph._changed(train=graph.train[: args.papers_batches * task.batch])
    about = {"device": str(device), "quick": False, "seeds": task.batch, "profile_seconds": 2.5}
    about |= {"most_workers": max(1, min(14, (os.cpu_count() or 2) - 2))}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with memory_cap(device, machine_with(device), budget):
        case = make_case(place_graph(part, place, device), PAPERS, "sage", Namespace(**about), place, buffer)
        workers = about["most_workers"]
        found = measure_division(case, case.side("weft", workers), repeats=1)
        by_gpu = measure_division(case, case.side("device", workers), repeats=1)
    kept = ("ms_per_batch", "device_share", "error", "busy", "bus_gb_s")
    return {
        "epoch_seconds": round(1e-3 * found["ms_per_batch"] * steps, 3),
        "ms": found["ms_per_batch"],
        "ms_per_task": found["ms_per_batch"],
        "steps": case.batches,
        "steps_per_epoch": steps,
        "extrapolated": True,
        "peak_gb": round(torch.cuda.max_memory_reserved(device) / 1e9, 3),
        "profile_seconds": round(case.profile_seconds, 2),
        "workers": workers,
        "by_gpu_ms": by_gpu["ms_per_batch"],
        **{name: found[name] for name in kept},
    }


class _Clock:
    """``stop()`` after every step: reads the clock after some steps and after ``steps`` more, then ends."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device, self._end, self._done = device, WARMUP + steps, 0
        self._since, self.seconds = 0.0, 0.0

    def stop(self) -> bool:
        """Whether enough has been timed."""
        self._done += 1
        if self._done == WARMUP:
            synchronize(self._device)
            self._since = time.perf_counter()
        elif self._done == self._end:
            synchronize(self._device)
            self.seconds = time.perf_counter() - self._since
        return self._done >= self._end
