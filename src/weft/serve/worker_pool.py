"""The worker processes: started, replaced when they end, ended when they are silent."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.errors import WeftError
from weft.core.gpus import renumbered, without_gpus
from weft.core.host_memory import cpu_count
from weft.core.units import show_bytes
from weft.serve.state import SupervisorState
from weft.serve.worker_process import Inbox, Spawner, WorkerOptions, WorkerProcess

# ---- NVIDIA's multi-process service: started for the workers of a server where it is available, and stopped after
# them.
#
# With it kernels of several worker processes share a GPU; without it they take turns. Clients of one service share a
# context on the device: a kernel that faults ends all of them, and they are replaced like any lost worker. The service
# numbers the GPUs that it was shown from 0, and so must its clients.

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0


class MPS:
    """The service for ``devices`` with several workers; does nothing where it is not installed or of no use.

    Its pipes are in a folder of their own under the system's temporary folder: a socket's path has at most 107
    characters, which the folder of a queue may exceed.
    """

    def __init__(self, devices: Sequence[str], workers: int, wanted: bool = True) -> None:
        self._wanted = wanted and workers > 1 and any(name.startswith("cuda") for name in devices)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started here."""
        return self._folder is not None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that make a worker use it."""
        return {**renumbered(), **self._pipes} if self.running else {}

    @property
    def _pipes(self) -> Mapping[str, str]:
        if self._folder is None:
            return {}
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder.name, "CUDA_MPS_LOG_DIRECTORY": self._folder.name}

    def start(self) -> bool:
        """Start it if it is of use here; whether it runs."""
        if not self._wanted or shutil.which(CONTROL) is None or os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
            return False  # the last: an operator's own service, which workers use as they are
        self._folder = tempfile.TemporaryDirectory(prefix="weft-mps-", ignore_cleanup_errors=True)
        if not self._control("-d"):
            self._folder.cleanup()
            self._folder = None
        return self.running

    def stop(self) -> None:
        """Stop it if it was started here."""
        if self._folder is not None:
            self._control(text=b"quit\n")
            self._folder.cleanup()
            self._folder = None

    def _control(self, *arguments: str, text: bytes = b"") -> bool:
        """Run the control program; True if it succeeded.

        Its output is not captured through pipes: the service would hold them open for as long as it runs.
        """
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                input=text,
                env={**os.environ, **self._pipes},
                timeout=SECONDS,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


MOST_STARTS_FAILED = 5  # workers in a row that ended before they were ready
START_AGAIN_SECONDS = 5.0  # after a start that failed, for want of memory or files, say
CANCELLED_SECONDS = 10.0  # until a worker that does not let a cancelled group go is ended
PLANNER = "planner"
LIMIT_MISSED = 1.25  # of what a CPU worker may hold: where the limit on its process did not hold, it is ended


class NoWorkersError(WeftError):
    """Workers end before they are ready: the server cannot work here."""


def threads_each(cores: int, workers: int) -> int:
    """The threads of each of ``workers`` on a host: three starts with all 16 cores each took 1.8 s, not 0.3."""
    return max(1, cores // max(workers, 1))


class WorkerPool:
    """A planner, and ``options.workers`` workers per device; their messages go to ``inbox``."""

    def __init__(self, state: SupervisorState) -> None:
        self._state, options = state, state.options
        self.inbox: Inbox = queue.Queue()
        self.workers: dict[str, WorkerProcess] = {}
        self.room: dict[str, int] = {}  # bytes by device
        self.beside: dict[str, int] = {}  # bytes that a worker of a device holds between groups in addition to graphs
        self._failed_starts: dict[str, int] = {}
        self._missing: dict[str, str] = {}  # workers to start, with their devices
        self._not_before: dict[str, float] = {}  # when to try those again that could not be started
        self._mps: MPS | None = None
        here = sum("@" not in name for name in options.device_names()) * options.workers
        self._cores = cpu_count()
        self._threads = threads_each(self._cores, here)
        self._spawner = Spawner(options.runs / "workers.log", options.environment, self._threads)

    def start_all(self) -> str:
        """Start the planner and the workers of every device; what was in the way of those that are started later."""
        options = self._state.options
        devices = options.device_names()
        self._mps = MPS([name for name in devices if "@" not in name], options.workers, options.mps)
        self._mps.start()
        self._missing[PLANNER] = devices[0]
        self._missing |= {f"{device}/{index}": device for device in devices for index in range(options.workers)}
        return self.start_missing(time.monotonic())

    def stop_all(self) -> None:
        """End every process."""
        for worker in self.workers.values():
            worker.send("stop")
        for worker in self.workers.values():
            worker.stop(5.0)
        self._spawner.stop()
        if self._mps is not None:
            self._mps.stop()

    def _start(self, name: str, device: str) -> None:
        planner = name == PLANNER
        environment = dict(without_gpus()) if planner else dict(self._mps.environment if self._mps else {})
        options = self._state.options
        there = "cpu" if planner else device
        if "@" in there:
            environment = {**options.environment, **environment}
        start = WorkerOptions(environment, 0 if planner else options.keep_graphs, options.pool and not planner)
        if "@" in there:
            from weft.serve.ray_worker import RayWorker  # imports torch, which the server does without

            self.workers[name] = RayWorker(name, there, self.inbox, start)
        else:
            self.workers[name] = WorkerProcess(name, there, self.inbox, self._spawner, start)

    def share_of(self, device: str) -> float:
        """The part of ``device`` that one worker can use: of this host's processor, its threads over the cores."""
        if device.partition(":")[0] != "cpu":
            return 1.0
        setting = {**os.environ, **self._state.options.environment}.get("OMP_NUM_THREADS", "")
        threads = int(setting) if setting.isdigit() else self._threads
        return min(max(threads, 1) / self._cores, 1.0)

    def any_idle(self) -> bool:
        """Whether some worker can take a group."""
        return any(worker.idle for name, worker in self.workers.items() if name != PLANNER)

    @property
    def shares_faults(self) -> bool:
        """Whether a kernel of one worker that fails breaks the device for the others."""
        return self._mps is not None and self._mps.running

    def task_bytes(self, device: str) -> int:
        """Bytes of a device that groups may have."""
        room = self.room[device]
        return room - self._state.options.reserved_of(room, self.beside[device])

    def idle_workers(self, device: str) -> list[WorkerProcess]:
        """The workers of ``device`` that can take a group."""
        names = sorted(name for name, w in self.workers.items() if w.device == device and name != PLANNER)
        return [self.workers[name] for name in names if self.workers[name].idle]

    def idle_worker(self, device: str) -> WorkerProcess | None:
        """A worker of ``device`` that can take a group, if there is one."""
        return next(iter(self.idle_workers(device)), None)

    def ready(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A worker has loaded everything."""
        if worker.ready:
            return
        worker.ready, self._state.dirty = True, True
        self._failed_starts[worker.name] = 0
        if worker.name != PLANNER:
            there, self.beside[worker.device] = int(message["room"]), int(message["beside"])
            self.room.setdefault(worker.device, min(self._state.options.budget or there, there))

    def alive(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A worker's heartbeat; on a CPU, one that holds far more than its group may is ended."""
        worker.bytes = int(message.get("bytes", 0))
        active = self._state.active.get(worker.group)
        if active is None or worker.device.startswith("cuda"):  # a GPU has a cap of its own
            return
        most = active.group.bytes + self._state.options.overrun_bytes
        if worker.bytes > most * LIMIT_MISSED:
            held = f"held {show_bytes(worker.bytes)}, more than its {show_bytes(active.group.bytes)} and the margin"
            worker.kill(f"out of memory: {held}")

    def end_silent(self, now: float) -> None:
        """End workers that sent no heartbeat, made no progress, or kept a cancelled group, for too long."""
        for worker in self.workers.values():
            if now - worker.last_heard > self._state.options.silent_seconds and not worker.end_reason:
                worker.kill(f"sent no heartbeat for {self._state.options.silent_seconds:.0f} s")
        for active in self._state.active.values():
            if now - active.heard > self._state.options.hang_seconds and not active.worker.end_reason:
                active.worker.kill(f"made no progress for {self._state.options.hang_seconds:.0f} s")
            elif now - active.unwanted_since > CANCELLED_SECONDS and not active.worker.end_reason:
                active.worker.kill("did not end a group that was cancelled")

    def replace(self, worker: WorkerProcess) -> None:
        """Start another worker in place of one that has ended."""
        failed = 0 if worker.ready else self._failed_starts.get(worker.name, 0) + 1
        self._failed_starts[worker.name] = failed
        worker.ready = False  # it stays here until another is started, and takes nothing
        worker.stop(0.1)
        if failed and not self.room and self._mps is not None and self._mps.running:
            print("weft: workers do not start under NVIDIA's MPS; going on without it", file=sys.stderr, flush=True)
            self._mps.stop()
        if worker.lost:
            # A machine is gone, and its device with it; what it trained is queued again, for the others.
            del self.workers[worker.name]
            if not any(w.device == worker.device for name, w in self.workers.items() if name != PLANNER):
                self.room.pop(worker.device, None)
            if all(name == PLANNER for name in self.workers):
                raise NoWorkersError("every node of the cluster was lost; the queue is kept, start the server again")
            return
        if failed >= MOST_STARTS_FAILED:
            log = f"{self._state.options.runs}/workers.log"
            raise NoWorkersError(f"worker {worker.name!r} ended {failed} times before it was ready; see {log}")
        self._missing[worker.name] = worker.device

    def start_missing(self, now: float) -> str:
        """Start the workers that have ended, those that cannot be started now later; what was in the way, if it was."""
        trouble = ""
        for name, device in list(self._missing.items()) if not self._state.draining else ():
            if now < self._not_before.get(name, now):
                continue
            try:
                self._start(name, device)
            except (WeftError, OSError) as error:
                failed = self._failed_starts[name] = self._failed_starts.get(name, 0) + isinstance(error, WeftError)
                if failed >= MOST_STARTS_FAILED and not self.room:  # not one has ever started
                    raise NoWorkersError(str(error)) from error
                self._not_before[name] = now + START_AGAIN_SECONDS
                trouble = f"worker {name!r} could not be started: {error}"
                continue
            del self._missing[name]
        return trouble
