"""How groups end: done, failed, out of memory, or with the worker that ran them."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.core.errors import InputError
from weft.core.event import finite
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.planner.report.plan_report import group_plan
from weft.sched.admission import SAFETY_THRESHOLD, needed_bytes
from weft.sched.device_plan import GroupDraft, slowdown_limit
from weft.sched.interference import Interference, mean_turn
from weft.sched.queue_state import GroupStart, QueuedTask
from weft.sched.task_queue import PATIENCE
from weft.serve.options import LEFTOVER_BYTES
from weft.serve.queue_db import Group, QueueDB
from weft.serve.queue_file import ENDED, LostClaimError, QueueError, QueueTask
from weft.serve.state import (
    ALONE_SECONDS,
    TROUBLE,
    Active,
    SupervisorState,
    estimate_key,
    is_inference,
    is_suspect,
    own_names,
    queued_task,
    runs_users_code,
    unchanged,
    unless_lost,
    without_twins,
    worker_settings,
)
from weft.serve.worker_pool import PLANNER, WorkerPool
from weft.serve.worker_process import WorkerProcess

# ---- Faults that break a GPU for a process: who is to be tried again, and which workers are replaced.
#
# A kernel that fails (an index out of range, an illegal address) ends every further call of its process. Under
# NVIDIA's
# MPS it does so for all processes on the GPU, and nobody is told whose kernel it was. So whatever ran is tried once
# more
# with the device to itself; what fails there has failed.

SUSPECT = "suspect"  # in the plan of a task that ran when a fault broke its device


def broke_device(message: Mapping[str, Any]) -> bool:
    """Whether a worker says of its group that the device no longer answers."""
    return message.get("leftover", 0) is None


class DeviceFaults:
    """Queues tasks again that shared a GPU with a kernel that failed."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool

    def replace_idle(self, worker: WorkerProcess) -> None:
        """Replace the waiting workers of a device that broke for all of them; those that run say so themselves."""
        if self._pool.shares_faults:
            for one in self._pool.idle_workers(worker.device):
                one.kill("is replaced, since its device no longer answers")

    def try_apart(self, active: Active, message: Mapping[str, Any]) -> bool:
        """Queue the members again, to run without others; False where only they can have broken the device."""
        if not self._pool.shares_faults:
            return False
        found = [message.get("error"), *(one.get("message") for one in message.get("members", {}).values())]
        text = next((str(one).strip() for one in found if one), "its device no longer answers")
        told = text.splitlines()[0]
        for name in active.members:
            unless_lost(self._try_one_apart, active, name, told)
        self._state.end_group(active, "dissolved" if active.fused else "ended", told)
        return True

    def _try_one_apart(self, active: Active, name: str, told: str) -> None:
        plan = dict(self._state.db.get(name).plan or {})
        first = not plan.get(SUSPECT)
        whole = int(self._pool.task_bytes(active.group.device) / SAFETY_THRESHOLD)
        plan |= {SUSPECT: True, "alone": True, "bytes": max(int(plan.get("bytes", 0)), whole)}
        if active.fused:
            plan["from"] = active.group.folder
        reason = f"{told}; it is tried once more with the device to itself" if first else told
        self._state.fail(active, name, reason, first, plan)
        self._state.counters.tasks_requeued += first


GROWTH, DISK_WAIT = 1.5, 20.0


class GroupEndings:
    """Writes down how the members of a group ended, and queues those again that are to be tried once more.

    What cannot be written now, as on a full disk, is kept, and written when there is room.
    """

    def __init__(self, state: SupervisorState, faults: DeviceFaults) -> None:
        self._state, self._faults = state, faults
        self._unwritten: list[Callable[[], None]] = []

    def write_left(self) -> None:
        """Write down what could not be written before; it stays if it still cannot."""
        while self._unwritten:
            unless_lost(self._unwritten[0])
            del self._unwritten[0]

    def _write(self, ending: Callable[[], None]) -> None:
        try:
            self._state.write_records()
            unless_lost(ending)
        except TROUBLE:
            self._unwritten.append(ending)
            raise

    def done(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A group's run has returned, or failed as a whole."""
        active = self._state.active.pop(message["group"], None)
        worker.group, self._state.dirty = "", True
        if active is None:
            return
        self._charge(active)
        if unfit := _unfit(worker, message):
            worker.kill(unfit)
        elif active.users_code:
            worker.renew()
        elif message.get("kind") == "unexpected":
            worker.kill("is replaced after an error that is no fault of its task")
        if broke_device(message):
            self._faults.replace_idle(worker)
        if "error" not in message:
            active.took = message.get("took")
            outcomes = message["members"]
            one = next(iter(outcomes.values())) if len(outcomes) == 1 else {}
            if one.get("status") == "finished" and active.kind == "training":
                trained = float(one["metrics"].get("epochs_run", 0)) * float(
                    one["metrics"].get("seconds_per_epoch", 0.0)
                )
                self._state.learn_setup(active.group.device, max(active.seconds - trained, 0.0))
        self._write(partial(self._ended, active, message))

    def _ended(self, active: Active, message: Mapping[str, Any]) -> None:
        if broke_device(message) and self._faults.try_apart(active, message):
            return
        if "error" in message:
            self._group_failed(active, str(message["kind"]), str(message["error"]), message.get("members", {}))
        else:
            # The run has returned: write down how every member ended.
            outcomes = message["members"]
            left = False
            for name in active.members:
                left |= self._member_done(
                    active, name, outcomes.get(name, {"status": "failed", "message": "no result"})
                )
            state = "preempted" if left and active.fused else "dissolved" if left else "ended"
            self._state.end_group(active, state)
            if state == "preempted":
                preempted = self._state.db.groups("preempted", limit=1_000_000)
                self._state.resumable |= {one.id: one for one in preempted if one.id == active.group.id}

    def _member_done(self, active: Active, name: str, outcome: Mapping[str, Any]) -> bool:
        """Write down how a member ended; whether it was preempted, and so is to go on."""
        status, told = outcome["status"], str(outcome.get("message") or "")
        worker, attempt = self._state.claimant(active.worker), active.attempts[name]
        try:
            if status in ("finished", "stopped", "pruned"):
                result = _result(active, outcome)
                if active.kind == "inference":
                    # Seconds from submission to answer, and whether that is within the target, if there is one.
                    task = self._state.db.get(name)
                    took, target = max(time.time() - task.created, 0.0), task.spec["infer"].get("latency_target")
                    latency = {"latency_seconds": took, "late": target is not None and took > target}
                    result |= latency
                self._state.db.finish(name, worker, attempt, finite(result))
            elif status == "preempted":
                held = self._state.db.get(name)
                if (held.state, held.worker, held.attempts) == ("running", worker, attempt):
                    self._state.db.release(name, "preempted")
                return True
            elif status == "cancelled":
                held = self._state.db.get(name)
                if held.state == "running" and held.worker == worker:
                    self._state.db.cancel(name)
            elif status == "failed" and "memory" in told and ("not enough" in told or "ran out of" in told):
                self._out_of_memory(active, name, told, None)
            else:
                self._fail(active, name, told or status, outcome)
        except (LostClaimError, QueueError):
            return False  # cancelled or paused meanwhile
        return False

    def _fail(self, active: Active, name: str, told: str, outcome: Mapping[str, Any]) -> None:
        """Write that a member failed, and of one that diverged where its best weights from before are."""
        worker, attempt = self._state.claimant(active.worker), active.attempts[name]
        kept = outcome.get("status") == "diverged" and int(outcome["metrics"].get("best_epoch") or 0) > 0
        result = finite(_result(active, outcome)) if kept else None
        self._state.db.fail(name, worker, attempt, told, result=result)

    def _group_failed(self, active: Active, kind: str, error: str, outcomes: Mapping[str, Any]) -> None:
        """The run as a whole failed: members of a group are tried once more alone, a task alone has failed.

        An error that Weft did not foresee, in a task that runs Weft's code alone, is no fault of the task: it is tried
        again, in a fresh process.
        """
        fused = active.fused
        if kind == "preempted":
            for name in active.members:
                unless_lost(self._lost, active, name, error)
        for name in active.members if kind != "preempted" else ():
            if kind == "memory":
                unless_lost(self._out_of_memory, active, name, error, None)
            elif is_full_disk(error):
                unless_lost(self._wait_for_room, active, name, error)
            elif fused or (kind == "unexpected" and not active.users_code):
                unless_lost(self._lost, active, name, error)
            else:
                unless_lost(self._fail, active, name, error, outcomes.get(name, {}))
        self._state.end_group(active, "dissolved" if fused else "ended", error)

    def _wait_for_room(self, active: Active, name: str, error: str) -> None:
        """Queue a task again that found no room on the disk: no fault of its own, so it costs no attempt."""
        self._state.not_before[name] = time.monotonic() + DISK_WAIT
        task = self._state.db.get(name)
        if active.fused:
            self._state.db.replan(name, {**(task.plan or {}), "alone": True, "from": active.group.folder})
        if (task.state, task.worker, task.attempts) == (
            "running",
            self._state.claimant(active.worker),
            active.attempts[name],
        ):
            self._state.db.release(name, error)
            self._state.counters.tasks_requeued += 1

    def _lost(self, active: Active, name: str, reason: str) -> None:
        """Queue a task again whose worker was lost; one of a group goes on alone, from the group's checkpoint."""
        task = self._state.db.get(name)
        plan = dict(task.plan or {})
        plan["failures"] = int(plan.get("failures", 0)) + 1
        if active.fused:
            plan |= {"alone": True, "from": active.group.folder}
        self._state.fail(active, name, reason, True, plan)
        self._state.counters.tasks_requeued += 1

    def _out_of_memory(self, active: Active, name: str, reason: str, measured: int | None) -> None:
        """Correct the estimate and queue the task once more, alone; the second time it has failed."""
        task = self._state.db.get(name)
        plan = dict(task.plan or {})
        first = not plan.get("memory_errors")
        wanted = max(int(plan.get("bytes", 0) * GROWTH), measured or 0)
        plan |= {"memory_errors": int(plan.get("memory_errors", 0)) + 1, "alone": True, "bytes": wanted}
        if active.fused:
            plan["from"] = active.group.folder
        told = f"{reason}; the estimate is now {show_bytes(wanted)}" if first else reason
        self._state.fail(active, name, told, first, plan)
        self._state.counters.memory_errors += 1

    def _charge(self, active: Active) -> None:
        for user in active.users.values():
            self._state.shares.charge(user, active.had)

    @staticmethod
    def why_gone(worker: WorkerProcess, code: Any) -> str:
        """Why a worker has ended."""
        return worker.end_reason or f"its worker ended ({_code_words(code)})"

    def worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        """Queue again what a worker had that has ended."""
        active = self._state.active.pop(worker.group, None)
        if active is not None:
            self._charge(active)
            self._write(partial(self._dissolved, active, reason, worker.bytes))

    def _dissolved(self, active: Active, reason: str, held: int) -> None:
        for name in active.members:
            if reason.startswith("out of memory"):
                unless_lost(self._out_of_memory, active, name, reason, held)
            else:
                unless_lost(self._lost, active, name, reason)
        self._state.end_group(active, "dissolved", reason)


def _result(active: Active, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What the queue keeps of how a member ended, and the folder of its files."""
    place = "/".join(filter(None, (active.group.folder, outcome["folder"])))
    found = {"status": outcome["status"], "metrics": outcome["metrics"], "folder": place, "group": active.group.id}
    return {**found, "peak_bytes": outcome.get("peak_bytes"), "took": active.took}


def is_full_disk(error: str) -> bool:
    """Whether a run failed because nothing more could be written."""
    return any(words in error.lower() for words in ("no space left on device", "disk quota exceeded"))


def _unfit(worker: WorkerProcess, message: Mapping[str, Any]) -> str:
    """Why a worker is replaced after a group, if it is: what a model leaked or broke stays with the process."""
    if broke_device(message):
        return "is replaced, since its device no longer answers"
    leftover = message.get("leftover", 0)
    if leftover > LEFTOVER_BYTES:
        return f"is replaced, since a model left {show_bytes(leftover)} behind"
    if message.get("kind") == "memory" and not worker.device.startswith("cuda"):  # whose memory it is cannot be told
        return "is replaced after it ran out of memory"
    return ""


def _code_words(code: Any) -> str:
    if isinstance(code, int) and code < 0:
        return f"signal {-code}, {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit code {code}"


# ---- Groups on their way to a worker: their tasks are claimed, and the group is sent.

WEIGHTS = "model.safetensors"


class GroupStarts:
    """Starts groups on idle workers."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool

    def start(self, start: GroupStart, tasks: Sequence[QueueTask]) -> None:
        """Start a group that a policy has chosen."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            for task in tasks:
                self._state.why[task.id] = "waits for a free worker"
            return
        chosen = without_twins(tasks)
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
        self.launch(group, worker, chosen, start.utilisation)

    def launch(
        self,
        group: Group,
        worker: WorkerProcess,
        tasks: Sequence[QueueTask],
        utilisation: float,
        cancelled: Sequence[QueueTask] = (),
    ) -> bool:
        """Claim ``tasks`` and send the group to ``worker``; ``cancelled`` members have left it and are not claimed.

        False, and nothing was started, if a task has changed since the decision.
        """
        claimant, lease = self._state.claimant(worker), self._state.options.lease_seconds
        if self._replanned(tasks):
            return False
        shares, now = self._state.shares, time.time()
        for task in tasks:
            shares.started(queued_task(task), now)
        had = [shares.of(user) for user in dict.fromkeys(task.user for task in tasks)]
        try:
            claimed = self._state.db.claim_all([task.id for task in tasks], claimant, lease, group, had)
        except QueueError:  # cancelled or paused since the decision
            self._state.dirty = True
            return False
        everyone = {task.id: task for task in (*claimed, *cancelled)}
        infers = is_inference(claimed[0])
        active = Active(
            group=group,
            worker=worker,
            attempts={task.id: task.attempts for task in claimed},
            users={task.id: task.user for task in claimed},
            utilisation=utilisation,
            graph=str((claimed[0].plan or {}).get("graph", "")),
            heard=time.monotonic(),
            priority=max(task.priority for task in claimed),
            kind=claimed[0].spec.get("kind", "training"),
            alone_until=time.monotonic() + ALONE_SECONDS if any(map(is_suspect, claimed)) else 0.0,
            users_code=any(map(runs_users_code, everyone.values())),
            start_seconds=0.0 if infers else self._state.setup_of(group.device),
            slowdown_limit=slowdown_limit(queued_task(claimed[0]), time.time()),
            turn_seconds=mean_turn(queued_task(task).turn_seconds for task in claimed),
        )
        self._state.begin(active)
        worker.group = group.id
        self._state.started_on[group.device] = self._state.started_on.get(group.device, 0) + len(claimed)
        self._state.counters.groups_started += 1
        self._state.counters.tasks_started += len(claimed)
        runs, members = self._state.options.runs, [everyone[name] for name in group.members]
        if infers:
            self._infer(group, worker, members[0])
            return True
        split = [
            {"from": str(runs / origin), "member": task.id, "into": str(runs / task.id)}
            for task in members
            if (origin := (task.plan or {}).get("from")) is not None
        ]
        limits = [task.spec["budget"] for task in claimed if task.spec.get("budget") is not None]
        budget = (
            min([max(group.bytes, needed_bytes(int((claimed[0].plan or {}).get("bytes", 0)))), *limits])
            if len(claimed) == 1
            else group.bytes
        )
        plan = None if cancelled or split else self._plan_of(members, group.bytes)
        worker.send(
            "run",
            group=group.id,
            plan=plan,
            limit=budget + self._state.options.overrun_bytes,
            tasks=[worker_settings(task) for task in members],
            names=own_names(members),
            out=str(runs / group.folder),
            budget=budget,
            checkpoint_every=self._state.options.checkpoint_seconds,
            split=split,
            cancel=[task.id for task in cancelled],
        )
        return True

    def _replanned(self, tasks: Sequence[QueueTask]) -> bool:
        """Whether tasks were queued again because a graph or a model was written anew since they were planned."""
        stale = [task for task in tasks if not task.attempts and not unchanged((task.plan or {}).get("files"))]
        for task in stale:
            unless_lost(self._state.db.unplan, task.id)
        self._state.dirty |= bool(stale)
        return bool(stale)

    def _infer(self, group: Group, worker: WorkerProcess, task: QueueTask) -> None:
        """Send an inference task, with the file of the weights that it is about."""
        options, infer = self._state.options, task.spec["infer"]
        budget = min(group.bytes, task.spec.get("budget") or group.bytes)
        worker.send(
            "infer",
            group=group.id,
            task=worker_settings(task),
            names=own_names([task]),
            weights=weights_file(self._state, task),
            nodes=infer.get("nodes"),
            out=str(options.runs / group.folder),
            budget=budget,
            limit=budget + options.overrun_bytes,
        )

    def _plan_of(self, members: Sequence[QueueTask], total_bytes: int) -> dict[str, Any] | None:
        """The group's plan as plain data; None if the worker has to make it: after a restart, or of a user's model."""
        known = self._state.runnable.get(estimate_key(members[0].spec))
        if known is None:
            return None
        try:
            tasks = [Task.from_dict(worker_settings(member)) for member in members]
            stats, alone = GraphStats.from_dict(known["stats"]), Plan.from_dict(known["plan"])
            return group_plan(tasks, stats, alone, total_bytes, Machine.from_dict(known["machine"])).to_dict()
        except InputError:
            return None  # the worker says what is wrong


def weights_file(state: SupervisorState, task: QueueTask) -> str:
    """The file of the weights that an inference task is about."""
    infer = task.spec["infer"]
    if infer.get("of") is None:
        return str(infer["weights"])
    trained = state.db.get(infer["of"]).result or {}
    return str(state.options.runs / str(trained.get("folder", infer["of"])) / WEIGHTS)


# ---- Members and groups that are to leave before they end: cancelled, paused, or preempted while the server drains.


class Leaving:
    """Tells workers which members are to leave, and takes groups apart that cannot go on as they were."""

    def __init__(self, state: SupervisorState) -> None:
        self._state = state

    def heartbeat(self) -> None:
        """Renew the leases; members that were cancelled or paused in the queue are to leave their groups.

        Leases of groups that run are renewed before others are looked at: a clock that was set forward, or a machine
        that slept, ends none of them.
        """
        for active in self._state.active.values():
            held = set(self._state.db.heartbeat(self._state.claimant(active.worker), self._state.options.lease_seconds))
            lost = [name for name in active.members if name not in held]
            if lost:
                self._dismiss(active, lost)
        self._state.db.requeue_expired()

    def _dismiss(self, active: Active, lost: Sequence[str]) -> None:
        states = {task.id: task.state for task in known_tasks(self._state.db, lost)}
        paused = [name for name in lost if states.get(name) in ("paused", "queued", "planned")]
        if paused and not active.leaving:
            self.preempt(active)
        if active.fused:
            for name in paused:
                if name not in active.split:
                    self.split(active.group, [name])
                    active.split.add(name)
        cancelled = [name for name in lost if name not in paused]
        if cancelled:
            active.worker.send("cancel", group=active.group.id, names=cancelled)
        if len(cancelled) == len(active.members):
            active.unwanted_since = min(active.unwanted_since, time.monotonic())

    def split(self, group: Group, names: Iterable[str]) -> None:
        """Let members of a group go on alone from its checkpoint when they start again."""
        for name in names:
            unless_lost(self._split, name, group.folder)

    def _split(self, name: str, folder: str) -> None:
        plan = self._state.db.get(name).plan or {}
        self._state.db.replan(name, {**plan, "alone": True, "from": folder})

    def take_apart(self, group: Group, names: Sequence[str], why: str) -> None:
        """Dissolve a preempted group: ``names`` go on alone, each from its checkpoint."""
        self.split(group, names)
        self._dissolve(group, names, why)

    def begin_anew(self, group: Group, names: Sequence[str], why: str) -> None:
        """Dissolve a preempted group whose checkpoint cannot be used: ``names`` are planned anew."""
        for name in names:
            unless_lost(self._state.db.unplan, name)
        self._dissolve(group, names, why)

    def _dissolve(self, group: Group, names: Sequence[str], why: str) -> None:
        self._state.db.record([(name, "note", {"message": why, "group": group.id}) for name in names])
        self._state.db.end_group(group.id, "dissolved", why)
        self._state.resumable.pop(group.id, None)
        self._state.dirty = True

    def preempt(self, active: Active) -> None:
        """Let a group save a checkpoint and return."""
        active.leaving = True
        active.worker.send("preempt", group=active.group.id)

    def preempt_all(self) -> None:
        """Let every group save a checkpoint and return."""
        for active in self._state.active.values():
            if not active.leaving:
                self.preempt(active)


def known_tasks(db: QueueDB, names: Iterable[str]) -> list[QueueTask]:
    """The tasks of those names, less those that were deleted long after they had ended."""
    found = []
    for name in names:
        try:
            found.append(db.get(name))
        except QueueError:
            continue
    return found


# ---- Predicted seconds of a task that goes on from a checkpoint: of the epochs that are left, not of all.

WHOLE = "whole_seconds"  # of a plan: what was predicted for all epochs, where some are done


def with_seconds_left(db: QueueDB, task: QueueTask, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """``plan`` of a queued task, its seconds less the share of the epochs that its last checkpoint has.

    A task that has not run, or without a plan because it begins anew, has all of them left. One epoch always counts as
    left: a run that is resumed after its last one still writes its result.
    """
    epochs = int(plan.get("epochs") or 0)
    if not task.attempts or task.plan is None or not epochs:
        return plan
    saved = db.last_events(task.id, ("checkpoint",), 1)
    done = int(saved[0].data.get("epoch") or 0) if saved else 0
    if not done:
        return plan
    whole = float(plan.get(WHOLE, plan["seconds"]))
    return {**plan, WHOLE: whole, "seconds": whole * max(epochs - done, 1) / epochs}


# ---- Fused groups that were preempted: which can go on as they were, and what becomes of those that cannot.
#
# A policy sees such a group as one task with the bytes of the group, so that priority, ageing, fair shares, memory and
# the workers kept for inference hold for it as for any other.

WAITS = "waits to go on with its group"


@dataclass(frozen=True)
class Preempted:
    """A preempted group, and its members as they are now.

    ``present``: those that go on with it; ``paused``: those that leave it if it goes on before they are resumed;
    ``left``: those that have ended, or go on alone. Members that were deleted from the queue are in none of them.
    """

    group: Group
    present: tuple[QueueTask, ...]
    paused: tuple[QueueTask, ...]
    left: tuple[QueueTask, ...]

    @classmethod
    def of(cls, group: Group, tasks: list[QueueTask]) -> Preempted:
        """``group`` with those of its members that the queue still has."""
        left = [task for task in tasks if task.state in ENDED or "from" in (task.plan or {})]
        paused = [task for task in tasks if task.state == "paused" and task not in left]
        present = [task for task in tasks if task not in left and task not in paused]
        return cls(group, tuple(present), tuple(paused), tuple(left))

    @property
    def names(self) -> list[str]:
        """The members that have not left it."""
        return [task.id for task in (*self.present, *self.paused)]

    @property
    def complete(self) -> bool:
        """Whether the settings of every member are known; without them the checkpoint is not that of the group."""
        return len(self.present) + len(self.paused) + len(self.left) == len(self.group.members)

    def as_task(self, setup_seconds: float, share: float) -> QueuedTask:
        """The group as a policy sees it: as urgent as its most urgent member, and older than its oldest.

        A task of s seconds is passed by shorter ones that arrive ``PATIENCE * s`` later, and so would a group that has
        begun be by all the tasks that were queued with it. Ageing counts from its last start, whenever it arrived.
        """
        members = [queued_task(task, setup_seconds, share) for task in self.present]
        draft = GroupDraft(SAFETY_THRESHOLD, Interference())
        for one in members:
            draft.add(one)
        shape = draft.footprint(time.time())
        begun = any((WHOLE in (task.plan or {})) for task in self.present)
        seconds = max(shape.seconds if begun else self.group.seconds, draft.start_seconds)
        first = max(members, key=lambda one: (one.priority, -one.must_end_by))
        return replace(
            first,
            id=self.group.folder,
            bytes=int(self.group.bytes / SAFETY_THRESHOLD),
            shared_bytes=0,
            seconds=seconds,
            utilisation=min(shape.demand, 1.0),
            start_seconds=shape.start_seconds,
            turn_seconds=shape.turn_seconds,
            arrival=min(one.arrival for one in members) - PATIENCE * seconds,
            fusable=False,
        )


class PreemptedGroups:
    """Lets preempted groups go on, and takes those apart that cannot."""

    def __init__(self, state: SupervisorState, pool: WorkerPool, leaving: Leaving, starts: GroupStarts) -> None:
        self._state, self._pool, self._leaving, self._starts = state, pool, leaving, starts
        self._members: set[str] = set()

    def has(self, task: str) -> bool:
        """Whether ``task`` was in such a group when they were last looked at."""
        return task in self._members

    def ready(self) -> dict[str, Preempted]:
        """The groups that a policy may start, by the name that it sees; the others wait or are taken apart."""
        found, self._members = {}, set()
        for group in list(self._state.resumable.values()):
            one = Preempted.of(group, known_tasks(self._state.db, group.members))
            self._members |= set(one.names)
            if self._can_go_on(one):
                found[group.folder] = one
        return found

    def resume(self, one: Preempted, start: GroupStart) -> None:
        """Start a group that a policy has chosen; it stays preempted if its members cannot be claimed."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            self._state.why |= {task.id: "waits for a free worker" for task in one.present}
            return
        group, now = one.group, time.time()
        self._leaving.split(group, [task.id for task in one.paused])  # what the group saves next is without them
        gone = [*known_tasks(self._state.db, [task.id for task in one.paused]), *one.left]
        again = replace(group, state="running", device=start.device, worker=worker.name, ended=None, started=now)
        again = replace(again, seconds=start.seconds)  # of what is left
        if self._starts.launch(again, worker, one.present, start.utilisation, gone):
            del self._state.resumable[group.id]
        else:
            self._state.why |= {task.id: WAITS for task in one.present}

    def take_apart(self, one: Preempted, why: str) -> None:
        """Let the members go on alone, each from the checkpoint of the group."""
        self._leaving.take_apart(one.group, one.names, f"goes on alone, from the checkpoint of its group: {why}")

    def _can_go_on(self, one: Preempted) -> bool:
        """Whether a group can start as it was; if it never can, its members are released."""
        devices = {worker.device for name, worker in self._pool.workers.items() if name != PLANNER}
        here, there = {_kind(name) for name in devices}, _kind(one.group.device)
        if not one.present:
            self._leaving.take_apart(one.group, one.names, "no member of its group is left to run")
        elif any(task.state != "planned" for task in one.present):
            self._state.why |= {task.id: WAITS for task in one.present}
        elif there not in here:
            why = f"begins anew: the checkpoint of its group is of {there}, and this server has {', '.join(here)}"
            self._leaving.begin_anew(one.group, [task.id for task in one.present], why)
        elif not one.complete:
            self.take_apart(one, "another member was deleted")
        elif not (one.group.bytes <= max(map(self._pool.task_bytes, self._pool.room))):
            if devices <= self._pool.room.keys():
                self.take_apart(one, f"together they need {show_bytes(one.group.bytes)}, more than there is for tasks")
            else:
                self._state.why |= {task.id: "waits for the workers of its device to start" for task in one.present}
        else:
            return True
        return False


def _kind(device: str) -> str:
    """``cpu`` or ``cuda``."""
    return device.partition("@")[0].partition(":")[0]
