"""The worker processes as their supervisor holds them: forked by a spawner, replaced when they end or are silent."""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.gpus import renumbered, without_gpus
from weft.core.host_memory import cpu_count
from weft.core.units import show_bytes
from weft.sched.admission import SAFETY_THRESHOLD
from weft.serve.processes import computing, give_way, held_bytes
from weft.serve.state import SupervisorState

Inbox = queue.Queue[tuple["WorkerProcess | None", Mapping[str, Any]]]
Questions = dict[int, tuple[float, "Future[Mapping[str, Any]]"]]  # by number: when they were asked, and the answer
QUESTION_NUMBERS = itertools.count()
READY_SECONDS, CODE_SECONDS = 300.0, 5.0
SPAWNER_GONE = -1_000  # code of a worker that ended after its spawner, which had its code; no signal has that number
MOST_LOG_BYTES = 16 << 20  # of the log of a group, and of the one of all workers
MOST_LINE_BYTES = 64 << 20  # of one message
POLL_MILLISECONDS = 500  # between two looks whether a worker that says nothing has ended


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker starts with; ``keep_bytes``: of graphs between groups."""

    environment: Mapping[str, str] = field(default_factory=dict)
    keep_bytes: int = 0


class Spawner:
    """The process that forks workers; started when the first worker is, and again should it have ended.

    ``threads``: of each worker (None: as many as torch takes).
    """

    def __init__(self, log: Path, environment: Mapping[str, str], threads: int | None = None) -> None:
        self._log, self._environment, self._threads = log, environment, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._ready, self._give_up_at = False, math.inf
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._alive: set[int] = set()  # workers that the present process has started
        self._orphans: dict[int, int] = {}  # by worker that a former one had started: how many have ended since
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._lock = threading.Lock()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "weft.serve.spawner", str(theirs.fileno()), str(os.getpid())]
        self._link, self._answers, self._alive = ours, queue.Queue(), set()
        self._ready, self._give_up_at = False, time.monotonic() + READY_SECONDS
        with theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains
            )
        threading.Thread(
            target=self._read, args=(ours, self._answers, self._alive), name="spawner", daemon=True
        ).start()

    def _read(self, link: socket.socket, answers: queue.Queue[Mapping[str, Any]], alive: set[int]) -> None:
        with link.makefile("rb") as lines, suppress(OSError, ValueError):
            while (line := _try_call(lines.readline)) != b"":
                message = json.loads(line or b"{}")
                if "ended" in message:
                    alive.discard(message["ended"])
                    self._note_ended({message["ended"]: message["code"]})
                elif message:
                    alive |= {message["pid"]} if "pid" in message else set()
                    answers.put(message)
        answers.put({"gone": True})
        self._orphans = {pid: self.ended_since(pid) + 1 for pid in {*self._orphans, *alive}}
        watched, pids = select.poll(), dict[int, int]()
        for pid in alive:  # no parent waits for them now, so nothing else says when one ends
            try:
                pids[handle := os.pidfd_open(pid)] = pid
                watched.register(handle, select.POLLIN)
            except (AttributeError, OSError):  # it has ended; where there is no such call, its reader ends it
                self._note_ended({pid: SPAWNER_GONE})
        while pids:
            for handle, _ in watched.poll():
                watched.unregister(handle)
                os.close(handle)
                self._note_ended({pids.pop(handle): SPAWNER_GONE})

    def _note_ended(self, codes: Mapping[int, int]) -> None:
        with self._changed:
            self._orphans = {pid: count for pid, count in self._orphans.items() if pid not in codes}
            self._codes.update(codes)
            self._changed.notify_all()

    def _answer(self, name: str, seconds: float) -> Any:
        try:
            message = self._answers.get(seconds > 0.0, seconds)
        except queue.Empty:
            message = {}
        if name not in message:
            self.stop()
            raise WeftError(f"no worker could be started; see {self._log}")
        return message[name]

    def ready(self) -> bool:
        """Whether workers can be forked; starts the process if it is not there, and does not wait until it is ready."""
        with self._lock:
            if self._ready and self._process is not None and self._process.poll() is not None:
                self.stop()
            if self._process is None:
                self._start()
            if not self._ready and (not self._answers.empty() or time.monotonic() > self._give_up_at):
                self._ready = bool(self._answer("ready", 0.0))
            return self._ready

    def ended_since(self, pid: int) -> int:
        """How many processes that start workers have ended since the worker ``pid``, which runs, was started."""
        return self._orphans.get(pid, 0)

    def fork(self, device: str, options: WorkerOptions, handles: tuple[int, int]) -> int:
        """Start a worker with stdin and stdout ``handles``, once it is ready; its process id."""
        with self._lock:
            if self._link is None:
                raise WeftError(f"no worker could be started; see {self._log}")
            request = {"device": device, "threads": self._threads, **asdict(options)}
            socket.send_fds(self._link, [json.dumps(request).encode()], list(handles))
            return int(self._answer("pid", CODE_SECONDS * 4))

    def code_of(self, pid: int) -> int | None:
        """The exit code of a worker that has ended, negative for a signal; None if it is not known."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, CODE_SECONDS)
            return self._codes.pop(pid, None)

    def says_ended(self, pid: int) -> bool:
        """True if a worker has ended whose code has not been read."""
        with suppress(AttributeError, OSError):  # it has ended
            self._process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]  # a model may have stopped it
        with self._changed:
            return pid in self._codes

    def stop(self) -> None:
        """End it: it ends what it has started first, for which it has some seconds."""
        if self._link is not None:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
            self._link = None
        self._ready = False
        if self._process is not None:
            until = time.monotonic() + CODE_SECONDS
            while self._process.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
            self._process.kill()
            self._process.wait()
            self._process = None


def _with_pipes(start: Callable[[int, int], int]) -> tuple[int, tuple[int, int]]:
    """A process that ``start`` gives its ends of two pipes; its id, and our ends. Nothing stays open if it fails."""
    handles: list[int] = []
    try:
        handles += os.pipe()
        handles += os.pipe()
        to_read, to_write, from_read, from_write = handles
        pid = start(to_read, from_write)
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    os.close(to_read)
    os.close(from_write)
    return pid, (to_write, from_read)


def _try_call(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call to a pipe or socket returns; None, after a moment, if it failed though there is another end."""
    try:
        return call(*arguments)
    except BrokenPipeError:
        raise
    except OSError:
        time.sleep(0.1)
        return None


def bound_log(path: Path, anew: bool = False) -> None:
    """Cut a log that is too long to its first bytes, or to none if ``anew``, and say so in it.

    Those who write to it append, so they go on behind the sentence until it is cut again.
    """
    dropped = "what was here before" if anew else "what came after"
    line = f"\n[weft: a log holds at most {show_bytes(MOST_LOG_BYTES)}; {dropped} was dropped]\n".encode()
    with suppress(OSError):
        if os.stat(path).st_size > MOST_LOG_BYTES + len(line):
            os.truncate(path, 0 if anew else MOST_LOG_BYTES)
            with open(path, "ab") as log:
                log.write(line)


def message_in(line: bytes | str) -> Mapping[str, Any]:
    """The message in a line of a worker; a :class:`ValueError` if it has none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("say"), str):
        raise ValueError("sent a line that is no message")
    return message


class WorkerProcess:
    """One worker process; its messages go to ``inbox``, and ``{"say": "gone"}`` when it has ended.

    ``lost``: the machine that it was on is gone, so another cannot be started there. ``renewed``: it was ended to make
    way for a fresh one, though nothing had gone wrong.
    """

    lost = renewed = ready = False
    group = end_reason = ""  # the latter: why the supervisor ended it, if it did
    bytes = pid = 0
    busy: float | None = None  # how much of its device is in use: of a GPU in all, of a CPU by this worker
    asked_at = 0.0  # when its resident model was last asked
    looked: tuple[float, float] | None = None  # when its processes were last looked at, and what they had computed
    weigh_at, idle_bytes = 0.0, -1  # when to count their bytes again, and what they were at first
    fetched: str = ""  # the graph that it was last sent to fetch

    def __init__(self, name: str, device: str, inbox: Inbox, spawner: Spawner, options: WorkerOptions) -> None:
        self.name, self.device, self._inbox, self._spawner = name, device, inbox, spawner
        self.last_heard = time.monotonic()
        self.pid, (to_write, from_read) = _with_pipes(lambda *handles: spawner.fork(device, options, handles))
        self._in, self._out = os.fdopen(to_write, "wb", buffering=0), from_read
        self._ended, self._outbox = threading.Event(), queue.SimpleQueue[bytes | None]()
        self.questions: Questions = {}
        self._reader = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name=f"writer to {name}", daemon=True).start()

    @property
    def orphaned(self) -> int:
        """Not 0 if the process that started it has ended, so that nothing ends what a model starts; see ``Spawner``."""
        return self._spawner.ended_since(self.pid)

    @property
    def idle(self) -> bool:
        """Whether it can take a group."""
        return self.ready and not self.group and not self.end_reason

    def send(self, do: str, **data: Any) -> None:
        """Send a message, without waiting until it is read: a process that hangs must not hold up who ends it.

        One to a process that has ended is lost, and ``gone`` will follow.
        """
        self._outbox.put(json.dumps({"do": do, **data}).encode() + b"\n")

    def ask(self, group: str, **request: Any) -> Future[Mapping[str, Any]]:
        """The answer of the model that is resident as ``group``, once it comes; in any thread.

        It passes the supervisor by, whose rounds may take longer than an answer.
        """
        number, self.asked_at = next(QUESTION_NUMBERS), time.monotonic()
        answer: Future[Mapping[str, Any]] = Future()
        self.questions[number] = self.asked_at, answer
        self.send("predict", group=group, id=number, **request)
        if self._ended.is_set():
            self.end_questions()
        return answer

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Pass a message of the process on: an answer to who asked, others to the supervisor."""
        if message["say"] != "answer":
            self._inbox.put((self, message))
        elif isinstance(message.get("id"), int) and message["id"] in self.questions:
            with suppress(InvalidStateError):  # nobody waits for it any more
                self.questions.pop(message["id"])[1].set_result(message)

    def end_questions(self) -> None:
        """The process has ended: nobody answers any more."""
        for number in list(self.questions):
            self.deliver({"say": "answer", "id": number, "gone": True})

    def _write(self) -> None:
        with suppress(BrokenPipeError), self._in:
            while (line := self._outbox.get()) is not None:
                while line and not self._ended.is_set():
                    line = line[_try_call(self._in.write, line) or 0 :]

    def _read(self) -> None:
        try:
            self._relay()
        finally:
            code = self._spawner.code_of(self.pid)
            if code is None:
                self.kill("closed its pipe to the server")
                code = self._spawner.code_of(self.pid)
            if code == SPAWNER_GONE:  # the spawner was to end what the model has started
                with suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._ended.set()
            self.end_questions()
            self._inbox.put((self, {"say": "gone", "code": code}))
            os.close(self._out)

    def _relay(self) -> None:
        """Pass messages on until the process has ended, though a process that its model forked holds the pipe open.

        A process that writes a line that is no message is ended: a model can reach the pipe.
        """
        watched, until = select.poll(), math.inf
        unread: list[bytes] = []
        watched.register(self._out, select.POLLIN)
        while time.monotonic() < until:
            if watched.poll(POLL_MILLISECONDS):
                text = _try_call(os.read, self._out, 1 << 16)
                if text is None:
                    continue
                if not text:
                    return
                unread.append(text)
                if b"\n" in text:
                    *lines, rest = b"".join(unread).split(b"\n")
                    unread = [rest]
                    try:
                        for line in lines:
                            self.deliver(message_in(line))
                    except ValueError as error:
                        self.kill(str(error))
                        return
                if sum(map(len, unread)) > MOST_LINE_BYTES:
                    self.kill(f"sent a line of more than {show_bytes(MOST_LINE_BYTES)}")
                    return
            elif until < math.inf:
                return
            if until == math.inf and self._spawner.says_ended(self.pid):
                until = time.monotonic() + CODE_SECONDS

    def renew(self, reason: str = "is replaced after code that is not Weft's own") -> None:
        """End the process, so that a fresh one takes its place, though nothing has gone wrong."""
        self.renewed = not self.end_reason
        self.kill(reason)

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self.end_reason = self.end_reason or reason
        for send in (os.killpg, os.kill) if not self._ended.is_set() else ():  # at first it leads no group
            with suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """Ask it to end, and end it after ``seconds``."""
        self.send("stop")
        self._outbox.put(None)
        if not self._ended.wait(seconds):
            self.kill("did not end by itself")
            self._ended.wait(CODE_SECONDS)
        self._reader.join(CODE_SECONDS)


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


# ---- The pool

MOST_STARTS_FAILED = 5  # workers in a row that ended before they were ready
START_AGAIN_SECONDS = 5.0  # after a start that failed, for want of memory or files, say
CANCELLED_SECONDS = 10.0  # until a worker that does not let a cancelled group go is ended
PLANNER = "planner"
LOOK_SECONDS = 0.2  # at least between two looks at what the processes of a worker take
WATCH_SHARE = 10  # counting their bytes takes at most one part of so many of the time
MORE_CORES = 1.5  # than its share, on which a worker computes


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

    def _start(self, name: str, device: str) -> bool:
        """Start a worker; False if the spawner is not ready yet."""
        planner = name == PLANNER
        environment = dict(without_gpus()) if planner else dict(self._mps.environment if self._mps else {})
        options = self._state.options
        there = "cpu" if planner else device
        if "@" in there:
            environment = {**options.environment, **environment}
        start = WorkerOptions(environment, 0 if planner else options.keep_graphs)
        if "@" in there:
            from weft.serve.ray_worker import RayWorker  # imports torch, which the server does without

            self.workers[name] = RayWorker(name, there, self.inbox, start)
        elif self._spawner.ready():
            self.workers[name] = WorkerProcess(name, there, self.inbox, self._spawner, start)
        else:
            return False
        return True

    def _can_start(self) -> bool:
        """Whether a worker of this host could be started at once."""
        with suppress(WeftError, OSError):  # start_missing says what is in the way
            return self._spawner.ready()
        return False

    def share_of(self, device: str) -> float:
        """The part of ``device`` that one worker can use: of this host's processor, its threads over the cores."""
        if device.partition(":")[0] != "cpu":
            return 1.0
        return min(self._threads_of_each() / self._cores, 1.0)

    def _threads_of_each(self) -> int:
        setting = {**os.environ, **self._state.options.environment}.get("OMP_NUM_THREADS", "")
        return max(int(setting) if setting.isdigit() else self._threads, 1)

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

    def task_room(self) -> int | None:
        """Bytes that one task may be predicted to take, the safety margin left out; None before a worker is ready."""
        return int(max(map(self.task_bytes, self.room)) / SAFETY_THRESHOLD) if self.room else None

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
        """A worker's heartbeat."""
        if not worker.end_reason:
            worker.bytes, worker.busy = int(message.get("bytes", 0)), message.get("busy")

    def watch_users_code(self) -> None:
        """Bound what the processes that users' models have started take of this host, each with its worker.

        A limit on a process counts neither its children nor shared memory: if they hold too much, the worker is ended.
        A worker that computes on more cores than its share lets all others go first.
        """
        for active in self._state.active.values():
            worker, now = active.worker, time.monotonic()
            if not active.users_code or "@" in worker.device or worker.end_reason:
                continue
            since, computed = worker.looked or (0.0, 0.0)
            if now < since + LOOK_SECONDS:
                continue
            pids, seconds = computing(worker.pid)
            if since and seconds - computed > MORE_CORES * self._threads_of_each() * (now - since):
                give_way(pids)
            worker.looked, begin = (now, seconds), time.monotonic()
            if worker.device != "cpu" or begin < worker.weigh_at:
                continue
            held = held_bytes(pids)  # seconds, of many children
            worker.weigh_at = begin + WATCH_SHARE * (time.monotonic() - begin)
            worker.idle_bytes = held if worker.idle_bytes < 0 else worker.idle_bytes
            ranks = len(active.running.places)  # which are among them
            if held - worker.idle_bytes > ranks * (active.group.bytes + self._state.options.overrun_bytes):
                worker.bytes, most = held - worker.idle_bytes, show_bytes(active.group.bytes)
                worker.kill(f"out of memory: held {show_bytes(worker.bytes)}, more than its {most} and the margin")

    def end_silent(self, now: float) -> None:
        """End workers that sent no heartbeat, made no progress, or kept a cancelled group, for too long.

        Also those whose spawner has ended, after their group, when there is another; one with a user's code when a
        second spawner ends, which it may have killed: without a spawner nobody's worker can be started.
        """
        for worker in self.workers.values():
            if worker.orphaned and not worker.group and not worker.end_reason and self._can_start():
                worker.renew("is replaced after the process that had started it")
            if now - worker.last_heard > self._state.options.silent_seconds and not worker.end_reason:
                worker.kill(f"sent no heartbeat for {self._state.options.silent_seconds:.0f} s")
        for active in self._state.active.values():
            if active.users_code and active.worker.orphaned > 1 and not active.worker.end_reason:
                active.worker.kill("may have killed the processes that start workers")
            heard = active.heard
            if active.answers_for:  # what it was asked first, if that waits for an answer
                heard = min((since for since, _ in list(active.worker.questions.values())), default=now)
            if now - heard > self._state.options.hang_seconds and not active.worker.end_reason:
                active.worker.kill(f"made no progress for {self._state.options.hang_seconds:.0f} s")
            elif now - active.unwanted_since > CANCELLED_SECONDS and not active.worker.end_reason:
                active.worker.kill("did not end a group that was cancelled")

    def replace(self, worker: WorkerProcess) -> None:
        """Start another worker in place of one that has ended, unless it had been put aside."""
        if self.workers.get(worker.name) is not worker:
            worker.stop(0.1)
            return
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

    def put_aside(self, planner: WorkerProcess) -> None:
        """Start another planner in place of one that goes on with what it is at, unless one was started."""
        if self.workers.get(PLANNER) is planner:
            self._missing[PLANNER] = self.workers.pop(PLANNER).device

    def start_missing(self, now: float) -> str:
        """Start the workers that have ended, those that cannot be started now later; what was in the way, if it was."""
        trouble = ""
        for name, device in list(self._missing.items()) if not self._state.draining else ():
            if now < self._not_before.get(name, now):
                continue
            try:
                if not self._start(name, device):
                    continue
            except (WeftError, OSError) as error:
                failed = self._failed_starts[name] = self._failed_starts.get(name, 0) + isinstance(error, WeftError)
                if failed >= MOST_STARTS_FAILED and not self.room:  # not one has ever started
                    raise NoWorkersError(str(error)) from error
                self._not_before[name] = now + START_AGAIN_SECONDS
                trouble = f"worker {name!r} could not be started: {error}"
                continue
            del self._missing[name]
        return trouble
