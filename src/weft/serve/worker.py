"""The worker process: plans and trains what it is sent, one group at a time, and streams events back.

``python -m weft.serve.worker --device cpu`` reads one JSON message per line from stdin and writes one per
line to stdout. It imports torch once, so that a group starts without delay. Messages are plain data; nothing is
unpickled.

To the worker (``do``): ``plan`` (a task: answered with its estimate), ``learn`` (what groups took that had the device
to themselves, for the estimates to come), ``run`` (tasks by their ids and their users' names, the
plan of their group, a folder, a byte budget), ``infer`` (a task, a file of weights, nodes, a folder, a byte budget;
``resident``: stay loaded until so many seconds pass without a request), ``predict`` (nodes, for the model that is
resident), ``prefetch`` (a graph that a group to come needs), ``cancel`` (members of
the running group), ``rivals`` (how members of its sweep stand that other workers train), ``preempt`` (checkpoint and
return), ``stop``.
From the worker (``say``): ``ready``, ``alive``, ``loading`` (the graph of a task to plan), ``planned``, ``event`` (of
the run, or ``scores`` of a sweep that is pruned), ``answer`` (to ``predict``), ``done``.

While a group trains, what its models print goes to ``log.txt`` in its folder, and where it was if the process crashes.
The worker ends with the server, whose end closes stdin, or with its ``--parent``.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from weft.core.errors import DivergedError, OutOfMemoryError, SpecError, TrainingError, WeftError
from weft.core.event import Event, finite
from weft.core.files import write_json
from weft.core.run_options import RunOptions, options_of
from weft.core.startup import leave_out_of_collections
from weft.core.task import Task
from weft.dist.peer_memory import RankLostError
from weft.engine.control import Control
from weft.engine.result import RESULT
from weft.planner.pruning import Rivals
from weft.runtime.checkpoint import FILE, Checkpoint, read_checkpoint, write_checkpoint
from weft.runtime.modules.convert import stack_of_one, stacks_of
from weft.runtime.modules.settings import is_own_file
from weft.serve.processes import name_segments

# ---- What a group took of the processor. Computing and waiting seconds tell a slow task from a busy machine.

STATISTICS = Path("/proc/self/schedstat")  # of the main thread: nanoseconds on a core, and ready but on none


def clocks() -> dict[str, float]:
    """Seconds of three clocks: in all, of computing by all threads, and of the main thread ready but without a core."""
    try:
        waited = int(STATISTICS.read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        waited = math.nan  # the system does not say; null in a message
    return {"seconds": time.perf_counter(), "cpu_seconds": time.process_time(), "waited_seconds": waited}


ALIVE_SECONDS = 1.0
LOG = "log.txt"
WARM_UP_AFTER = 0.2
DECIDED = tuple(row.name for row in options_of("plan"))  # by a plan
LOCKED_SECONDS = 10.0  # a former worker that was killed may hold its folder a moment longer


class Channel:
    """Messages out, one JSON line each, from any thread; a process that a model forks has none to send, and ends."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock, self._process = out, threading.Lock(), os.getpid()

    def say(self, say: str, **data: Any) -> None:
        """Send a message; numbers that JSON does not know become null."""
        if os.getpid() != self._process:
            os._exit(1)
        line = json.dumps(finite({"say": say, **data}), allow_nan=False) + "\n"
        with self._lock:
            try:
                self._out.write(line)
                self._out.flush()
            except (OSError, ValueError):  # the server has gone
                os._exit(1)


class Worker:
    """Takes messages and carries them out."""

    def __init__(self, device: str, channel: Channel, messages: Iterator[str]) -> None:
        self.device, self._channel, self._messages = device, channel, messages
        self._work: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._controls: dict[str, Control] = {}
        self._asked: queue.Queue[Mapping[str, Any]] = queue.Queue()  # of the model that is resident
        self._resident, self._residency = "", threading.Lock()
        self._group = ""
        self._idle_bytes = 0

    def serve(self, warm: bool, keep_bytes: int) -> None:
        """Work until a message says stop, or until stdin ends; ``keep_bytes``: see :class:`KeptGraphs`."""
        from weft.serve.worker_memory import KeptGraphs, bytes_beside, held_bytes, room_for_tasks

        room, beside = room_for_tasks(self.device), bytes_beside(self.device)
        self._kept = KeptGraphs(self.device, keep_bytes)
        self._idle_bytes = held_bytes(self.device)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._stay_alive, daemon=True).start()
        self._channel.say("ready", pid=os.getpid(), device=self.device, room=room, beside=beside)
        if not warm:
            # Train one epoch of something small, so that kernels are there before the first task, unless one
            # waits.
            from weft.engine.run import run

            time.sleep(WARM_UP_AFTER)
            if self._work.empty():
                with suppress(Exception):  # the first task will say what is wrong
                    run(Task(graph="demo", model="gcn", hidden=8, epochs=1), device=self.device, progress=False)
            leave_out_of_collections()
        while (message := self._work.get()) is not None:
            self._carry_out(message)

    # ---- in a thread of its own: what comes in while the main thread trains -----------------------------

    def _read(self) -> None:
        for line in self._messages:
            message = json.loads(line)
            if message["do"] == "run":
                self._controls[message["group"]] = self._control_of(message)
            if message["do"] in ("run", "plan", "learn", "infer"):
                self._work.put(message)
            elif message["do"] == "prefetch":
                self._kept.fetch_next(message["graph"])
            elif message["do"] == "predict":
                with self._residency:
                    if message["group"] == self._resident:
                        self._asked.put(message)
                    else:
                        self._channel.say("answer", id=message["id"], gone=True)
            elif message["do"] == "stop":
                self._work.put(None)
                self._asked.put({"leaves": ""})
            elif (control := self._controls.get(message.get("group", ""))) is None:
                self._asked.put({"leaves": message.get("group")})
            elif message["do"] == "rivals":
                if control.rivals is not None:
                    control.rivals.take(message["members"])
            elif message["do"] == "cancel":
                with suppress(SpecError):  # a name that has left already
                    control.cancel(*message["names"])
            elif message["do"] == "preempt" and not control.resumable:
                print(f"group {message['group']} is not preempted: its training could not be resumed", flush=True)
            elif message["do"] == "preempt":
                control.preempt()
        os._exit(0)  # the server has ended

    def _control_of(self, message: Mapping[str, Any]) -> Control:
        """What steers a group; one of a sweep that is pruned exchanges scores with other workers."""
        control, group = Control(), message["group"]
        if message.get("prune") is not None:
            tell = lambda m: self._tell(group, Event("scores", "", {"members": m}))  # noqa: E731
            control.rivals = Rivals(message["prune"], tell, control.requests)
            control.rivals.take(message["rivals"])
        return control

    def _stay_alive(self) -> None:
        from weft.serve.worker_memory import busy_since, held_bytes

        _, last = busy_since(self.device, (0.0, 0.0))
        while True:
            held = max(held_bytes(self.device) - self._idle_bytes, 0)
            busy, last = busy_since(self.device, last)
            self._channel.say("alive", group=self._group, bytes=held, busy=busy)
            time.sleep(ALIVE_SECONDS)

    # ---- in the main thread ---------------------------------------------------------------------------

    def _carry_out(self, message: Mapping[str, Any]) -> None:
        if message["do"] == "plan":
            self._channel.say("planned", id=message["id"], **self._plan(message))
            return
        if message["do"] == "learn":
            from weft.engine.learning import keep
            from weft.planner.cost.calibration import Observation
            from weft.serve.estimates import machine_of

            observations = [Observation(**observation) for observation in message["took"]]
            with suppress(WeftError, OSError):  # estimates are made without it, too
                keep(machine_of(message.get("device", self.device)), [o for o in observations if o.usable])
            return
        self._group = message["group"]
        begin = clocks()
        try:
            outcome = self._run(message)
            rivals = getattr(self._controls.get(message["group"]), "rivals", None)
            for name, scores in (rivals.standing() if rivals is not None else {}).items():
                outcome.get("members", {}).get(name, {})["scores"] = scores
            took = {name: now - begin[name] for name, now in clocks().items()}
            try:
                leftover = self._kept.settle()
            except RuntimeError:  # a kernel of a user's model failed: every further call to the device does
                leftover = None
            self._channel.say("done", group=message["group"], **outcome, took=took, leftover=leftover)
        finally:
            self._controls.pop(message["group"], None)
            self._group = ""

    def _plan(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from weft.serve.estimates import estimate_of, inference_estimate

        try:
            task, device = Task.from_dict(message["task"]), message.get("device", self.device)
            make = inference_estimate if message.get("kind") == "inference" else estimate_of
            loading = partial(self._channel.say, "loading", id=message["id"])
            options = RunOptions.of(**message.get("options", {}))
            room = {"room": message.get("room"), "devices": message.get("devices", 1)}
            estimate = make(task, device, options, **room, store=self._kept.store, loading=loading)
            return {"plan": estimate}
        except WeftError as error:
            return {"error": str(error)}
        except (Exception, SystemExit) as error:  # a user's model may raise anything
            return {"error": f"{type(error).__name__}: {error}"}

    def _run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        folder = Path(message["out"])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with output_to(folder / LOG):
                try:
                    carry_out = self._infer if message["do"] == "infer" else self._train
                    return carry_out(message, folder)
                except BaseException as error:
                    log_error(error)
                    raise
        except OutOfMemoryError as error:
            return {"error": str(error), "kind": "memory"}
        except DivergedError as error:
            return {"error": str(error), "kind": "diverged", "members": _diverged(message, folder)}
        except RankLostError as error:
            return {"error": str(error).partition(";")[0], "kind": "gone"}  # without how to resume it: the server does
        except WeftError as error:
            return {"error": str(error), "kind": "unexpected" if isinstance(error, TrainingError) else "failed"}
        except KeyboardInterrupt:
            return {"error": "interrupted", "kind": "preempted"}
        except (Exception, SystemExit) as error:
            words = str(error).strip().splitlines()  # those of CUDA go on for lines, which are in the log
            return {"error": f"{type(error).__name__}: {words[0] if words else ''}", "kind": "unexpected"}

    def _train(self, message: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Train the group; per member how it ended, its metrics, and the folder of its files; and what epochs took."""
        from weft.engine.graphs import sharing
        from weft.engine.machine import machine_with
        from weft.engine.result import Result
        from weft.engine.run import run
        from weft.engine.sweep_result import folder_names
        from weft.planner.report.plan_report import report_to_run
        from weft.serve.worker_memory import byte_limit

        tasks, devices = [Task.from_dict(task) for task in message["tasks"]], tuple(message.get("devices", ()))
        ready = isinstance(tasks[0].graph, str) and self._kept.store.holds(tasks[0].graph)
        drop_damaged(folder)
        for split in message.get("split", ()):
            split_off(Path(split["from"]), split["member"], Path(split["into"]))
        control = self._controls[message["group"]]
        if message.get("cancel"):
            control.cancel(*message["cancel"])
        given = {**message.get("options", {}), **({"ranks": len(devices)} if devices else {})}
        given.pop("prune", None)  # its members are compared with those of other workers, too: control.rivals
        if message.get("plan") is not None:  # it was made with them
            given = {name: value for name, value in given.items() if name not in DECIDED}
        options: dict[str, Any] = {
            "device": self.device,
            "out": folder,
            "resume": True,
            "progress": False,
            "on_event": partial(self._tell, message["group"]),
            "control": control,
            "budget": message.get("budget"),
            "options": RunOptions.of(**given).for_group(tasks),
        }
        work: Any = tasks[0] if len(tasks) == 1 else tasks
        if message.get("plan") is not None:
            work = report_to_run(message["plan"], machine_with(torch.device(self.device)))
        self._channel.say("event", group=message["group"], event={"event": "ready", "graph": ready})
        limit = byte_limit(self.device, message.get("limit"))
        ranks: AbstractContextManager[None] = nullcontext()
        if devices:
            from weft.dist.launch import ranks_on  # torch.distributed, which one rank does without

            ranks = ranks_on(devices)
        with limit, sharing(self._kept.store) as took, ranks:
            result = _when_unlocked(lambda: run(work, **options))
        if isinstance(result, Result):
            members = {result.name: _outcome(result, "")}
        else:
            folders = [f"tasks/{name}" for name in folder_names([task.label for task in tasks])]
            members = {member.name: _outcome(member, path) for member, path in zip(result, folders, strict=True)}
        _give_own_names(message, folder, members)
        return {"members": members, "epochs": [asdict(observation) for observation in took]}

    def _infer(self, message: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Infer for a task, with its graph from what is kept; its predictions are in ``folder``, or answers."""
        from weft.engine.graphs import sharing
        from weft.engine.inference import loaded, predict
        from weft.serve.worker_memory import byte_limit

        task = Task.from_dict(message["task"])
        self._tell(message["group"], Event("start", task.label, {"device": self.device}))
        options = {"device": self.device, "budget": message.get("budget"), "layerwise": bool(message.get("layerwise"))}
        with byte_limit(self.device, message.get("limit")), sharing(self._kept.store):
            if message.get("resident") is None:
                result = predict(task, message["weights"], nodes=message["nodes"], **options)
                result.save(folder)
                metrics = result.metrics
            else:
                with loaded(task, message["weights"], keep=True, **options) as predictor:
                    metrics = {"answers": self._answer_on(message["group"], predictor, message["resident"])}
        members = {task.label: {"status": "finished", "message": "", "metrics": metrics, "folder": ""}}
        _give_own_names(message, folder, members)
        return {"members": members}

    def _answer_on(self, group: str, predictor: Any, idle_seconds: float) -> int:
        """Answer requests until the group is to leave, or none came for ``idle_seconds``; how many there were."""
        from weft.engine.inference import answer

        answer(predictor, [0])  # computes the whole graph if that fits; else it loads kernels
        with self._residency:
            self._resident = group
        self._channel.say("event", group=group, event={"event": "resident"})
        count = 0
        try:
            while (asked := self._asked.get(timeout=idle_seconds)).get("leaves") not in ("", group):
                if "leaves" in asked:  # of an earlier group
                    continue
                count += 1
                try:
                    found = answer(predictor, asked["nodes"], asked.get("fanout"), asked.get("seed"))
                except WeftError as error:
                    found = {"error": str(error)}
                except Exception as error:  # it may have broken the device: the process is replaced
                    self._channel.say("answer", id=asked["id"], failed=f"{type(error).__name__}: {error}")
                    raise
                self._channel.say("answer", id=asked["id"], **found)
        except queue.Empty:
            pass
        finally:
            with self._residency:
                self._resident = ""
            while not self._asked.empty():
                if "id" in (asked := self._asked.get()):
                    self._channel.say("answer", id=asked["id"], gone=True)
        return count

    def _tell(self, group: str, event: Event) -> None:
        if event.kind not in ("rows", "log"):  # progress is enough for curves, and the journal has every epoch
            self._channel.say("event", group=group, event=event.to_dict())


def _outcome(result: Any, folder: str) -> dict[str, Any]:
    return {
        "status": result.status,
        "message": result.message,
        "metrics": result.metrics,
        "folder": folder,
        "peak_bytes": result.plan.measured.get("reserved_bytes"),
    }


def _diverged(message: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The outcome of a task that was alone and has diverged, by its name: its best weights from before are kept."""
    tasks, file = message.get("tasks", ()), folder / RESULT
    result = json.loads(file.read_text(encoding="utf-8")) if len(tasks) == 1 and file.is_file() else {}
    if result.get("status") != "diverged":
        return {}
    members = {tasks[0]["name"]: {name: result[name] for name in ("status", "message", "metrics")} | {"folder": ""}}
    _give_own_names(message, folder, members)
    return members


def _give_own_names(message: Mapping[str, Any], folder: Path, members: Mapping[str, Mapping[str, Any]]) -> None:
    """Write into each result the name that its user gave, and the id; before any client reads that it is there.

    Inside a server a task is named by its id. The plan in the result has the ids of all members of the group.
    """
    names = message.get("names", {})
    for task, outcome in members.items():
        file = folder / outcome["folder"] / RESULT
        if task in names and file.is_file():
            result = json.loads(file.read_text(encoding="utf-8"))
            result["task"]["name"] = names[task]
            write_json(file, {"id": task, **result})


def _when_unlocked(action: Any) -> Any:
    """Carry out ``action``; wait while another process still holds the folder."""
    until = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            return action()
        except SpecError as error:
            if "another run is writing there" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.1)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What this process prints goes to ``path`` inside."""
    before = [os.dup(number) for number in (1, 2)]
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in (1, 2):
            os.dup2(handle, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, former in zip((1, 2), before, strict=True):
            os.dup2(former, number)
            os.close(former)
        os.close(handle)


def prctl(option: int, value: int) -> None:
    """Set an option of this process (on Linux; nothing elsewhere)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when the one that started it ends (elsewhere stdin tells)."""
    prctl(1, by)  # PR_SET_PDEATHSIG
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)


def work_on(device: str, messages: IO[str], out: int, warm: bool = False, keep_bytes: int = 0) -> None:
    """Be a worker that reads ``messages`` and writes to the descriptor ``out``; ``warm``: everything is loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_segments()
    channel = Channel(os.fdopen(out, "w", encoding="utf-8"))
    os.dup2(2, 1)  # models may print: fd 1 is not for messages
    faulthandler.enable(2)  # where every thread was, should the process crash: in the log of the group that it trained
    importlib.import_module("weft.engine.run")  # what takes seconds to load
    Worker(device, channel, iter(messages.readline, "")).serve(warm, keep_bytes)


def main() -> None:
    """Run a worker on stdin and stdout."""
    parser = argparse.ArgumentParser(description="A worker of `weft serve`; started by it.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--keep-bytes", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.parent:
        end_with_parent(arguments.parent)
    work_on(arguments.device, sys.stdin, os.dup(1), keep_bytes=arguments.keep_bytes)


# ---- What the log of a task says of an error.


def log_error(error: BaseException) -> None:
    """Write ``error`` to stderr: one sentence, and the traceback from the first line of the user's code on.

    Without such a line, an error of Weft's own has no traceback, and any other error has all of it: that is a fault of
    Weft.
    """
    sys.stdout.flush()  # what the model printed comes before
    sentence = str(error) if isinstance(error, WeftError) else "".join(traceback.format_exception_only(error)).strip()
    print(sentence, file=sys.stderr)
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # the error, then what led to it, the latest first
        frames = cause.__traceback__
        while frames is not None and not is_own_file(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if frames is not None:
            traceback.print_exception(type(cause), cause, frames, chain=False)
            break
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    else:
        if not isinstance(error, WeftError):
            traceback.print_exception(error)
    sys.stderr.flush()


# ---- Taking a member's state out of a group's checkpoint, so that it continues alone.
#
# A member that had ended by itself before the group did is taken out as it ended: a run that is resumed from that
# trains nothing and writes its result.

OVER = ("finished", "stopped", "pruned", "diverged")  # ended by itself, not by a request


def split_off(group: Path, member: str, into: Path) -> None:
    """Write the checkpoint of ``member`` in the group's folder as one of its own, if there is one to take.

    A folder that has a checkpoint already is left as it is.
    """
    if (into / FILE).exists():
        return
    for file in sorted(group.glob(f"groups/*/{FILE}")):
        try:
            saved = read_checkpoint(file.parent)
        except SpecError:
            continue  # a damaged one: the member begins anew
        if saved is not None and (alone := _member(saved, member)) is not None:
            into.mkdir(parents=True, exist_ok=True)
            write_checkpoint(into, alone.tensors, alone.about)
            return


def drop_damaged(folder: Path) -> None:
    """Remove checkpoints in a run's folder that cannot be read or resumed, so that groups begin anew."""
    for file in (folder / FILE, *sorted(folder.glob(f"groups/*/{FILE}"))):
        try:
            saved = read_checkpoint(file.parent)
            facts = {} if saved is None else saved.about
            for stack in () if saved is None or facts.get("finished") else stacks_of(facts):
                if stack.unsaved:
                    raise SpecError(f"{file}: a model keeps {stack.unsaved!r} between calls, which is not plain data")
        except SpecError as error:
            print(f"{error}; starting afresh", flush=True)
            file.unlink()


def _member(saved: Checkpoint, name: str) -> Checkpoint | None:
    names = [task.get("name") for task in saved.about.get("tasks", [])]
    if name not in names:
        return None
    index = names.index(name)
    status = saved.about["members"][index].get("status", "running")
    over = status in OVER
    if not over and (status != "running" or not bool(saved.tensors["present"][index])):
        return None  # it has left the group: what is saved of it is not at the group's epoch
    prefix = f"{index}."
    tensors = {f"0.{key.removeprefix(prefix)}": t for key, t in saved.tensors.items() if key.startswith(prefix)}
    tensors |= {key: t for key, t in saved.tensors.items() if not key.partition(".")[0].isdigit()}
    tensors["present"] = torch.ones(1, dtype=torch.bool)
    facts = json.loads(json.dumps(saved.about))
    facts["tasks"], facts["members"] = [facts["tasks"][index]], [facts["members"][index]]
    if over:  # the group may be past all of its epochs
        facts["epoch"] = facts["members"][0]["epoch"]
        tensors |= {"epoch": torch.tensor(facts["epoch"]), "step": torch.tensor(0)}
    return Checkpoint(tensors, {**facts, **stack_of_one(facts, index), "finished": False})


if __name__ == "__main__":
    main()
