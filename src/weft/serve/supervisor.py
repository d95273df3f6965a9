"""The supervisor: plans queued tasks, decides with a policy which start, and keeps worker processes at it.

It runs in one thread with its own connection to the queue and imports no torch: planning and training happen in worker
processes. Nothing that matters is kept in memory alone. After ``kill -9`` of the server, the next one finds the groups
that ran, and they go on from their checkpoints.

A worker that crashes, hangs or is killed is replaced. Its tasks are queued again, a bounded number of times; those of a
group go on alone, each from the group's last checkpoint, so that one bad member cannot take the others down again. A
task that ran out of memory is queued once more with its estimate corrected.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from weft.sched.admission import Policy, decide, waits_for
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState, QueueDecision
from weft.sched.task_queue import UserShares
from weft.serve.groups import (
    LOG,
    GroupEndings,
    Groups,
    Preempted,
    split,
    update_scores,
    why_gone,
)
from weft.serve.options import ServeOptions
from weft.serve.planner import TaskPlanner
from weft.serve.queue_db import LostQueueError, Owner, QueueDB, QueueTask
from weft.serve.retention import clean_up, clock_trouble, drop_checkpoints
from weft.serve.state import (
    RESTARTED,
    TRANSIENT_ERRORS,
    WAITS_ALONE,
    WAITS_FOR_SUSPECT,
    ActiveGroup,
    SupervisorState,
    is_late,
    is_suspect,
    planned_for_more,
    queued_task,
    raised_priorities,
    records_of,
    take_over,
    unless_lost,
)
from weft.serve.worker_pool import PLANNER, NoWorkersError, WorkerPool, WorkerProcess, bound_log

SAMPLES = 1_800  # of memory by device over time

# ---- Which planned tasks start now, as a policy decides; it sees a preempted group that is to go on as one task

MOST_PLANNED = 2_000  # waiting tasks that a decision looks at: 5,000 take 200 ms


class Scheduler:
    """Starts what the policy of ``options`` chooses, and says of every other task why it waits."""

    def __init__(self, state: SupervisorState, pool: WorkerPool, groups: Groups) -> None:
        self._state, self._pool, self._groups = state, pool, groups
        self.policy: Policy = find_policy(state.options.policy, state.options.fuse)
        self._known: dict[str, QueueTask] = {}  # planned tasks as last read
        self._user_seconds: dict[str, float] = {}

    def schedule(self) -> None:
        """Start what can start now."""
        waiting = self._planned()
        self._state.why, self._state.raised = {}, raised_priorities(waiting)
        if not self._pool.room:
            self._state.why = {task.id: "waits for the first worker to start" for task in waiting}
            return
        running = {name for active in self._state.active.values() for name in active.members}
        self._state.shares.see([task.user for task in waiting] + list(self._being_had()))
        self._user_seconds = self._state.user_seconds()
        groups = self._groups.ready()
        apart = [task for task in waiting if task.id not in self._groups.preempted]
        states = self._state.db.states(name for task in apart for name in task.after)
        ready = [task for task in apart if not self._held_back(task, task.id in running, states)]
        groups, ready, suspect = self._limit_to_suspect(groups, ready)
        decision = self._decide(groups, ready)
        room = self._pool.task_room()
        for name, reason in decision.refuse.items():
            if name in groups:
                self._groups.take_apart(groups[name], reason)
            elif (task := self._known.get(name)) and not task.attempts and planned_for_more(task.plan or {}, room):
                unless_lost(self._state.db.unplan, name)
                self._state.dirty = True
            else:
                unless_lost(self._state.db.refuse, name, reason)
        for preempted in decision.preempt:
            self._groups.preempt(self._state.active[preempted])
        starts = list(decision.start)
        if suspect and any(start.members[0] == suspect for start in starts):  # nothing else starts with it
            starts = starts[:1] if starts[0].members[0] == suspect else [s for s in starts if s.members[0] != suspect]
        for start in starts:
            if start.members[0] in groups:
                self._groups.resume(groups[start.members[0]], start)
            else:
                self._groups.start(start, [self._known[name] for name in start.members])
        started = set(decision.started)
        self._state.why |= {task.id: decision.reason(task.id) for task in ready if task.id not in started}
        for name, group in groups.items():
            if name not in started:
                self._state.why |= {task.id: decision.reason(name) for task in group.present}
        for task in waiting:
            if task.id not in started and is_late(task):
                self._state.why[task.id] = f"{self._state.why.get(task.id, '')}; it is late: its deadline has passed"
        decided = {*started, *decision.refuse}
        still = {name: group for name, group in groups.items() if name not in decided}
        graph = self._next_graph(still, [task for task in ready if task.id not in decided], decision)
        for name, worker in self._pool.workers.items() if graph else ():
            if name != PLANNER and worker.group and worker.fetched != graph:  # it is fetched while another group trains
                worker.fetched = graph
                worker.send("prefetch", graph=graph)

    def _limit_to_suspect(
        self, groups: dict[str, Preempted], ready: list[QueueTask]
    ) -> tuple[dict[str, Preempted], list[QueueTask], str]:
        """What may start now if a server died while some of it ran, and the first suspect ("" for none).

        Suspects start one by one, in their turn, and nothing starts together with a suspect until it has saved a
        checkpoint or has run for a while.
        """
        suspects = [name for name, group in groups.items() if any(map(is_suspect, group.present))]
        suspects += [task.id for task in ready if is_suspect(task)]
        tried = any(active.alone_until > time.monotonic() for active in self._state.active.values())
        if not suspects and not tried:
            return groups, ready, ""
        for task in (*ready, *(task for group in groups.values() for task in group.present)):
            self._state.why[task.id] = WAITS_ALONE if is_suspect(task) else WAITS_FOR_SUSPECT
        names = set() if tried else {*groups, *(task.id for task in ready)}.difference(suspects[1:])
        allowed = {name: group for name, group in groups.items() if name in names}
        return allowed, [task for task in ready if task.id in names], suspects[0] if suspects else ""

    def _planned(self) -> list[QueueTask]:
        """The tasks that wait, in order of submission; only those that were changed are read from the queue again."""
        stamps = self._state.db.stamps("planned", MOST_PLANNED)
        seen = {name: task.updated for name, task in self._known.items()}
        changed = [name for name, stamp in stamps.items() if seen.get(name) != stamp]
        if len(changed) > len(stamps) // 2:
            self._known = {task.id: task for task in self._state.db.in_turn("planned", MOST_PLANNED)}
        else:
            same = {name: self._known[name] for name in stamps if name in self._known}
            self._known = same | {name: self._state.db.get(name) for name in changed}
        return sorted((self._known[name] for name in stamps if name in self._known), key=lambda task: task.position)

    def _next_graph(
        self, groups: Mapping[str, Preempted], waiting: Sequence[QueueTask], decision: QueueDecision
    ) -> str:
        """The graph that the group which is likely next needs: one that was preempted, or the first task's; or ""."""
        members = {task.id: task for task in waiting} | {name: group.present[0] for name, group in groups.items()}
        name = next((name for name in chain(decision.wait, groups, members) if name in members), None)
        return "" if name is None else members[name].spec.get("graph_path") or ""

    def _decide(self, groups: Mapping[str, Preempted], tasks: Sequence[QueueTask]) -> QueueDecision:
        raised = self._state.raised

        def urgent(seen: Any, members: Iterable[str]) -> Any:
            """What a policy sees, as urgent as what waits for one of its ``members``."""
            return replace(seen, priority=max([seen.priority, *(raised[name] for name in members if name in raised)]))

        running = [urgent(active.state(), active.members) for active in self._state.active.values()]
        device = next(iter(self._pool.room))
        setup, share = self._state.setup_of(device), self._pool.share_of(device)
        queued = [urgent(group.as_task(setup, share), group.names) for group in groups.values()]
        queued += [urgent(queued_task(task, setup, share), [task.id]) for task in tasks]
        decision = decide(self.policy, queued, running, self._machine())
        self._state.again = math.inf if decision.again is None else decision.again
        return decision

    def _machine(self) -> MachineState:
        devices = []
        for name, room in self._pool.room.items():
            workers = sum(w.device == name and w.name != PLANNER for w in self._pool.workers.values())
            workers, options = max(workers, 1), self._state.options
            reserved = options.reserved_of(room, self._pool.beside[name])
            inferring = min(options.inference_workers, workers - 1)
            started = self._state.started_on.get(name, 0)
            devices.append(DeviceState(name, room, reserved, workers, inferring, started))
        return MachineState(tuple(devices), time.time(), self._state.shares.with_running(self._being_had()))

    def _being_had(self) -> dict[str, float]:
        """Device-seconds by user of the groups that run."""
        seconds: dict[str, float] = {}
        for active in self._state.active.values():
            for user in active.users.values():
                seconds[user] = seconds.get(user, 0.0) + active.will_have
        return seconds

    def _held_back(self, task: QueueTask, runs: bool, states: Mapping[str, str]) -> bool:
        """True if a task cannot start yet for a reason that no policy sees.

        ``runs``: a worker still has it. ``states``: of what it waits for.
        """
        if runs:
            self._state.why[task.id] = "its last run is still ending"
            return True
        until = self._state.not_before.get(task.id, 0.0)
        if until > time.monotonic():
            self._state.why[task.id] = f"waits {until - time.monotonic():.0f} s before it is tried again: {task.error}"
            return True
        most, had = self._state.options.user_time_limit, self._user_seconds.get(task.user, 0.0)
        if most is not None and had > most:
            self._state.why[task.id] = f"tasks of its user ran for {had:.0f} s in 24 hours, and may run for {most:g} s"
            return True
        open_names = [name for name in task.after if states.get(name) != "done"]
        if open_names:
            self._state.why[task.id] = waits_for(open_names)
        return bool(open_names)


# ---- The supervisor

UNUSABLE = (AttributeError, ArithmeticError, LookupError, TypeError, ValueError)
TICK_SECONDS, POLL_SECONDS, VIEW_SECONDS, FULL_DISK_SECONDS = 0.1, 2.0, 0.5, 0.5
CLEAN_SECONDS = 600.0  # between two deletions of old tasks
COMPLAIN_SECONDS = 60.0  # between two lines about the same trouble
PROGRESS_SECONDS = 1.0  # between two progress events of a group in the queue
PASS_SECONDS = 0.1  # between two passes while every worker is busy: submissions need the file, too
BUSY_SECONDS = 1.0  # between two decisions while every worker is busy


class Supervisor(threading.Thread):
    """The thread that runs the queue of ``options.db``: :meth:`start`, :meth:`wake` after a change, :meth:`stop`.

    It works as long as the queue is ``owner``'s; None: it shares the queue with nobody.
    """

    def __init__(self, options: ServeOptions, owner: Owner | None = None) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.state = SupervisorState(options, owner)
        self.pool = WorkerPool(self.state)
        # What the dashboard and the metrics read, published as one new object each time.
        self.view: dict[str, Any] = {"workers": [], "running": [], "devices": [], "samples": [], "why": {}}
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self.error = ""
        self._planner = TaskPlanner(self.state, self.pool)
        self._groups = Groups(self.state, self.pool)
        self._scheduler = Scheduler(self.state, self.pool, self._groups)
        self._endings = GroupEndings(self.state, self.pool)
        self._looked, self._viewed, self._beat, self._cleaned, self._decided = 0.0, 0.0, 0.0, 0.0, 0.0
        self._drained_by, self._complaint, self._distrust = 0.0, ("", 0.0), ""

    # ---- for the server --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the queue now: something was submitted, cancelled, paused or resumed."""
        self.pool.inbox.put((None, {"say": "wake"}))

    def resident(self, task: str) -> ActiveGroup | None:
        """The group that answers with the model of ``task``, one that was trained or is resident; in any thread."""
        groups = list(self.state.active.values())
        return next((active for active in groups if task in active.answers_for and not active.leaving), None)

    def stop(self, seconds: float = 60.0) -> None:
        """Drain: start nothing more, let running groups save a checkpoint and return, then end the workers."""
        self._drained_by, self.state.draining = time.monotonic() + seconds, True
        self.wake()
        self.join(seconds + 15.0)

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until it is stopped, or cannot go on: ``error`` says why."""
        try:
            with self._opened() as self.state.db:
                self.state.options.runs.mkdir(parents=True, exist_ok=True)
                self.state.shares = UserShares(self.state.db.shares())
                self._recover()
                self._planner.take_over()
                if trouble := self.pool.start_all():
                    self._complain(trouble)
                while not self._finished():
                    self._work()
                with suppress(*TRANSIENT_ERRORS):  # the next server would take them for what this one died of
                    self._recover(died=False)
                self._planner.note(ends=True)
        except LostQueueError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            self.pool.stop_all()

    def _opened(self) -> QueueDB:
        """The queue; if it cannot be opened now, as for want of files to open, in a while."""
        while True:
            try:
                return QueueDB(self.state.options.db, owner=self.state.owner)
            except TRANSIENT_ERRORS as error:
                if self.state.draining:
                    raise
                self._complain(str(error))
                time.sleep(FULL_DISK_SECONDS)

    def _work(self) -> None:
        """One round. Trouble that may pass, as a full disk, is waited for: what could not be written is, later."""
        try:
            self._take_messages()
            now = time.monotonic()
            if trouble := self.pool.start_missing(now):
                self._complain(trouble)
            self.pool.end_silent(now)
            self.pool.watch_users_code()
            bound_log(self.state.options.runs / "workers.log", anew=True)
            for active in self.state.active.values():
                bound_log(self.state.options.runs / active.group.folder / LOG)
            self._planner.end_stuck(now)
            self._endings.write_left()  # first: their leases are no longer renewed, and may have run out
            if self._groups.end_overdue() or now - self._beat > self.state.options.lease_seconds / 3:
                self._beat = now
                self._groups.heartbeat()
            if now - self._looked > POLL_SECONDS or self.state.again <= time.time():
                self.state.dirty, self.state.again = True, math.inf
            if (
                self.state.dirty
                and not self.state.draining
                and (self.pool.any_idle() or now - self._looked > PASS_SECONDS)
            ):
                self.state.dirty, self._looked = False, now
                self._planner.plan_queued()
                if self.pool.any_idle() or self.state.urgent or now - self._decided > BUSY_SECONDS:
                    self._decided, self.state.urgent = now, False
                    self._scheduler.schedule()
            elif self.state.draining:
                for active in (active for active in self.state.active.values() if not active.leaving):
                    self._groups.preempt(active)
            self.state.write_records()
            if now - self._cleaned > CLEAN_SECONDS:
                self._cleaned = now
                keep, today, former = self.state.options.keep_seconds, time.time(), self._distrust
                self._distrust = clock_trouble(self.state.db, keep, today)
                if self._distrust and not former:
                    print(f"weft: {self._distrust}", file=sys.stderr, flush=True)
                elif keep is not None and not self._distrust:
                    clean_up(self.state.db, today - keep, self.state.options.runs)
            if now - self._viewed > VIEW_SECONDS:
                self._viewed = now
                self.view = self._show()
        except (NoWorkersError, LostQueueError):
            raise
        except TRANSIENT_ERRORS as error:
            self._complain(str(error) or type(error).__name__)
            self.state.dirty = True
            time.sleep(FULL_DISK_SECONDS)

    def _show(self) -> dict[str, Any]:
        """The state as it is now, with one more sample of the memory of each device."""
        now = time.time()
        held, kept, estimated = Counter[str](), Counter[str](), Counter[str]()
        busy: dict[str, float] = {}
        for worker in self.pool.workers.values():
            if worker.name != PLANNER:
                (held if worker.group else kept)[worker.device] += worker.bytes
                shares = (busy.get(worker.device, 0.0), worker.busy or 0.0)  # of a GPU every worker sees all
                busy[worker.device] = max(shares) if worker.device.startswith("cuda") else min(sum(shares), 1.0)
        for active in self.state.active.values():
            for device in active.running.places:
                estimated[device] += active.group.bytes
        devices = []
        for device, room in self.pool.room.items():
            memory = {"bytes": held[device], "kept": kept[device], "estimate": estimated[device]}
            self._samples.append({"time": now, "device": device, **memory, "busy": busy.get(device, 0.0)})
            devices.append({"name": device, "budget": room, **memory})
        return {
            "time": now,
            "draining": self.state.draining,
            "devices": devices,
            "workers": [
                {"name": w.name, "device": w.device, "pid": w.pid, "ready": w.ready, "group": w.group, "bytes": w.bytes}
                for w in self.pool.workers.values()
            ],
            "running": [
                {
                    **asdict(active.group),
                    "epoch": active.epoch,
                    "held": active.worker.bytes,
                    "devices": active.running.places,
                    "best": dict(active.best),
                }
                for active in self.state.active.values()
            ],
            "samples": list(self._samples),
            "why": dict(self.state.why),
            "counters": dict(self.state.counters),
        }

    def _complain(self, reason: str) -> None:
        """Say why a round failed; the same again only after a while."""
        now = time.monotonic()
        if reason != self._complaint[0] or now - self._complaint[1] > COMPLAIN_SECONDS:
            self._complaint = (reason, now)
            print(f"weft: {reason}; trying again", file=sys.stderr, flush=True)

    def _recover(self, died: bool = True) -> None:
        """Queue again what a server ran that died, or what this one did not end; fused groups go on as they were.

        The members of a group whose server died twice before it had saved anything go on alone.
        """
        ran = self.state.db.in_turn("running", 1_000_000)
        # Lanes of what a former server ran were served until its last heartbeat; they have waited since.
        lease = self.state.options.lease_seconds
        last = {task.id: max((task.lease_until or 0.0) - lease, task.updated) for task in ran}
        for task in sorted(ran, key=lambda task: last[task.id]):
            self.state.shares.started(queued_task(task), min(last[task.id], time.time()))
        shares = [self.state.shares.of(user) for user in dict.fromkeys(task.user for task in ran)]
        apart = take_over(self.state.db, ran, died)
        for group in self.state.db.groups("running", limit=1_000_000):
            fused, whole = len(group.members) > 1, apart.isdisjoint(group.members)
            if fused and not whole:
                split(self.state.db, group, group.members)
            self.state.db.end_group(group.id, "preempted" if fused and whole else "dissolved", RESTARTED, shares)
        self.state.resumable = {group.id: group for group in self.state.db.groups("preempted", limit=1_000_000)}

    def _finished(self) -> bool:
        if not self.state.draining:
            return False
        if time.monotonic() > self._drained_by:
            for active in self.state.active.values():
                active.worker.kill("the server ended before a checkpoint was saved")
            return True
        return not self.state.active

    def _take_messages(self) -> None:
        try:
            waiting = [self.pool.inbox.get(timeout=min(TICK_SECONDS, max(self.state.again - time.time(), 0.001)))]
        except queue.Empty:
            return
        while not self.pool.inbox.empty():
            waiting.append(self.pool.inbox.get_nowait())
        failed: Exception | None = None
        for worker, message in waiting:  # what cannot be written of one must not lose the others
            try:
                self._take(worker, message)
            except (NoWorkersError, LostQueueError):
                raise
            except TRANSIENT_ERRORS as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _take(self, worker: WorkerProcess | None, message: Mapping[str, Any]) -> None:
        if worker is None:
            self.state.dirty, self._beat = True, 0.0
            return
        worker.last_heard = time.monotonic()
        handler = {
            "ready": self.pool.ready,
            "alive": self.pool.alive,
            **({"loading": self._planner.loading, "planned": self._planner.planned} if worker.name == PLANNER else {}),
            "event": self._event,
            "done": self._done,
            "gone": self._gone,
        }.get(message["say"])
        active = self.state.active.get(worker.group)
        try:
            if handler is not None:
                handler(worker, message)
        except UNUSABLE as error:  # what a model has written to the pipe of its worker
            if handler == self._gone:
                raise
            if active is not None:  # it did not end by this
                self.state.active[active.group.id], worker.group = active, active.group.id
            worker.end_reason, worker.renewed = "", False
            worker.kill(f"sent a message that cannot be used ({type(error).__name__}: {str(error)[:80]})")

    def _event(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        active = self.state.active.get(message["group"])
        if active is None or active.worker is not worker:
            return
        event, now = message["event"], time.monotonic()
        active.heard = now
        if event["event"] == "progress":
            active.epoch = int(event.get("epoch") or active.epoch)
            for row in event.get("members") or [event]:
                scores = [value for key, value in row.items() if key.startswith("best_val_")]
                if scores and row["task"] in active.attempts:
                    active.best[row["task"]] = scores[0]
            last = active.epoch >= int(event.get("epochs") or 0) > 0 or event.get("done") == event.get("total", 0)
            if now - active.progress_at < PROGRESS_SECONDS and not last:
                return
            active.progress_at = now
        elif event["event"] == "ready":
            self.state.counters["graphs_ready"] += bool(event.get("graph"))
        elif event["event"] == "checkpoint":
            active.alone_until = 0.0
        elif event["event"] == "scores":
            update_scores(self.state, active, event["members"])
        elif event["event"] == "resident":
            (name,) = active.members
            get, active.answers_for = self.state.db.get, frozenset({name})
            of, graph = get(name).spec["infer"].get("of"), get(name).spec["task"].get("graph")
            if of is not None and get(of).spec["task"].get("graph") == graph:  # the task whose weights it has
                active.answers_for |= {of}
        self.state.records += records_of(event, active.members, active.group.id)

    def _done(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A group has ended; estimates to come learn from it, unless others slowed it down."""
        if message["group"] != worker.group:
            return
        active = self.state.active.get(worker.group)
        if active is not None and not active.shared and message.get("epochs"):
            self._planner.learn(active.group.device, message["epochs"])
        self._endings.done(worker, message)
        if active is not None:
            drop_checkpoints(self.state.db, self.state.options.runs, active.group)

    def _gone(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A worker has ended: start another unless it has one already, and queue again what it had."""
        self.state.counters["workers_lost"] += not worker.renewed
        self.state.dirty, reason = True, why_gone(worker, message.get("code"))
        try:
            if worker.name == PLANNER:
                self._planner.planner_gone(worker, reason)
            self._endings.worker_gone(worker, reason)
        finally:  # also where that cannot be written now
            self.pool.replace(worker)
