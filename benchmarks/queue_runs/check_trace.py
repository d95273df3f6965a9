"""What the check of the simulator measured, as plain data: every run of a queue with its tasks, in rounds.

A trace has all that the comparison needs, so that it can be made again from a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.queue_runs.interference_fit import SHARES, Fit, Pair, alone, fit, side_by_side
from benchmarks.queue_runs.queue_server import QueueRun
from weft.sched.queue_state import DeviceState, QueuedTask

TOOK = ("seconds", "trained_seconds", "cpu_seconds", "waited_seconds")


@dataclass(frozen=True)
class TraceRun:
    """One run of the queue: its makespan, what others wanted of the processor, and per task when and how long it ran.

    Of each task: ``start``, ``end``, ``seconds`` on its worker, of them ``trained_seconds`` in epochs, ``cpu_seconds``
    of computing and ``waited_seconds`` for a core.
    """

    makespan: float
    background: float
    tasks: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, run: QueueRun) -> TraceRun:
        """A run as it was measured."""
        times = {one.id: {"start": one.start, "end": one.end} for one in run.outcome.tasks}
        about = {name: {key: run.details[name][key] for key in TOOK} for name in times}
        rounded = {name: {k: round(v, 5) for k, v in (times[name] | about[name]).items()} for name in times}
        return cls(round(run.outcome.makespan, 5), round(run.background, 4), rounded)

    def gap(self) -> float:
        """Seconds from the end of a task to the start of the next one, of a run one at a time."""
        return max(self.makespan - sum(one["seconds"] for one in self.tasks.values()), 0.0) / max(len(self.tasks), 1)

    def delay(self) -> float:
        """How many times longer than on a free processor its tasks computed."""
        computed = sum(one["cpu_seconds"] for one in self.tasks.values())
        return 1.0 + sum(one["waited_seconds"] for one in self.tasks.values()) / computed if computed else 1.0

    def alone_on_gpu(self, task: QueuedTask) -> QueuedTask:
        """``task`` as this run, one at a time, says that it is on a GPU, which it keeps busy in its epochs."""
        took = self.tasks[task.id]
        return alone(task, took["seconds"], took["trained_seconds"], self.gap())

    def alone(self, task: QueuedTask, cores: int) -> QueuedTask:
        """``task`` as this run, one at a time, says that it is on a processor that is free."""
        took = self.tasks[task.id]
        whole = max(took["seconds"] - took["waited_seconds"] + self.gap() / self.delay(), 1e-6)
        share = took["cpu_seconds"] / cores / whole
        # Its start computes as its epochs do.
        return replace(task, seconds=whole, utilisation=min(max(share, 0.0), 1.0), fusable=False, start_seconds=0.0)


@dataclass(frozen=True)
class TraceRound:
    """A round: tasks one at a time before and after, pairs side by side, and the queue by policy."""

    before: TraceRun
    after: TraceRun
    pairs: Sequence[TraceRun]
    policies: Mapping[str, TraceRun]


@dataclass(frozen=True)
class Trace:
    """All rounds. ``tasks``: as the server predicts them, starts included; ``told``: per round, as it was told."""

    tasks: Sequence[QueuedTask]
    device: DeviceState
    cores: int
    rounds: Sequence[TraceRound] = ()
    told: Sequence[Sequence[QueuedTask]] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether the processor is the device that tasks share."""
        return self.device.name.startswith("cpu")

    def others(self, run: TraceRun) -> float:
        """The share of the device that others than the queue wanted during ``run``; of a GPU, none."""
        return run.background if self.on_cpu else 0.0

    def alone(self, runs: Sequence[TraceRun]) -> list[QueuedTask]:
        """The tasks with the means of what runs one at a time say of them."""
        found = []
        for task in self.tasks:
            each = [run.alone(task, self.cores) if self.on_cpu else run.alone_on_gpu(task) for run in runs]
            seconds = sum(one.seconds for one in each) / len(each)
            work = sum(one.work for one in each) / len(each)
            start = sum(one.start_seconds for one in each) / len(each)
            found.append(replace(each[0], seconds=seconds, utilisation=work / seconds, start_seconds=start))
        return found

    def known(self, one: TraceRound) -> list[QueuedTask]:
        """The tasks as the runs one at a time before and after a round say."""
        return self.alone([one.before, one.after])

    def pairs_of(self, one: TraceRound) -> list[Pair]:
        """The pairs of a round as the fit takes them."""
        tasks = {task.id: task for task in self.known(one)}
        found = []
        for run in one.pairs:
            first, second = (tasks[name] for name in run.tasks)
            ends = {name: took["end"] for name, took in run.tasks.items()}
            if self.on_cpu:
                found.append(Pair((first, second), ends, self.others(run)))
            else:
                trained = {name: took["trained_seconds"] for name, took in run.tasks.items()}
                found.append(side_by_side((first, second), ends, trained))
        return found

    def fit(self) -> Fit:
        """What explains all pairs best: contention, and of a GPU the share that an epoch keeps busy, too."""
        pairs = [pair for one in self.rounds for pair in self.pairs_of(one)]
        return fit(pairs, shares=(1.0,) if self.on_cpu else SHARES)

    def to_json(self) -> str:
        """The text of its file."""
        told = [[task.to_dict() for task in one] for one in self.told]
        tasks = [task.to_dict() for task in self.tasks]
        rounds = [asdict(one) for one in self.rounds]
        data = {"tasks": tasks, "device": self.device.to_dict(), "cores": self.cores, "rounds": rounds}
        return json.dumps({**data, "told": told, "about": dict(self.about)}, allow_nan=False)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The inverse of :meth:`to_json`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        tasks = [QueuedTask.from_dict(task) for task in data["tasks"]]
        told = [[QueuedTask.from_dict(task) for task in one] for one in data["told"]]
        rounds = [_round(one) for one in data["rounds"]]
        return cls(tasks, DeviceState.from_dict(data["device"]), data["cores"], rounds, told, data["about"])


def _round(data: Mapping[str, Any]) -> TraceRound:
    runs = {name: TraceRun(**run) for name, run in data["policies"].items()}
    pairs = [TraceRun(**run) for run in data["pairs"]]
    return TraceRound(TraceRun(**data["before"]), TraceRun(**data["after"]), pairs, runs)
