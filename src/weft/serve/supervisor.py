"""The supervisor: plans queued tasks, decides with a policy which start, and keeps worker processes at it.

It runs in one thread with its own connection to the queue and imports no torch: planning and training happen in worker
processes. Nothing that matters is kept in memory alone. After ``kill -9`` of the server, the next one finds the groups
that ran, and they go on from their checkpoints.

A worker that crashes, hangs or is killed is replaced. Its tasks are queued again, a bounded number of times; those of a
group go on alone, each from the group's last checkpoint, so that one bad member cannot take the others down again. A
task that ran out of memory is queued once more with its estimate corrected.
"""

from __future__ import annotations

import hashlib
import json
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.errors import WeftError
from weft.core.units import show_bytes
from weft.sched.admission import free_bytes
from weft.sched.policies import find_policy
from weft.sched.queue_state import Decision, DeviceState, GroupStart, MachineState, QueuedTask, RunningGroup, UserShare
from weft.serve.options import ServeOptions
from weft.serve.queue.queue_db import QueueDB
from weft.serve.queue.queue_groups import Group
from weft.serve.queue.queue_retention import delete_ended
from weft.serve.queue.task_states import ENDED, LostClaimError, QueueError, QueueTask
from weft.serve.workers.mps import MPS
from weft.serve.workers.run_events import Record, records_of
from weft.serve.workers.worker_process import Inbox, Spawner, WorkerProcess

TICK_SECONDS, LOOK_SECONDS, VIEW_SECONDS = 0.1, 2.0, 0.5
PROGRESS_SECONDS = 1.0  # between two progress events of a group in the queue
MOST_PLANNED = 5_000  # waiting tasks that a decision looks at
PLANNED_AT_ONCE = 500  # in one transaction, for which others wait
PASS_SECONDS = 0.1  # between two passes while every worker is busy: submissions need the file, too
BUSY_SECONDS = 1.0  # between two decisions while every worker is busy
MOST_STARTS_FAILED = 5  # workers in a row that ended before they were ready
PLAN_TRIES, GROWTH, DISK_WAIT, FULL_DISK_SECONDS = 2, 1.5, 20.0, 0.5
SAMPLES = 1_800
PLANNER = "planner"
FREE_OF_COST = ("seed", "name", "lr", "weight_decay", "betas", "eps")  # settings that no estimate depends on


class NoWorkersError(WeftError):
    """Workers end before they are ready: the server cannot work here."""


@dataclass
class Active:
    """A group that a worker runs."""

    group: Group
    worker: WorkerProcess
    attempts: dict[str, int]
    users: dict[str, str]
    utilisation: float
    graph: str
    heard: float
    epoch: int = 0
    told: float = 0.0
    leaving: bool = False  # asked to save and return
    split: set[str] = field(default_factory=set)  # members that were paused, and go on alone

    @property
    def members(self) -> tuple[str, ...]:
        """The tasks that it trains: the group's, less those that had left before it went on."""
        return tuple(self.attempts)

    @property
    def fused(self) -> bool:
        """Whether it is a group of several, with a folder of its own."""
        return len(self.group.members) > 1

    def state(self) -> RunningGroup:
        """What a policy sees of it."""
        one = self.group
        return RunningGroup(
            id=one.id,
            device=one.device,
            members=self.members,
            bytes=one.bytes,
            utilisation=self.utilisation,
            started=one.started,
            ends=one.started + one.seconds,
            graph=self.graph,
        )


@dataclass
class Counters:
    """What happened since the server started."""

    groups_started: int = 0
    tasks_started: int = 0
    workers_lost: int = 0
    memory_errors: int = 0
    tasks_requeued: int = 0


class Supervisor:
    """Runs the queue of ``options.db``: :meth:`start`, :meth:`wake` after a change, :meth:`stop`."""

    def __init__(self, options: ServeOptions) -> None:
        self.options, self.counters = options, Counters()
        self.view: dict[str, Any] = {"workers": [], "running": [], "devices": [], "samples": [], "why": {}}
        self.error = ""
        self._inbox: Inbox = queue.Queue()
        self._policy = find_policy(options.policy)
        self._workers: dict[str, WorkerProcess] = {}
        self._room: dict[str, int] = {}
        self._active: dict[str, Active] = {}  # by group
        self._resumable: dict[str, Group] = {}
        self._planning: tuple[str, str] | None = None  # task, key of its estimate
        self._plan_tries: dict[str, int] = {}
        self._estimates: dict[str, Mapping[str, Any]] = {}
        self._not_before: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._started_on: dict[str, int] = {}
        self._failed_starts: dict[str, int] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._records: list[Record] = []
        self._why: dict[str, str] = {}
        self._dirty, self._looked, self._viewed, self._beat, self._cleaned = True, 0.0, 0.0, 0.0, 0.0
        self._decided = 0.0
        self._stopping = threading.Event()
        self._draining, self._drained_by = False, 0.0
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._mps: MPS | None = None
        self._spawner = Spawner(options.runs / "workers.log", options.environment)
        self._session = uuid.uuid4().hex[:6]

    # ---- for the server --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work, in a thread."""
        self._thread.start()

    def wake(self) -> None:
        """Look at the queue now: something was submitted, cancelled, paused or resumed."""
        self._inbox.put((None, {"say": "wake"}))

    def stop(self, seconds: float = 60.0) -> None:
        """Drain: start nothing more, let running groups save a checkpoint and return, then end the workers."""
        self._drained_by, self._draining = time.monotonic() + seconds, True
        self.wake()
        self._thread.join(seconds + 15.0)

    @property
    def running(self) -> bool:
        """Whether it is at work."""
        return self._thread.is_alive()

    # ---- the loop --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with QueueDB(self.options.db) as self._db:
                self._begin()
                while not self._finished():
                    self._work()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            for worker in self._workers.values():
                worker.stop(5.0)
            self._spawner.stop()
            if self._mps is not None:
                self._mps.stop()

    def _work(self) -> None:
        """One round. A full disk is waited for: what could not be written is found again when its lease has run out."""
        try:
            self._take_messages()
            self._tick()
        except NoWorkersError:
            raise
        except WeftError as error:
            print(f"weft: {error}; trying again", file=sys.stderr, flush=True)
            self._dirty = True
            time.sleep(FULL_DISK_SECONDS)

    def _begin(self) -> None:
        self.options.runs.mkdir(parents=True, exist_ok=True)
        self._recover()
        devices = self.options.device_names()
        self._mps = MPS(devices, self.options.workers, self.options.runs)
        self._mps.start()
        self._start_worker(PLANNER, devices[0], planner=True)
        for device in devices:
            for place in range(self.options.workers):
                self._start_worker(f"{device}/{place}", device)

    def _recover(self) -> None:
        """Take over from a server that ended: its tasks are queued again, its fused groups go on as they were."""
        for task in self._db.tasks(state="running", limit=1_000_000):
            self._db.release(task.id, "the server was restarted")
        for group in self._db.groups("running", limit=1_000_000):
            fused = len(group.members) > 1
            self._db.end_group(group.id, "preempted" if fused else "dissolved", "the server was restarted")
        self._resumable = {group.id: group for group in self._db.groups("preempted", limit=1_000_000)}

    def _start_worker(self, name: str, device: str, planner: bool = False) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": ""} if planner else dict(self._mps.environment if self._mps else {})
        self._workers[name] = WorkerProcess(name, "cpu" if planner else device, self._inbox, self._spawner, environment)

    def _finished(self) -> bool:
        if not self._draining:
            return False
        if time.monotonic() > self._drained_by:
            for active in self._active.values():
                active.worker.kill("the server ended before a checkpoint was saved")
            return True
        return not self._active

    def _take_messages(self) -> None:
        try:
            waiting = [self._inbox.get(timeout=TICK_SECONDS)]
        except queue.Empty:
            return
        while not self._inbox.empty():
            waiting.append(self._inbox.get_nowait())
        for worker, message in waiting:
            self._take(worker, message)

    def _take(self, worker: WorkerProcess | None, message: Mapping[str, Any]) -> None:
        if worker is None:
            self._dirty, self._beat = True, 0.0
            return
        worker.last_heard = time.monotonic()
        handler = {
            "ready": self._ready,
            "alive": self._alive,
            "planned": self._planned,
            "event": self._event,
            "done": self._done,
            "gone": self._gone,
        }.get(message.get("say", ""))
        if handler is not None:
            handler(worker, message)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beat > self.options.lease_seconds / 3:
            self._beat = now
            self._heartbeat()
        self._end_silent(now)
        if now - self._looked > LOOK_SECONDS:
            self._dirty = True
        if self._dirty and not self._draining and (self._any_idle() or now - self._looked > PASS_SECONDS):
            self._dirty, self._looked = False, now
            self._plan_queued()
            if self._any_idle() or now - self._decided > BUSY_SECONDS:
                self._decided = now
                self._schedule()
        elif self._draining:
            self._preempt_all()
        self._write_records()
        self._keep_small(now)
        if now - self._viewed > VIEW_SECONDS:
            self._viewed = now
            self._show()

    def _keep_small(self, now: float) -> None:
        if self.options.keep_seconds is not None and now - self._cleaned > 600.0:
            self._cleaned = now
            delete_ended(self._db, time.time() - self.options.keep_seconds)

    # ---- what workers say ------------------------------------------------------------------------------

    def _ready(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.ready, self._dirty = True, True
        self._failed_starts[worker.name] = 0
        if worker.name != PLANNER:
            there = int(message["room"])
            self._room.setdefault(worker.device, min(self.options.budget or there, there))

    def _alive(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.bytes = int(message.get("bytes", 0))
        active = self._active.get(worker.group)
        if active is None or worker.device.startswith("cuda"):  # a GPU has a wall of its own
            return
        most = active.group.bytes + self.options.overrun_bytes
        if worker.bytes > most:
            held = f"held {show_bytes(worker.bytes)}, more than its {show_bytes(active.group.bytes)} and the margin"
            worker.kill(f"out of memory: {held}")

    def _event(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        active = self._active.get(message["group"])
        if active is None:
            return
        event, now = message["event"], time.monotonic()
        active.heard = now
        if event["event"] == "progress":
            active.epoch = int(event.get("epoch") or active.epoch)
            last = active.epoch >= int(event.get("epochs") or 0) > 0 or event.get("done") == event.get("total", 0)
            if now - active.told < PROGRESS_SECONDS and not last:
                return
            active.told = now
        self._records += records_of(event, active.members, active.group.id)

    def _write_records(self) -> None:
        if self._records:
            records, self._records = self._records, []
            self._db.record(records)

    # ---- planning --------------------------------------------------------------------------------------

    def _plan_queued(self) -> None:
        """Give queued tasks an estimate: known ones at once, together; another from the planner, one at a time."""
        plans: list[tuple[str, Mapping[str, Any]]] = []
        waiting = self._db.tasks(state="queued", limit=PLANNED_AT_ONCE)
        for task in waiting:
            if task.plan is not None:
                plans.append((task.id, task.plan))
                continue
            key = _estimate_key(task.spec["task"])
            known = self._estimates.get(key)
            if known is not None:
                plans += self._within_limits(task, known)
            elif self._planning is None and self._workers[PLANNER].ready:
                self._planning = (task.id, key)
                device = self.options.device_names()[0]
                self._workers[PLANNER].send("plan", id=task.id, task=self._settings(task), device=device)
        if plans:
            self._db.plan_many(plans)
        self._dirty = self._dirty or len(plans) == PLANNED_AT_ONCE

    def _planned(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        if self._planning is None or self._planning[0] != message["id"]:
            return
        (name, key), self._planning, self._dirty = self._planning, None, True
        task = self._db.get(name)
        if task.state != "queued":
            return
        if "error" in message:
            self._guarded(self._db.refuse, name, str(message["error"]))
            return
        if len(self._estimates) > 10_000:
            self._estimates.clear()
        self._estimates[key] = message["plan"]
        self._db.plan_many(self._within_limits(task, message["plan"]))

    def _within_limits(self, task: QueueTask, plan: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """The plan of a task, in a list; an empty one if the task was refused because it exceeds its own budget."""
        limit = task.spec.get("budget")
        if limit is None:
            return [(task.id, plan)]
        if plan.get("alone"):  # a guess
            return [(task.id, {**plan, "bytes": min(plan["bytes"], limit)})]
        if plan["bytes"] > limit:
            needs = f"needs {show_bytes(plan['bytes'])}, more than its budget of {show_bytes(limit)}"
            self._guarded(self._db.refuse, task.id, f"{needs}; raise the budget, or lower hidden or layers")
            return []
        return [(task.id, plan)]

    def _settings(self, task: QueueTask) -> dict[str, Any]:
        """A task as a worker gets it: named by its id, with the path of its graph."""
        place = task.spec.get("graph_path")
        return {**task.spec["task"], **({"graph": place} if place else {}), "name": task.id}

    # ---- deciding --------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        waiting = list(self._db.tasks(state="planned", limit=MOST_PLANNED))
        self._why = {}
        if not self._room:
            self._why = {task.id: "waits for the first worker to start" for task in waiting}
            return
        known = {task.id: task for task in waiting}
        waiting = self._resume_groups(known)
        ready = [task for task in waiting if not self._held_back(task)]
        decision = self._decide(ready)
        for name, reason in decision.refuse.items():
            self._guarded(self._db.refuse, name, reason)
        for start in decision.start:
            self._start(start, [known[name] for name in start.members])
        started = set(decision.started)
        self._why |= {task.id: decision.reason(task.id) for task in ready if task.id not in started}

    def _decide(self, tasks: Sequence[QueueTask]) -> Decision:
        running = [active.state() for active in self._active.values()]
        return self._policy.schedule([_queued_task(task) for task in tasks], running, self._machine())

    def _machine(self) -> MachineState:
        devices = []
        for name, room in self._room.items():
            workers = sum(1 for one in self._workers.values() if one.device == name and one.name != PLANNER)
            devices.append(DeviceState(name, room, workers=max(workers, 1), started=self._started_on.get(name, 0)))
        users = tuple(UserShare(user, seconds) for user, seconds in self._shares.items())
        return MachineState(tuple(devices), time.time(), users)

    def _held_back(self, task: QueueTask) -> bool:
        """Whether a task cannot start yet for a reason that no policy knows of."""
        until = self._not_before.get(task.id, 0.0)
        if until > time.monotonic():
            self._why[task.id] = f"waits {until - time.monotonic():.0f} s before it is tried again: {task.error}"
            return True
        open_names = [name for name in task.after if self._db.get(name).state != "done"]
        if open_names:
            self._why[task.id] = f"waits for {', '.join(map(repr, open_names[:3]))} to be done"
        return bool(open_names)

    def _any_idle(self) -> bool:
        return any(worker.idle for name, worker in self._workers.items() if name != PLANNER)

    def _idle_worker(self, device: str) -> WorkerProcess | None:
        names = sorted(name for name, one in self._workers.items() if one.device == device and name != PLANNER)
        return next((self._workers[name] for name in names if self._workers[name].idle), None)

    def _start(self, start: GroupStart, tasks: Sequence[QueueTask]) -> None:
        worker = self._idle_worker(start.device)
        if worker is None:
            for task in tasks:
                self._why[task.id] = "waits for a free worker"
            return
        chosen = _without_twins(tasks)
        alone = len(chosen) == 1
        name = uuid.uuid4().hex[:12]
        group = Group(
            id=name,
            device=start.device,
            worker=worker.name,
            members=tuple(task.id for task in chosen),
            folder=chosen[0].id if alone else f"group-{name}",
            bytes=start.bytes,
            seconds=start.seconds,
            why=start.why,
            started=time.time(),
        )
        self._launch(group, worker, chosen, start.utilisation)

    def _launch(
        self,
        group: Group,
        worker: WorkerProcess,
        tasks: Sequence[QueueTask],
        utilisation: float,
        cancelled: Sequence[QueueTask] = (),
    ) -> None:
        """Claim ``tasks`` and send the group to ``worker``; ``cancelled`` members have left it and are not claimed."""
        claimant = self._claimant(worker)
        try:
            claimed = self._db.claim_all([task.id for task in tasks], claimant, self.options.lease_seconds, group)
        except QueueError:  # cancelled or paused since the decision
            self._dirty = True
            return
        everyone = {task.id: task for task in (*claimed, *cancelled)}
        self._active[group.id] = Active(
            group=group,
            worker=worker,
            attempts={task.id: task.attempts for task in claimed},
            users={task.id: task.user for task in claimed},
            utilisation=utilisation,
            graph=str((claimed[0].plan or {}).get("graph", "")),
            heard=time.monotonic(),
        )
        worker.group = group.id
        self._started_on[group.device] = self._started_on.get(group.device, 0) + len(claimed)
        self.counters.groups_started += 1
        self.counters.tasks_started += len(claimed)
        runs, members = self.options.runs, [everyone[name] for name in group.members]
        split = [
            {"from": str(runs / origin), "member": task.id, "into": str(runs / task.id)}
            for task in members
            if (origin := (task.plan or {}).get("from")) is not None
        ]
        limits = [task.spec["budget"] for task in claimed if task.spec.get("budget") is not None]
        budget = min([group.bytes, *limits]) if len(claimed) == 1 else group.bytes
        worker.send(
            "run",
            group=group.id,
            tasks=[self._settings(task) for task in members],
            out=str(runs / group.folder),
            budget=budget,
            checkpoint_every=self.options.checkpoint_seconds,
            split=split,
            cancel=[task.id for task in cancelled],
        )

    def _claimant(self, worker: WorkerProcess) -> str:
        return f"{self._session}/{worker.name}/{worker.pid}"

    def _resume_groups(self, planned: Mapping[str, QueueTask]) -> list[QueueTask]:
        """Let groups that were preempted go on as they were; returns the planned tasks that are in none of them."""
        taken: set[str] = set()
        for group in list(self._resumable.values()):
            members = [self._db.get(name) for name in group.members]
            ours = [task for task in members if task.state != "paused" and "from" not in (task.plan or {})]
            present = [task for task in ours if task.state not in ENDED]
            if not present:
                self._db.end_group(group.id, "ended", "no member is left")
                del self._resumable[group.id]
                continue
            taken |= {task.id for task in present}
            worker = self._idle_worker(group.device)
            if not all(task.id in planned for task in present) or worker is None or not self._fits(group):
                self._why |= {task.id: "waits to go on with its group" for task in present}
                continue
            del self._resumable[group.id]
            gone = [task for task in members if task not in present]
            again = replace(group, state="running", worker=worker.name, ended=None, started=time.time())
            self._launch(again, worker, present, 1.0, gone)
        return [task for task in planned.values() if task.id not in taken]

    def _fits(self, group: Group) -> bool:
        device = next((one for one in self._machine().devices if one.name == group.device), None)
        running = [active.state() for active in self._active.values()]
        return device is not None and (not running or group.bytes <= free_bytes(device, running))

    # ---- cancelling, pausing, draining -----------------------------------------------------------------

    def _heartbeat(self) -> None:
        """Renew the leases; members that were cancelled or paused in the queue are to leave their groups."""
        self._db.requeue_expired()
        for active in self._active.values():
            held = set(self._db.heartbeat(self._claimant(active.worker), self.options.lease_seconds))
            lost = [name for name in active.members if name not in held]
            if lost:
                self._dismiss(active, lost)

    def _dismiss(self, active: Active, lost: Sequence[str]) -> None:
        paused = [name for name in lost if self._db.get(name).state in ("paused", "queued", "planned")]
        if paused and not active.leaving:
            self._preempt(active)
        if active.fused:
            for name in paused:
                if name not in active.split:
                    active.split.add(name)
                    plan = self._db.get(name).plan or {}
                    self._db.replan(name, {**plan, "alone": True, "from": active.group.folder})
        cancelled = [name for name in lost if name not in paused]
        if cancelled:
            active.worker.send("cancel", group=active.group.id, names=cancelled)

    def _preempt(self, active: Active) -> None:
        active.leaving = True
        active.worker.send("preempt", group=active.group.id)

    def _preempt_all(self) -> None:
        for active in self._active.values():
            if not active.leaving:
                self._preempt(active)

    # ---- how groups end --------------------------------------------------------------------------------

    def _done(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        active = self._active.pop(message["group"], None)
        worker.group, self._dirty = "", True
        if active is None:
            return
        self._write_records()
        self._charge(active)
        if "error" in message:
            self._group_failed(active, str(message["kind"]), str(message["error"]))
            return
        outcomes = message["members"]
        left = False
        for name in active.members:
            left |= self._member_done(active, name, outcomes.get(name, {"status": "failed", "message": "no result"}))
        state = "preempted" if left and active.fused else "dissolved" if left else "ended"
        self._db.end_group(active.group.id, state)
        if state == "preempted":
            self._resumable[active.group.id] = next(g for g in self._db.groups("preempted") if g.id == active.group.id)

    def _member_done(self, active: Active, name: str, outcome: Mapping[str, Any]) -> bool:
        """Write down how a member ended; whether it was preempted, and so is to go on."""
        status, told = outcome["status"], str(outcome.get("message") or "")
        worker, attempt = self._claimant(active.worker), active.attempts[name]
        try:
            if status in ("finished", "stopped", "pruned"):
                place = "/".join(filter(None, (active.group.folder, outcome["folder"])))
                result = {"status": status, "metrics": outcome["metrics"], "folder": place, "group": active.group.id}
                result["peak_bytes"] = outcome.get("peak_bytes")
                self._db.finish(name, worker, attempt, _plain(result))
            elif status == "preempted":
                held = self._db.get(name)
                if (held.state, held.worker, held.attempts) == ("running", worker, attempt):
                    self._db.release(name, "preempted")
                return True
            elif status == "cancelled":
                held = self._db.get(name)
                if held.state == "running" and held.worker == worker:
                    self._db.cancel(name)
            elif status == "failed" and "memory" in told and "not enough" in told:
                self._out_of_memory(active, name, told, None)
            else:
                self._db.fail(name, worker, attempt, told or status)
        except (LostClaimError, QueueError):
            return False  # cancelled or paused meanwhile
        return False

    def _group_failed(self, active: Active, kind: str, error: str) -> None:
        """The run as a whole failed: members of a group are tried once more alone, a task alone has failed."""
        fused = active.fused
        if kind == "preempted":
            for name in active.members:
                self._guarded(self._lost, active, name, error)
        for name in active.members if kind != "preempted" else ():
            if kind == "memory":
                self._guarded(self._out_of_memory, active, name, error, None)
            elif fused or "cannot write to" in error:
                if "cannot write to" in error:
                    self._not_before[name] = time.monotonic() + DISK_WAIT
                self._guarded(self._lost, active, name, error)
            else:
                worker, attempt = self._claimant(active.worker), active.attempts[name]
                self._guarded(self._db.fail, name, worker, attempt, error)
        self._db.end_group(active.group.id, "dissolved" if fused else "ended", error)

    def _guarded(self, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except (LostClaimError, QueueError):
            return  # cancelled or paused meanwhile

    def _lost(self, active: Active, name: str, reason: str) -> None:
        """Queue a task again whose worker was lost; one of a group goes on alone, from the group's checkpoint."""
        task = self._db.get(name)
        plan = dict(task.plan or {})
        plan["failures"] = int(plan.get("failures", 0)) + 1
        if active.fused:
            plan |= {"alone": True, "from": active.group.folder}
        self._db.replan(name, plan)
        self._db.fail(name, self._claimant(active.worker), active.attempts[name], reason, retry=True)
        self.counters.tasks_requeued += 1

    def _out_of_memory(self, active: Active, name: str, reason: str, measured: int | None) -> None:
        """Correct the estimate and queue the task once more, alone; the second time it has failed."""
        self.counters.memory_errors += 1
        task = self._db.get(name)
        plan = dict(task.plan or {})
        first = not plan.get("memory_errors")
        wanted = max(int(plan.get("bytes", 0) * GROWTH), measured or 0)
        plan |= {"memory_errors": int(plan.get("memory_errors", 0)) + 1, "alone": True, "bytes": wanted}
        if active.fused:
            plan["from"] = active.group.folder
        self._db.replan(name, plan)
        told = f"{reason}; the estimate is now {show_bytes(wanted)}" if first else reason
        self._db.fail(name, self._claimant(active.worker), active.attempts[name], told, retry=first)

    def _charge(self, active: Active) -> None:
        seconds = (time.time() - active.group.started) * active.utilisation / len(active.members)
        for user in active.users.values():
            self._shares[user] = self._shares.get(user, 0.0) + seconds

    # ---- workers that end ------------------------------------------------------------------------------

    def _end_silent(self, now: float) -> None:
        for worker in self._workers.values():
            if now - worker.last_heard > self.options.silent_seconds and not worker.end_reason:
                worker.kill(f"sent no heartbeat for {self.options.silent_seconds:.0f} s")
        for active in self._active.values():
            if now - active.heard > self.options.hang_seconds and not active.worker.end_reason:
                active.worker.kill(f"made no progress for {self.options.hang_seconds:.0f} s")

    def _gone(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A worker has ended: start another, and queue again what it had."""
        if self._workers.get(worker.name) is not worker:
            return
        self.counters.workers_lost += 1
        reason = worker.end_reason or f"its worker ended ({_code_words(message.get('code'))})"
        active = self._active.pop(worker.group, None)
        if active is not None:
            self._write_records()
            self._charge(active)
            for name in active.members:
                if reason.startswith("out of memory"):
                    self._guarded(self._out_of_memory, active, name, reason, worker.bytes)
                else:
                    self._guarded(self._lost, active, name, reason)
            self._db.end_group(active.group.id, "dissolved", reason)
        if worker.name == PLANNER:
            self._planner_gone(reason)
        self._dirty = True
        self._replace(worker)

    def _planner_gone(self, reason: str) -> None:
        if self._planning is None:
            return
        (name, _), self._planning = self._planning, None
        self._plan_tries[name] = self._plan_tries.get(name, 0) + 1
        if self._plan_tries[name] >= PLAN_TRIES and self._db.get(name).state == "queued":
            self._guarded(self._db.refuse, name, f"planning it ended the planner {PLAN_TRIES} times: {reason}")

    def _replace(self, worker: WorkerProcess) -> None:
        failed = 0 if worker.ready else self._failed_starts.get(worker.name, 0) + 1
        self._failed_starts[worker.name] = failed
        worker.stop(0.1)
        if failed >= MOST_STARTS_FAILED:
            raise NoWorkersError(
                f"worker {worker.name!r} ended {failed} times before it was ready; see {self.options.runs}/workers.log"
            )
        if not self._draining:
            self._start_worker(worker.name, worker.device, planner=worker.name == PLANNER)

    # ---- what is shown ---------------------------------------------------------------------------------

    def _show(self) -> None:
        """Publish what the dashboard and metrics read, as one new object."""
        now = time.time()
        bytes_by_device: dict[str, int] = {}
        for worker in self._workers.values():
            if worker.name != PLANNER:
                bytes_by_device[worker.device] = bytes_by_device.get(worker.device, 0) + worker.bytes
        estimated: dict[str, int] = {}
        for active in self._active.values():
            estimated[active.group.device] = estimated.get(active.group.device, 0) + active.group.bytes
        for device in self._room:
            sample = {"time": now, "device": device, "bytes": bytes_by_device.get(device, 0)}
            self._samples.append({**sample, "estimate": estimated.get(device, 0)})
        self.view = {
            "time": now,
            "draining": self._draining,
            "devices": [{"name": name, "budget": room} for name, room in self._room.items()],
            "workers": [
                {"name": w.name, "device": w.device, "pid": w.pid, "ready": w.ready, "group": w.group, "bytes": w.bytes}
                for w in self._workers.values()
            ],
            "running": [
                {**active.group.to_dict(), "epoch": active.epoch, "held": active.worker.bytes}
                for active in self._active.values()
            ],
            "samples": list(self._samples),
            "why": dict(self._why),
            "counters": vars(self.counters).copy(),
        }


def _queued_task(task: QueueTask) -> QueuedTask:
    plan = task.plan or {}
    return QueuedTask(
        id=task.id,
        bytes=max(int(plan["bytes"]), 0),
        seconds=float(plan["seconds"]),
        graph=str(plan.get("graph", "")),
        join_key=str(plan.get("join_key", "")),
        fusable=not plan.get("alone") and task.spec.get("budget") is None,
        shared_bytes=min(int(plan.get("shared_bytes", 0)), int(plan["bytes"])),
        utilisation=float(plan.get("utilisation", 1.0)),
        arrival=task.created,
        user=task.user,
        priority=task.priority,
        deadline=task.spec.get("deadline"),
        attempts=int(plan.get("failures", 0)),
    )


def _without_twins(tasks: Sequence[QueueTask]) -> list[QueueTask]:
    """Tasks less those with the settings of another, which no sweep may have twice: they start in a later group."""
    chosen: dict[str, QueueTask] = {}
    for task in tasks:
        settings = {key: value for key, value in task.spec["task"].items() if key != "name"}
        chosen.setdefault(json.dumps(settings, sort_keys=True), task)
    return list(chosen.values())


def _estimate_key(settings: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in settings.items() if key not in FREE_OF_COST}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    from weft.core.event import finite

    found: dict[str, Any] = finite(value)
    return found


def _code_words(code: Any) -> str:
    if isinstance(code, int) and code < 0:
        return f"signal {-code}, {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit code {code}"
