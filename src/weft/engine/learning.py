"""Learn from runs: keep measured times beside predicted ones, per machine."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch

from weft.core.compatibility import graph_key, stack_key
from weft.core.errors import InputError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.errors import give_back_memory
from weft.engine.estimator import Estimator
from weft.engine.machine import load_calibration, load_throughput, machine_of, update_calibration, update_throughput
from weft.graph.graph import Graph
from weft.planner.cost.calibration import Calibration, Observation
from weft.planner.cost.rule import rates_of, work
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.grouping.limits import MAX_MEMBERS, Throughput, find_group_size
from weft.runtime.device.process import cpu_threads, matmul_precision
from weft.runtime.group import GroupRun

RESULT = "result.json"
ENOUGH_EPOCHS = 3  # fewer are set-up and little else
_ASIDE: ContextVar[list[Observation] | None] = ContextVar("observations that are set aside", default=None)


@dataclass(frozen=True)
class Lesson:
    """What some runs taught: the calibration, their observations, typical errors before and after, what was skipped."""

    calibration: Calibration
    observations: tuple[Observation, ...]
    before: float
    after: float
    skipped: tuple[str, ...] = ()


def learn(folders: Iterable[Path], machine: Machine) -> Lesson:
    """Fit ``machine``'s calibration to every ``result.json`` under ``folders``, with what was known, and keep it."""
    estimator = Estimator(machine)
    new: list[Observation] = []
    skipped: list[str] = []
    for label, results in _groups(folders, skipped).items():
        try:
            new.append(observation_of(results, estimator, label))
        except (ValueError, KeyError, TypeError, InputError) as error:
            skipped.append(f"{label}: {error}")
    labels = {one.label for one in new}

    def added(known: Calibration) -> Calibration:
        others = [one for one in known.observations if one.label not in labels]  # a run learned twice counts once
        return replace(known, observations=()).with_observations([*others, *new])

    calibration = update_calibration(machine, added) if new else added(load_calibration(machine) or Calibration())
    before, after = typical_error(new, {}), typical_error(new, calibration.factors)
    return Lesson(calibration, tuple(new), before, after, tuple(skipped))


def observe(machine: Machine, cost: Mapping[str, Any], seconds_per_epoch: float, label: str) -> None:
    """Add one run to what is known of ``machine``: its predicted ``Cost`` as plain data, and what it took."""
    one = Observation(dict(cost.get("uncorrected", {})), seconds_per_epoch, label)
    aside = _ASIDE.get()
    if aside is not None:
        aside.append(one)
    elif one.usable:
        keep(machine, [one])


@contextmanager
def observations_aside() -> Iterator[list[Observation]]:
    """Runs inside teach nothing yet: what they took is collected, for whoever knows if they had the device alone."""
    found: list[Observation] = []
    token = _ASIDE.set(found)
    try:
        yield found
    finally:
        _ASIDE.reset(token)


def keep(machine: Machine, new: Sequence[Observation]) -> Calibration:
    """Add runs to what is known of ``machine``.

    A run of the same label that is known already is replaced; one without a label is not.
    """
    labels = {one.label for one in new if one.label}

    def added(known: Calibration) -> Calibration:
        others = [other for other in known.observations if other.label not in labels]
        return replace(known, observations=()).with_observations([*others, *new])

    return update_calibration(machine, added)


def observation_of(results: Sequence[Mapping[str, Any]], estimator: Estimator, label: str) -> Observation:
    """The run of a group, one ``result.json`` per member; raises if nothing can be learned from it."""
    plan = Plan.from_dict(results[0]["plan"])
    if plan.device != estimator.machine.device:
        raise ValueError(f"ran on {plan.device}, not on {estimator.machine.device}")
    by_name = {task.label: task for task in map(_task_of, results)}
    tasks = [by_name[name] for name in plan.members if name in by_name]
    epochs = {result["metrics"]["epochs_run"] for result in results}
    if len(tasks) < len(plan.members) or len(epochs) > 1:
        raise ValueError("its members did not all train to the same epoch, so the group changed on the way")
    if min(epochs) < ENOUGH_EPOCHS:
        raise ValueError(f"only {min(epochs)} epochs were run")
    cost = estimator.together(tasks, plan).cost
    # Members are charged equal shares of what the group took.
    seconds = sum(float(result["metrics"]["seconds_per_epoch"]) for result in results)
    return Observation(dict(cost.uncorrected), seconds, label)


def _task_of(result: Mapping[str, Any]) -> Task:
    """The task of a result, by the name that its plan has for it: of one from a server, its id."""
    settings = dict(result["task"])
    return Task.from_dict({**settings, "name": result["id"]} if "id" in result else settings)


def typical_error(observations: Sequence[Observation], factors: Mapping[str, float]) -> float:
    """Median of how far predictions are off, as a share of what was measured."""
    errors = []
    for one in observations:
        predicted = sum(factors.get(name, 1.0) * value for name, value in one.families.items())
        errors.append(abs(math.expm1(math.log(predicted / one.measured))))
    return statistics.median(errors) if errors else 0.0


def _groups(folders: Iterable[Path], skipped: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Every result in or under the folders, members of a group together, by what the run is known by."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in _files(folders):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if "task" not in result and "statuses" in result:
                continue  # a sweep as a whole: its members have files of their own
            members = result["plan"]["members"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(f"{path}: not the result of a run ({type(error).__name__}: {error})")
            continue
        groups.setdefault(label_of(_run_folder(path), members), []).append(result)
    return groups


def label_of(folder: Path, members: Sequence[str]) -> str:
    """What the run of a group is known by: the folder of the run, and who was in it."""
    others = f" and {len(members) - 1} others" if len(members) > 1 else ""
    return f"{folder.absolute()}: {members[0]}{others}"


def _run_folder(result: Path) -> Path:
    """The folder of the run that wrote a result: members of a sweep have folders of their own inside it."""
    return result.parent.parent.parent if result.parent.parent.name == "tasks" else result.parent


def _files(folders: Iterable[Path]) -> list[Path]:
    """Every result file, once, by its absolute path."""
    places = [folder.absolute() for folder in folders]
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob(RESULT)))]
    return list(dict.fromkeys(found))


# ---- Measure the best stack sizes of a machine in a short search, and keep them.
#
# ``search`` trains copies of one task in groups of growing size for a moment each, and
# ``weft.planner.grouping.limits`` decides
# which sizes to try and where the peak is. While a group trains, the GPU's utilisation is read from the driver (NVML,
# through ``pynvml`` if it is installed); without it the table has times alone.

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


def learn_stack_sizes(
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
