"""Measure the best stack sizes of a machine in a short search, and keep them.

``search`` trains copies of one task in groups of growing size for a moment each, and
``weft.planner.grouping.stack_size_table`` decides
which sizes to try and where the peak is. While a group trains, the GPU's utilisation is read from the driver (NVML,
through ``pynvml`` if it is installed); without it the table has times alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from statistics import median
from types import TracebackType

import torch

from weft.core.compatibility import graph_key, stack_key
from weft.core.errors import WeftError
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.engine.base.device import machine_of
from weft.engine.base.machines import load_throughput, update_throughput
from weft.engine.base.memory_errors import give_back_memory
from weft.graph.data.graph import Graph
from weft.planner.cost.rule_of_thumb import rates_of, work
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.grouping.stack_size import MAX_MEMBERS
from weft.planner.grouping.stack_size_table import Throughput, find_group_size
from weft.runtime.device.precision import matmul_precision
from weft.runtime.device.threads import cpu_threads
from weft.runtime.group import GroupRun

WARM_EPOCHS = 2
LEAST_EPOCHS, MOST_EPOCHS = 3, 200
SECONDS = 0.3  # of training at every size
SEARCH_SECONDS = 8.0  # a search, roughly: some ten sizes, each built, recorded and trained for a moment
MIN_TRAINING_TO_SEARCH = 20  # a search must cost at most 5 % of the training it speeds up
LEAST_TASKS = 8
SAMPLE_SECONDS = 0.02

Measure = Callable[[int], float]


def search(task: Task, graph: Graph, device: torch.device, limit: int, seconds: float = SECONDS) -> Throughput:
    """Find where groups of tasks like ``task`` are fastest per task, up to ``limit``, and keep it in the table."""
    busy: dict[int, float] = {}

    def measure(tasks: int) -> float:
        ms, share = measure_group(task, graph, device, tasks, seconds)
        give_back_memory(device)
        if share is not None:
            busy[tasks] = share
        return ms

    _, measured = find_group_size(measure, limit)
    return update_throughput(machine_of(device), lambda table: table.with_measured(task, graph.stats(), measured, busy))


def learn(
    tasks: Sequence[Task],
    graph_of: Callable[[Task], Graph],
    device: torch.device,
    stats_of: Callable[[Task], GraphStats] | None = None,
) -> Throughput:
    """The table of this machine, with a search for kinds of task that it lacks and that will train long enough.

    A search takes some seconds; it is made if the training of such tasks would take :data:`MIN_TRAINING_TO_SEARCH`
    times that.
    ``stats_of`` spares the graphs of those that are not searched.
    """
    table = load_throughput(machine_of(device))
    for alike in _kinds(tasks):
        sample = max(alike, key=lambda task: task.hidden)
        stats = stats_of(sample) if stats_of is not None else graph_of(sample).stats()
        if (
            table.group_size(sample, stats) is None
            and _expected(alike, stats, device) > MIN_TRAINING_TO_SEARCH * SEARCH_SECONDS
        ):
            # A task that cannot be trained will be told where it is trained; a table that cannot be kept is no harm.
            with suppress(WeftError, OSError):
                table = search(sample, graph_of(sample), device, min(len(alike), MAX_MEMBERS))
    return table


def _kinds(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that could be one stack, where they are so many that it matters into how many they are cut."""
    found: dict[Hashable, list[Task]] = {}
    for task in tasks:
        if task.traits is not None:
            key = (graph_key(task), task.feature_norm, task.precision, *stack_key(task).items())
            found.setdefault(key, []).append(task)
    return [alike for alike in found.values() if len(alike) >= LEAST_TASKS]


def _expected(tasks: Sequence[Task], stats: GraphStats, device: torch.device) -> float:
    """Seconds that ``tasks`` would train, roughly."""
    return sum(
        task.epochs * work(task, stats).seconds(rates_of(device.type, None, task.precision)) for task in tasks
    )  # fmt: skip


def measure_group(
    task: Task, graph: Graph, device: torch.device, tasks: int, seconds: float = SECONDS
) -> tuple[float, float | None]:
    """Milliseconds per task and epoch of ``tasks`` copies with seeds of their own (inf: out of memory), how busy."""
    short = task.with_values(epochs=WARM_EPOCHS + MOST_EPOCHS, warmup=0, patience=None)
    copies = [short.with_values(name=f"{task.label}-{place}", seed=task.seed + place) for place in range(tasks)]
    plan = plan_as_one_group(copies, graph.stats(), device.type)
    try:
        with matmul_precision(task.precision), cpu_threads(plan.threads):
            run = GroupRun(copies, graph, plan, device)
            for _ in range(WARM_EPOCHS):
                run.train_epoch()
            with Busy(device) as meter:
                ms = _epoch_ms(run, device, seconds)
            return ms / tasks, meter.share
    except torch.OutOfMemoryError:
        return math.inf, None


def _epoch_ms(run: GroupRun, device: torch.device, seconds: float) -> float:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < MOST_EPOCHS and (len(samples) < LEAST_EPOCHS or time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        run.train_epoch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) * 1e3)
    return median(samples)


class Busy:
    """How busy the GPU is between entering and leaving: ``share`` in [0, 1], None if it is not known."""

    def __init__(self, device: torch.device) -> None:
        self._read = _reader(device)
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def share(self) -> float | None:
        """The median of what was read."""
        return median(self._samples) if self._samples else None

    def _watch(self) -> None:
        while self._read is not None and not self._stop.wait(SAMPLE_SECONDS):
            self._samples.append(self._read())

    def __enter__(self) -> Busy:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def _reader(device: torch.device) -> Callable[[], float] | None:
    """A function that reads the utilisation of ``device``; None without a GPU, NVML or permission."""
    if device.type != "cuda":
        return None
    with suppress(Exception):  # NVML reports what it cannot do by many kinds of errors; none of them matters here
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
        return lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
    return None
