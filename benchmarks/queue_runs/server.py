"""Run a queue through Weft's own supervisor and worker processes under any policy, and measure every task.

All tasks are submitted at once and planned before the clock starts, so that a policy that orders them sees all of them;
or (:meth:`QueueServer.run_arriving`) each at its second, and planning is counted.
Workers stay: a policy is exchanged between two runs, kernels are compiled and graphs in host memory before the first.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType, TracebackType
from typing import Any

from benchmarks.queue_runs.team import Arrival
from weft.core.gpus import nvml
from weft.sched.admission import Policy, Tasks
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.simulator import SimulatedGroup, Simulation, TaskRun
from weft.serve.options import ServeOptions
from weft.serve.queue_db import ENDED, STATES, QueueDB, QueueError, QueueTask, Submission
from weft.serve.state import queued_task
from weft.serve.supervisor import Supervisor
from weft.serve.worker_pool import PLANNER


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NVML:
    """One GPU by its index, as ``nvidia-smi`` shows it; an OSError if the driver does not answer."""

    def __init__(self, index: int, library: Any = None) -> None:
        self._library = nvml() if library is None else library
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} answered {code}")

    def busy(self) -> float:
        """The share of the driver's last sampling period in which a kernel ran."""
        found = _Utilisation()
        self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(found))
        return found.gpu / 100

    def used_bytes(self) -> int:
        """Bytes that all processes have taken."""
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(found))
        return int(found.used)


SECONDS = 0.05


class DeviceSampler:
    """Samples while entered; without NVML it finds nothing, and its figures are None."""

    def __init__(self, index: int | None) -> None:
        self._gpu: NVML | None = None
        with suppress(OSError, AttributeError):  # where the driver does not answer
            gpu = None if index is None else NVML(index)
            if gpu is not None:
                gpu.busy(), gpu.used_bytes()
            self._gpu = gpu
        self.bytes_before = self._memory()  # that were taken on the device when this was made
        self.samples: list[tuple[float, float, int]] = []  # time, share busy, bytes above those at the start
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceSampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _memory(self) -> int:
        return 0 if self._gpu is None else self._gpu.used_bytes()

    def _sample(self) -> None:
        while self._gpu is not None and not self._end.wait(SECONDS):
            with suppress(OSError):  # one sample less
                self.samples.append((time.time(), self._gpu.busy(), self._memory()))

    def figures(self, begin: float, end: float, idle_bytes: int = 0) -> dict[str, float | None]:
        """Mean utilisation between two times, and the most bytes taken beyond ``idle_bytes``."""
        inside = [sample for sample in self.samples if begin <= sample[0] <= end]
        if not inside:
            return {"utilisation": None, "device_peak_bytes": None}
        peak = max(sample[2] for sample in inside) - idle_bytes
        return {"utilisation": fmean(sample[1] for sample in inside), "device_peak_bytes": peak}


Settings = Mapping[str, Any]
READY_SECONDS, PLAN_SECONDS = 240.0, 240.0
CONTEXT_BYTES = 800 << 20
WARM_GRACE = 10.0  # seconds for what has begun to end, and for a lost worker to be replaced


class Hold:
    """Starts nothing: tasks are planned, and wait."""

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Everything waits."""
        return QueueDecision(rest="held until all tasks are planned")


@dataclass(frozen=True)
class QueueRun:
    """One run of a queue: every task and group with its times, and what each task was measured to take.

    ``begin`` and ``end`` are times of the clock; those of ``outcome`` count from ``begin``.
    """

    outcome: Simulation
    begin: float
    end: float
    failed: Mapping[str, str]
    out_of_memory: int
    tasks: Sequence[QueuedTask]
    details: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tried_again: Mapping[str, str] = field(default_factory=dict)  # tasks whose attempt failed or was lost, and why


class QueueServer:
    """A supervisor over a queue file in ``folder``, with ``workers`` workers on ``device``.

    ``home``: the folder of what servers learn, which a later one finds again; one of its own otherwise.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        workers: int,
        budget: int,
        reserved: int,
        home: Path | None = None,
        **more: Any,
    ) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {"PYTHONPATH": paths, "WEFT_HOME": str(home or folder / "home")}
        keep = max(reserved // workers - CONTEXT_BYTES, 0)  # a worker that waits holds CUDA's context as well
        self.options = ServeOptions(
            folder / "queue.db", devices=(device,), workers=workers, budget=budget + reserved, keep_graphs=keep,
            reserved=reserved,
            environment=environment, quota=100_000, checkpoint_seconds=600.0, **more,
        )  # fmt: skip
        self.device, self._folder = device, folder
        self._warmed = 0  # runs that only warmed up: a folder that has one would be taken for the run itself
        self.supervisor = Supervisor(self.options)
        self.db = QueueDB(self.options.db)
        self._decide_by(Hold())

    def __enter__(self) -> QueueServer:
        self.supervisor.start()
        wanted = self.options.workers + 1
        self._until(lambda: len(self._ready()) == wanted, READY_SECONDS, "for workers to start")
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop(10.0)
        self.db.close()

    def _decide_by(self, policy: Policy) -> None:
        self.supervisor._scheduler.policy = policy
        self.supervisor.wake()

    def _ready(self) -> list[str]:
        return [name for name, worker in list(self.supervisor.pool.workers.items()) if worker.ready]

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if not self.supervisor.is_alive():
                raise RuntimeError(f"the supervisor ended: {self.supervisor.error}; {self._log()}")
            if time.monotonic() > end:
                raise TimeoutError(f"{seconds:.0f} s were not enough {what}; {self._log()}")
            time.sleep(0.005)

    def _log(self) -> str:
        log = self.options.runs / "workers.log"
        return log.read_text(encoding="utf-8", errors="replace")[-600:] if log.exists() else "no log"

    # ---- warming up ----------------------------------------------------------------------------------

    def warm_up(self, tasks: Sequence[Settings], seconds: float) -> int:
        """Let every worker train every one of ``tasks``, each beginning with another one; how many were begun.

        A kernel that one worker has compiled is on the disk for the others. A worker that is lost is left out. Nothing
        is begun after ``seconds``; a worker that goes on for long after that is ended, and another takes its place.
        """
        workers = [worker for name, worker in self.supervisor.pool.workers.items() if name != PLANNER]
        left = {w.name: [tasks[(place + i * len(tasks) // len(workers)) % len(tasks)] for place in range(len(tasks))]
                for i, w in enumerate(workers)}  # fmt: skip
        end, before = time.monotonic() + seconds, self._warmed
        there = lambda: [one for one in workers if self.supervisor.pool.workers.get(one.name) is one]  # noqa: E731
        while time.monotonic() < end and any(left[one.name] or one.group for one in there()):
            for worker in there():
                if worker.idle and left[worker.name]:
                    self._warmed += 1
                    worker.group = f"warm-{self._warmed}"
                    settings = {**left[worker.name].pop(0), "name": worker.group}
                    folder = self._folder / "warm" / worker.group
                    worker.send(
                        "run",
                        group=worker.group,
                        tasks=[settings],
                        out=str(folder),
                        options={"checkpoint_every": 600.0},
                    )
            time.sleep(0.005)
        try:
            self._until(lambda: not any(one.group for one in there()), WARM_GRACE, "to finish warming up")
        except TimeoutError:
            for worker in there():
                if worker.group:
                    worker.kill("hung while it warmed up")
        again = lambda: not any(one.end_reason for one in there()) and len(self._ready()) > self.options.workers  # noqa: E731
        with suppress(TimeoutError):  # those that took the place of others
            self._until(again, WARM_GRACE, "for workers to start again")
        return self._warmed - before

    # ---- one queue under one policy --------------------------------------------------------------------

    def plan(self, tasks: Sequence[Settings]) -> None:
        """Have ``tasks`` planned, so that later ones of their kinds need no planning, and cancel them."""
        self._cancel(self._submitted({str(number): settings for number, settings in enumerate(tasks)}))

    def _submitted(self, tasks: Mapping[str, Settings]) -> dict[str, str]:
        """Submit ``tasks`` (settings by label) together; their labels by id, once all are planned."""
        (made,) = self.db.submit_apart([[Submission(_spec(settings)) for settings in tasks.values()]])
        labels = {task.id: label for task, label in zip(made, tasks, strict=True)}
        self.supervisor.wake()
        self._until(lambda: self._states(labels) <= {"planned", *ENDED}, PLAN_SECONDS, "to plan")
        return labels

    def run(
        self,
        name: str,
        tasks: Mapping[str, Settings],
        seconds: float = 300.0,
    ) -> QueueRun:
        """Submit ``tasks`` (settings by name) together, and run them by the policy called ``name``."""
        errors = self.supervisor.state.counters["memory_errors"]
        labels = self._submitted(tasks)
        planned = [queued_task(self.db.get(task)) for task in labels]
        begin = time.time()
        self._decide_by(find_policy(name))
        try:
            self._until(lambda: self._states(labels) <= set(ENDED), seconds, f"for {name}")
        except TimeoutError:
            ended = sum(self.db.get(task).state in ENDED for task in labels)
            self._cancel(labels)
            words = f"{seconds:.0f} s were not enough for {name}: {ended} of {len(tasks)} tasks ended"
            raise TimeoutError(words) from None
        finally:
            self._decide_by(Hold())
        self._until(lambda: not self.db.groups("running"), 10.0, "for the last group to end")
        return self._measured(name, labels, begin, self.supervisor.state.counters["memory_errors"] - errors, planned)

    def run_arriving(self, name: str, arrivals: Sequence[Arrival], seconds: float, fuse: bool = True) -> QueueRun:
        """Submit each of ``arrivals`` at its second, in order, and run them by the policy called ``name``."""
        left = deque(sorted(arrivals, key=lambda one: one.at))
        ids: dict[str, str] = {}  # of tasks, by label
        labels: dict[str, str] = {}
        errors, begin = self.supervisor.state.counters["memory_errors"], time.time()
        self._decide_by(find_policy(name, fuse))
        try:
            while left:
                now, due = time.time() - begin, []
                while left and left[0].at <= now:
                    due.append(left.popleft())
                for job in dict.fromkeys(one.job for one in due):  # a sweep is submitted as one
                    these = [one for one in due if one.job == job]
                    (made,) = self.db.submit_apart([[_arriving(one, ids) for one in these]])
                    if isinstance(made, QueueError):
                        raise made
                    ids |= {one.label: task.id for one, task in zip(these, made, strict=True)}
                    labels |= {ids[one.label]: one.label for one in these}
                if due:
                    self.supervisor.wake()
                time.sleep(min(max(left[0].at - (time.time() - begin), 0.0), 0.05) if left else 0.0)
            left_seconds = seconds - (time.time() - begin)
            self._until(lambda: self._states(labels) <= set(ENDED), left_seconds, f"for {name}")
        except TimeoutError:
            ended = sum(self.db.get(task).state in ENDED for task in labels)
            self._cancel(labels)
            words = f"{seconds:.0f} s were not enough for {name}: {ended} of {len(arrivals)} tasks ended"
            raise TimeoutError(words) from None
        finally:
            self._decide_by(Hold())
        self._until(lambda: not self.db.groups("running"), 10.0, "for the last group to end")
        errors = self.supervisor.state.counters["memory_errors"] - errors
        return self._measured(name, labels, begin, errors, (), {one.label: one.at for one in arrivals})

    def _cancel(self, tasks: Mapping[str, str]) -> None:
        """Have what still waits or runs end, so that the next queue has the workers to itself."""
        self._decide_by(Hold())
        for task in tasks:
            with suppress(QueueError):  # has ended meanwhile
                self.db.cancel(task)
        self.supervisor.wake()
        self._until(lambda: not self.db.groups("running"), 60.0, "for cancelled tasks to end")

    def predicted(self, run: QueueRun) -> list[dict[str, Any]]:
        """The tasks of a run as the policy sees them now that the server has learned what a start takes."""
        setup = self.supervisor.state.setup_of(self.device)
        found = []
        for task in run.tasks:
            whole = task.seconds + setup
            share = task.work / whole if whole > 0 else 1.0
            found.append(replace(task, seconds=whole, utilisation=share, fusable=False, start_seconds=setup).to_dict())
        return found

    def _states(self, tasks: Mapping[str, str]) -> set[str]:
        marks = ", ".join("?" for _ in tasks)
        query = f"SELECT DISTINCT state FROM tasks WHERE id IN ({marks})"
        return {row["state"] for row in self.db.connection.execute(query, tuple(tasks))}

    def _measured(
        self,
        name: str,
        labels: Mapping[str, str],
        begin: float,
        out_of_memory: int,
        planned: Sequence[QueuedTask],
        arrived: Mapping[str, float] = MappingProxyType({}),
    ) -> QueueRun:
        found = [self.db.get(task) for task in labels]
        done = [task for task in found if task.state == "done"]
        groups = [group for group in self.db.groups(limit=10_000) if set(group.members) & set(labels)]
        of_task = {member: group for group in reversed(groups) for member in group.members}
        events = {task.id: self.db.last_events(task.id, ("running",), 10_000) for task in done}
        starts = {task: claims[0].time for task, claims in events.items()}
        runs = tuple(
            TaskRun(
                labels[t.id], of_task[t.id].id, arrived.get(labels[t.id], 0.0), starts[t.id] - begin, t.updated - begin
            )
            for t in done
        )
        rows = tuple(
            SimulatedGroup(
                group.id, group.device, int(group.worker.rpartition("/")[2]),
                tuple(labels[member] for member in group.members), group.bytes,
                group.started - begin, (group.ended or group.started) - begin, group.why,
            )
            for group in groups
        )  # fmt: skip
        device = self.device_state()
        busy = sum(_trained(task)["trained_seconds"] for task in done)
        outcome = Simulation(
            name, runs, rows, budget_bytes=device.task_bytes, busy_seconds=busy, peak_bytes=peak_bytes(rows),
            decisions=len(groups),
        )  # fmt: skip
        failed = {labels[task.id]: task.error or task.state for task in found if task.state != "done"}
        end = max([begin, *(task.updated for task in done)])
        details = {labels[task.id]: _details(task, starts[task.id]) for task in done}
        named = [QueuedTask.from_dict({**task.to_dict(), "id": labels[task.id], "arrival": 0.0}) for task in planned]
        again = {labels[task.id]: self._errors(task.id) for task in found if task.attempts > 1}
        return QueueRun(outcome, begin, end, failed, out_of_memory, named, details, tried_again=again)

    def _errors(self, task: str) -> str:
        """What was said when an attempt failed or was lost, and the end of the workers' log."""
        events = self.db.last_events(task, STATES, 10_000)
        return "; ".join([*(str(one.data["error"]) for one in events if one.data.get("error")), self._log()])

    def device_state(self) -> DeviceState:
        """The device as the policies see it."""
        return self.supervisor._scheduler._machine().devices[0]


def _spec(settings: Settings) -> dict[str, Any]:
    path = settings["graph"] if os.path.isabs(str(settings["graph"])) else None
    return {"task": dict(settings), **({"graph_path": path} if path else {})}


def _arriving(one: Arrival, ids: Mapping[str, str]) -> Submission:
    """The submission of a task; ``ids`` are those of tasks before it, by label."""
    spec = _spec(one.settings)
    if not one.of:
        return Submission(spec, user=one.user)
    trained = ids[one.of]
    spec |= {"kind": "inference", "infer": {**one.infer, "of": trained}}
    return Submission(spec, user=one.user, after=(trained,))


def _trained(task: QueueTask) -> dict[str, float]:
    """Seconds of an epoch after the first, and of as many as it trained."""
    metrics = (task.result or {}).get("metrics", {})
    epoch = float(metrics.get("seconds_per_epoch") or 0.0)
    return {"trained_seconds": float(metrics.get("epochs_run") or 0) * epoch, "epoch_seconds": epoch}


def _details(task: QueueTask, start: float) -> dict[str, float]:
    result = task.result or {}
    about = {"seconds": task.updated - start} | _trained(task)
    return {**about, "peak_bytes": float(result.get("peak_bytes") or 0), "attempts": float(task.attempts)}


def peak_bytes(groups: Sequence[SimulatedGroup]) -> int:
    """The most bytes that were set aside at once."""
    changes = [(group.start, group.bytes) for group in groups] + [(group.end, -group.bytes) for group in groups]
    held = most = 0
    for _, change in sorted(changes, key=lambda one: (one[0], one[1])):
        held += change
        most = max(most, held)
    return most
