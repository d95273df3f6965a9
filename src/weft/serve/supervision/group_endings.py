"""How groups end: done, failed, out of memory, or with the worker that ran them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.core.event import finite
from weft.core.units import show_bytes
from weft.serve.options import LEFTOVER_BYTES
from weft.serve.queue.task_states import LostClaimError, QueueError
from weft.serve.supervision.device_faults import DeviceFaults, broke_device
from weft.serve.supervision.supervisor_state import TROUBLE, Active, SupervisorState, unless_lost
from weft.serve.workers.worker_process import WorkerProcess

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
        if broke_device(message):
            self._faults.replace_idle(worker)
        if "error" not in message:
            active.took = message.get("took")
            self._learn(active, message["members"])
        self._write(partial(self._ended, active, message))

    def _ended(self, active: Active, message: Mapping[str, Any]) -> None:
        if broke_device(message) and self._faults.try_apart(active, message):
            return
        if "error" in message:
            self._group_failed(active, str(message["kind"]), str(message["error"]), message.get("members", {}))
        else:
            self._members_done(active, message["members"])

    def _members_done(self, active: Active, outcomes: Mapping[str, Any]) -> None:
        """The run has returned: write down how every member ended."""
        left = False
        for name in active.members:
            left |= self._member_done(active, name, outcomes.get(name, {"status": "failed", "message": "no result"}))
        state = "preempted" if left and active.fused else "dissolved" if left else "ended"
        self._state.end_group(active, state)
        if state == "preempted":
            preempted = self._state.db.groups("preempted", limit=1_000_000)
            self._state.resumable |= {one.id: one for one in preempted if one.id == active.group.id}

    def _learn(self, active: Active, outcomes: Mapping[str, Any]) -> None:
        """Learn what a start costs: the time of a task alone, less its epochs."""
        one = next(iter(outcomes.values())) if len(outcomes) == 1 else {}
        if one.get("status") == "finished" and active.kind == "training":
            trained = float(one["metrics"].get("epochs_run", 0)) * float(one["metrics"].get("seconds_per_epoch", 0.0))
            self._state.learn_setup(active.group.device, max(active.seconds - trained, 0.0))

    def _member_done(self, active: Active, name: str, outcome: Mapping[str, Any]) -> bool:
        """Write down how a member ended; whether it was preempted, and so is to go on."""
        status, told = outcome["status"], str(outcome.get("message") or "")
        worker, attempt = self._state.claimant(active.worker), active.attempts[name]
        try:
            if status in ("finished", "stopped", "pruned"):
                result = _result(active, outcome)
                if active.kind == "inference":
                    result |= self._latency(name)
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

    def _latency(self, name: str) -> dict[str, Any]:
        """Seconds from submission to answer, and whether that is within the target, if there is one."""
        task = self._state.db.get(name)
        took, target = max(time.time() - task.created, 0.0), task.spec["infer"].get("latency_target")
        return {"latency_seconds": took, "late": target is not None and took > target}

    def _group_failed(self, active: Active, kind: str, error: str, outcomes: Mapping[str, Any]) -> None:
        """The run as a whole failed: members of a group are tried once more alone, a task alone has failed."""
        fused = active.fused
        if kind == "preempted":
            for name in active.members:
                unless_lost(self._lost, active, name, error)
        for name in active.members if kind != "preempted" else ():
            if kind == "memory":
                unless_lost(self._out_of_memory, active, name, error, None)
            elif is_full_disk(error):
                unless_lost(self._wait_for_room, active, name, error)
            elif fused:
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
