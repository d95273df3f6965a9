"""The life of a group: it starts, ends, is preempted, continues, or is dissolved."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.core.errors import InputError
from weft.core.event import finite
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.planner.report.plan_report import group_plan
from weft.sched.admission import SAFETY_THRESHOLD, needed_bytes
from weft.sched.device_plan import GroupDraft, slowdown_limit
from weft.sched.interference import Interference, mean_turn
from weft.sched.queue_state import GroupStart, QueuedTask, RunningGroup
from weft.sched.task_queue import PATIENCE
from weft.serve.options import LEFTOVER_BYTES
from weft.serve.queue_db import ENDED, Group, LostClaimError, QueueDB, QueueError, QueueTask
from weft.serve.state import (
    ALONE_SECONDS,
    QUARTER,
    RAN,
    RESIDENT_SECONDS,
    TRANSIENT_ERRORS,
    ActiveGroup,
    SupervisorState,
    contest_of,
    estimate_key,
    is_inference,
    is_resident,
    is_suspect,
    queued_task,
    run_options_of,
    runs_users_code,
    unchanged,
    unless_lost,
    without_twins,
    worker_settings,
)
from weft.serve.worker_pool import PLANNER, SPAWNER_GONE, WorkerPool, WorkerProcess, bound_log

# ---- Ends of groups.

SUSPECT = "suspect"  # in the plan of a task that ran when a fault broke its device
GROWTH, DISK_WAIT = 1.5, 20.0


def broke_device(message: Mapping[str, Any]) -> bool:
    """True if a worker reports that its device no longer answers."""
    return message.get("leftover", 0) is None


class GroupEndings:
    """Records how the members of a group ended, and queues those again that get another attempt.

    What a full disk refuses now is written once there is room.

    A kernel that fails (an index out of range, an illegal address) breaks the device for its process, and under
    NVIDIA's MPS for every process on the GPU, without saying whose kernel it was. So all tasks that ran there are tried
    once more with the device to themselves; a task that fails there has failed.
    """

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool
        self._unwritten: list[Callable[[], None]] = []

    def write_left(self) -> None:
        """Write what could not be written before; what still cannot is tried again later."""
        while self._unwritten:
            unless_lost(self._unwritten[0])
            del self._unwritten[0]

    def _write(self, ending: Callable[[], None]) -> None:
        try:
            self._state.write_records()
            unless_lost(ending)
        except TRANSIENT_ERRORS:
            self._unwritten.append(ending)
            raise

    def done(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A group's run has returned, or failed as a whole."""
        active = self._state.active.pop(message["group"], None)
        worker.group, self._state.dirty = "", True
        if active is None:
            return
        self._charge(active)
        group_ended(self._state, active, message.get("members", {}))
        if unfit := _unfit(worker, message):
            worker.kill(unfit)
        elif active.users_code:
            worker.renew()
        elif message.get("kind") in ("unexpected", "gone"):
            worker.kill("is replaced after an error that is no fault of its task")
        if broke_device(message) and self._pool.shares_faults:  # workers that run a group report it themselves
            for idle in self._pool.idle_workers(worker.device):
                idle.kill("is replaced, since its device no longer answers")
        if "error" not in message:
            active.took = message.get("took")
            outcomes = list(message["members"].values())
            trained_alone = len(outcomes) == len(active.running.places) == 1 and active.running.kind == "training"
            if trained_alone and outcomes[0].get("status") == "finished":
                metrics = outcomes[0]["metrics"]
                trained = float(metrics.get("epochs_run", 0)) * float(metrics.get("seconds_per_epoch", 0.0))
                self._state.learn_setup(active.group.device, max(active.seconds - trained, 0.0))
        self._write(partial(self._ended, active, message))

    def _ended(self, active: ActiveGroup, message: Mapping[str, Any]) -> None:
        """Record how the members ended.

        If the run as a whole failed, each member of a group is tried once more by itself, and a single task has failed.
        An unexpected error in a task that runs only Weft's code is not the task's fault: it is tried again, in a fresh
        process.
        """
        outcomes: Mapping[str, Any] = message.get("members", {})
        if broke_device(message) and self._pool.shares_faults:
            texts = [message.get("error"), *(outcome.get("message") for outcome in outcomes.values())]
            text = next((str(text).strip() for text in texts if text), "its device no longer answers").splitlines()[0]
            for name in active.members:
                unless_lost(self._try_apart, active, name, text)
            self._state.end_group(active, "dissolved" if active.fused else "ended", text)
        elif "error" in message:
            kind, error = str(message["kind"]), str(message["error"])
            for name in active.members:
                if kind == "memory":
                    unless_lost(self._out_of_memory, active, name, error, message.get("held"))
                elif kind not in ("preempted", "gone") and is_full_disk(error):
                    unless_lost(self._wait_for_room, active, name, error)
                elif kind in ("preempted", "gone") or active.fused or (kind == "unexpected" and not active.users_code):
                    unless_lost(self._lost, active, name, error)
                else:
                    unless_lost(self._fail, active, name, error, outcomes.get(name, {}))
            dissolved = active.fused or "held" in message  # of a worker that is gone
            self._state.end_group(active, "dissolved" if dissolved else "ended", error)
        else:
            missing = {"status": "failed", "message": "no result"}
            continues = [self._member_done(active, name, outcomes.get(name, missing)) for name in active.members]
            state = "ended" if not any(continues) else "preempted" if active.fused else "dissolved"
            self._state.end_group(active, state)

    def _try_apart(self, active: ActiveGroup, name: str, error: str) -> None:
        """Queue a task again whose device broke, alone on the device; fail it the second time."""
        plan = dict(self._state.db.get(name).plan or {})
        first = not plan.get(SUSPECT)
        ranks = max(Counter(active.running.places).values())  # of one device
        whole = int(self._pool.task_bytes(active.group.device) / SAFETY_THRESHOLD / ranks)
        plan |= {SUSPECT: True, "alone": True, "bytes": max(int(plan.get("bytes", 0)), whole)}
        reason = f"{error}; it is tried once more with the device to itself" if first else error
        self._state.fail(active, name, reason, first, plan)
        self._state.counters["tasks_requeued"] += first

    def _member_done(self, active: ActiveGroup, name: str, outcome: Mapping[str, Any]) -> bool:
        """Record how a member ended; True if it was preempted and continues later."""
        status, text = outcome["status"], str(outcome.get("message") or "")
        worker, attempt = self._state.claimant(active.worker), active.attempts[name]
        with suppress(LostClaimError, QueueError):  # cancelled or paused meanwhile
            if status in ("finished", "stopped", "pruned"):
                result = _result(active, outcome)
                if active.running.kind == "inference" and not active.answers_for:
                    task = self._state.db.get(name)
                    seconds, target = max(time.time() - task.created, 0.0), task.spec["infer"].get("latency_target")
                    result |= {"latency_seconds": seconds, "late": target is not None and seconds > target}
                self._state.db.finish(name, worker, attempt, finite(result))
            elif status in ("preempted", "cancelled"):
                held = self._state.db.get(name)
                if (held.state, held.worker, held.attempts) == ("running", worker, attempt):
                    if status == "cancelled":
                        self._state.db.cancel(name)
                    else:
                        self._state.db.release(name, "preempted")
                return status == "preempted"
            elif status == "failed" and "memory" in text and ("not enough" in text or "ran out of" in text):
                self._out_of_memory(active, name, text, None)
            else:
                self._fail(active, name, text or status, outcome)
        return False

    def _fail(self, active: ActiveGroup, name: str, error: str, outcome: Mapping[str, Any]) -> None:
        """Record that a member failed; if it diverged after a usable epoch, also where its best weights are."""
        worker, attempt = self._state.claimant(active.worker), active.attempts[name]
        has_weights = outcome.get("status") == "diverged" and int(outcome["metrics"].get("best_epoch") or 0) > 0
        result = {"result": finite(_result(active, outcome))} if has_weights else {}
        self._state.db.fail(name, worker, attempt, error, **result)

    def _wait_for_room(self, active: ActiveGroup, name: str, error: str) -> None:
        """Queue a task again that failed because the disk was full: that costs it no attempt."""
        self._state.not_before[name] = time.monotonic() + DISK_WAIT
        task = self._state.db.get(name)
        if active.fused:
            split(self._state.db, active.group, [name])
        claim = (self._state.claimant(active.worker), active.attempts[name])
        if task.state == "running" and (task.worker, task.attempts) == claim:
            self._state.db.release(name, error)
            self._state.counters["tasks_requeued"] += 1

    def _lost(self, active: ActiveGroup, name: str, reason: str) -> None:
        """Queue a task again whose worker was lost; a group's member continues by itself from its checkpoint."""
        plan = dict(self._state.db.get(name).plan or {})
        plan["failures"] = int(plan.get("failures", 0)) + 1
        self._state.fail(active, name, reason, True, plan)
        self._state.counters["tasks_requeued"] += 1

    def _out_of_memory(self, active: ActiveGroup, name: str, reason: str, measured: int | None) -> None:
        """Raise the estimate and queue the task once more, by itself; fail it the second time."""
        plan = dict(self._state.db.get(name).plan or {})
        first = not plan.get("memory_errors")
        estimate = max(int(plan.get("bytes", 0) * GROWTH), measured or 0)
        plan |= {"memory_errors": int(plan.get("memory_errors", 0)) + 1, "alone": True, "bytes": estimate}
        reason = f"{reason}; the estimate is now {show_bytes(estimate)}" if first else reason
        self._state.fail(active, name, reason, first, plan)
        self._state.counters["memory_errors"] += 1

    def _charge(self, active: ActiveGroup) -> None:
        bound_log(self._state.options.runs / active.group.folder / LOG)
        for user in active.users.values():
            self._state.shares.charge(user, active.had)
            self._state.ran[time.monotonic() // QUARTER, user] += active.seconds / len(active.users)

    def worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        """Queue the tasks of a worker again that has ended."""
        active = self._state.active.pop(worker.group, None)
        if active is not None:
            self._charge(active)
            group_ended(self._state, active, {})
            kind = "memory" if reason.startswith("out of memory") else "gone"
            self._write(partial(self._ended, active, {"error": reason, "kind": kind, "held": worker.bytes}))


def _result(active: ActiveGroup, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the queue stores about the end of a member: status, metrics, and the folder of its files."""
    return {
        "status": outcome["status"],
        "metrics": outcome["metrics"],
        "folder": "/".join(filter(None, (active.group.folder, outcome["folder"]))),
        "group": active.group.id,
        "peak_bytes": outcome.get("peak_bytes"),
        "took": active.took,
        **({"scores": outcome["scores"]} if outcome.get("scores") else {}),
    }


def is_full_disk(error: str) -> bool:
    """Whether a run failed because nothing more could be written."""
    return any(words in error.lower() for words in ("no space left on device", "disk quota exceeded"))


def _unfit(worker: WorkerProcess, message: Mapping[str, Any]) -> str:
    """Return why a worker must be replaced after a group ("": it need not): leaks and faults stay with its process."""
    if broke_device(message):
        return "is replaced, since its device no longer answers"
    leftover = message.get("leftover", 0)
    if leftover > LEFTOVER_BYTES:
        return f"is replaced, since a model left {show_bytes(leftover)} behind"
    if message.get("kind") == "memory" and not worker.device.startswith("cuda"):  # nothing says whose memory it is
        return "is replaced after it ran out of memory"
    return ""


def why_gone(worker: WorkerProcess, code: Any) -> str:
    """Why a worker has ended."""
    words = "the process that had started it was killed before" if code == SPAWNER_GONE else f"exit code {code}"
    if isinstance(code, int) and SPAWNER_GONE < code < 0:
        words = f"signal {-code}, {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return worker.end_reason or f"its worker ended ({words})"


def split(db: QueueDB, group: Group, names: Iterable[str]) -> None:
    """Let the unfinished members of a group continue by themselves from its checkpoint when they start again."""
    for task in db.known(names):
        if task.state not in ENDED:
            db.replan(task.id, {**(task.plan or {}), "alone": True, "from": group.folder})


# ---- Predicted seconds of a task that continues from a checkpoint.

WHOLE = "whole_seconds"  # of a plan: the prediction for all epochs, if some are done


def with_seconds_left(db: QueueDB, task: QueueTask, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``plan`` with its seconds reduced to the epochs after the task's last checkpoint.

    A task that has not run, or has no plan because it begins anew, trains all epochs. At least one epoch counts, since
    a run that is resumed after its last epoch still writes its result.
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


# ---- Preempted groups.
#
# A policy sees such a group as one task with the bytes of the group: priority, ageing, fair shares, memory and workers
# reserved for inference apply to it as to any other task.

WAITS = "waits to go on with its group"


@dataclass(frozen=True)
class Preempted:
    """A preempted group, and its members as they are now.

    ``present``: members that continue with it; ``paused``: members that leave it if it continues before they are
    resumed; ``gone``: members that have ended, or continue alone. Members deleted from the queue are in none of them.
    """

    group: Group
    present: tuple[QueueTask, ...]
    paused: tuple[QueueTask, ...]
    gone: tuple[QueueTask, ...]

    @classmethod
    def of(cls, group: Group, tasks: list[QueueTask]) -> Preempted:
        """``group`` with those of its members that the queue still has."""
        gone = [task for task in tasks if task.state in ENDED or "from" in (task.plan or {})]
        paused = [task for task in tasks if task.state == "paused" and task not in gone]
        present = [task for task in tasks if task not in gone and task not in paused]
        return cls(group, tuple(present), tuple(paused), tuple(gone))

    @property
    def names(self) -> list[str]:
        """The members that have not left it."""
        return [task.id for task in (*self.present, *self.paused)]

    def as_task(self, setup_seconds: float, share: float) -> QueuedTask:
        """Return the group as a policy sees it: as urgent as its most urgent member, and older than its oldest.

        Shorter tasks pass one of s seconds if they arrive up to ``PATIENCE * s`` later. The group's arrival is moved
        back by that, so that tasks which were queued with it do not pass it. Ageing counts from its last start.
        """
        members = [queued_task(task, setup_seconds, share) for task in self.present]
        draft = GroupDraft(SAFETY_THRESHOLD, Interference())
        for member in members:
            draft.add(member)
        shape = draft.footprint(time.time())
        begun = any(WHOLE in (task.plan or {}) for task in self.present)
        seconds = max(shape.seconds if begun else self.group.seconds, draft.start_seconds)
        first = max(members, key=lambda member: (member.priority, -member.must_end_by))
        return replace(
            first,
            id=self.group.folder,
            bytes=int(self.group.bytes / SAFETY_THRESHOLD),
            shared_bytes=0,
            seconds=seconds,
            utilisation=min(shape.demand, 1.0),
            start_seconds=shape.start_seconds,
            turn_seconds=shape.turn_seconds,
            arrival=min(member.arrival for member in members) - PATIENCE * seconds,
            fusable=False,
        )


# ---- Scores that the workers of one pruned sweep exchange.
#
# A group is compared with the groups before it, as in ``weft.run``, where groups run one after another: groups of the
# sweep on the same graph whose first member is earlier in the sweep.


def scores_before(state: SupervisorState, active: ActiveGroup) -> dict[str, Any]:
    """Return what a worker needs to prune a group: the policy, and the scores of earlier members; {} if not pruned."""
    if active.contest is None:
        return {}
    prune, sweep, graph = active.contest
    rows = state.db.scores_of(sweep, graph)
    first = {row["batch"]: row["position"] for row in reversed(rows)}
    before = [row for row in rows if first[row["batch"]] < active.first]
    rivals = {row["id"]: {**json.loads(row["scores"]), "running": False} for row in before}
    for other in state.active.values():
        if other.contest == active.contest and other.first < active.first:
            rivals |= scores_of(other, other.members)
    return {"prune": prune, "rivals": rivals}


def scores_of(active: ActiveGroup, names: Sequence[str], running: bool = True) -> dict[str, Any]:
    """Return the scores of members of a group that runs or has just ended, and whether they are ``running``."""
    return {name: {**active.scores.get(name, {"peers": "", "bests": []}), "running": running} for name in names}


def send_to_later_groups(state: SupervisorState, active: ActiveGroup, members: Mapping[str, Any]) -> None:
    """Send the scores of a group's ``members`` to the workers of the groups after it in the sweep."""
    for other in state.active.values():
        if active.contest is not None and other.contest == active.contest and other.first > active.first:
            other.worker.send("rivals", group=other.group.id, members=members)


def update_scores(state: SupervisorState, active: ActiveGroup, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Store the scores that a worker sent for its group; send them to later groups if they changed."""
    begun = [(name, scores[name]) for name in active.members if name in scores]
    new = {name: {"peers": str(score["peers"]), "bests": list(score["bests"])} for name, score in begun}
    if new != active.scores:
        active.scores = new
        send_to_later_groups(state, active, scores_of(active, active.members))


def group_ended(state: SupervisorState, active: ActiveGroup, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Send the final scores of a group that has ended, so that later groups no longer wait for it."""
    active.scores = {name: outcome["scores"] for name, outcome in outcomes.items() if outcome.get("scores")}
    active.scores = {n: s for n, s in active.scores.items() if outcomes[n]["status"] not in ("preempted", "cancelled")}
    send_to_later_groups(state, active, scores_of(active, active.members, running=False))


# ---- How groups start.

WEIGHTS, LOG = "model.safetensors", "log.txt"


class Groups:
    """Starts groups on idle workers, makes members leave, resumes preempted groups, and dissolves what cannot go on."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool
        self.preempted: set[str] = set()  # members of preempted groups at the last call of :meth:`ready`

    def start(self, start: GroupStart, tasks: Sequence[QueueTask]) -> None:
        """Start a group that a policy has chosen."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            self._state.why |= {task.id: "waits for a free worker" for task in tasks}
            return
        chosen = without_twins(tasks)
        plan = self._plan_of(chosen, start.bytes)
        if plan is not None and len(plan.members) < len(chosen):  # the rest does not join this group and starts later
            chosen = [task for task in chosen if task.id in plan.members]
            draft = GroupDraft(SAFETY_THRESHOLD, Interference())
            for task in chosen:
                draft.add(queued_task(task, start.start_seconds, self._pool.share_of(start.device)))
            group = draft.footprint(time.time())
            start = replace(start, bytes=group.bytes, seconds=group.seconds, utilisation=min(group.demand, 1.0))
            self._state.dirty = True
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
        self.launch(group, worker, chosen, start.utilisation, plan, devices=start.devices)

    def launch(
        self,
        group: Group,
        worker: WorkerProcess,
        tasks: Sequence[QueueTask],
        utilisation: float,
        plan: Plan | None,
        cancelled: Sequence[QueueTask] = (),
        devices: tuple[str, ...] = (),
    ) -> bool:
        """Claim ``tasks`` and send the group to ``worker``; ``cancelled`` members have left it and are not claimed.

        ``devices``: of a sharded task, the device of every rank. The worker starts the other ranks as its children.
        False, and nothing was started, if a task has changed since the decision.
        """
        claimant, lease = self._state.claimant(worker), self._state.options.lease_seconds
        stale = [task for task in tasks if not task.attempts and not unchanged((task.plan or {}).get("files"))]
        if stale:  # a graph or a model was written anew since they were planned
            for task in stale:
                unless_lost(self._state.db.unplan, task.id)
            self._state.dirty = True
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
        first, infers, stays = queued_task(claimed[0]), is_inference(claimed[0]), is_resident(claimed[0])
        active = ActiveGroup(
            group=group,
            worker=worker,
            attempts={task.id: task.attempts for task in claimed},
            users={task.id: task.user for task in claimed},
            running=RunningGroup(
                id=group.id,
                device=group.device,
                members=tuple(task.id for task in claimed),
                bytes=group.bytes,
                utilisation=0.0 if stays else utilisation,  # it computes for moments only
                graph=first.graph,
                kind=first.kind,
                slowdown_limit=None if stays else slowdown_limit(first, time.time()),
                priority=max(task.priority for task in claimed),
                start_seconds=0.0 if infers else min(self._state.setup_of(group.device), group.seconds),
                turn_seconds=mean_turn(queued_task(task).turn_seconds for task in claimed),
                users=tuple(task.user for task in claimed),
                devices=devices,
            ),
            heard=time.monotonic(),
            alone_until=time.monotonic() + ALONE_SECONDS if any(map(is_suspect, claimed)) else 0.0,
            users_code=any(map(runs_users_code, everyone.values())),
            may_run={
                task.id: limit - float((task.plan or {}).get(RAN, 0.0))
                for task in claimed
                if not stays and (limit := self._state.time_limit(task)) is not None
            },
        )
        active.contest, active.first = contest_of(claimed[0]), min(task.position for task in claimed)
        for other in self._state.active.values():
            if set(other.running.places) & set(active.running.places):
                other.shared = active.shared = True
        self._state.active[group.id] = active
        worker.group = group.id
        self._state.started_on[group.device] = self._state.started_on.get(group.device, 0) + len(claimed)
        self._state.counters["groups_started"] += 1
        self._state.counters["tasks_started"] += len(claimed)
        runs, members = self._state.options.runs, [everyone[name] for name in group.members]
        split = [
            {"from": str(runs / origin), "member": task.id, "into": str(runs / task.id)}
            for task in members
            if (origin := (task.plan or {}).get("from")) is not None
        ]
        budget = group.bytes
        if len(claimed) == 1:
            limits = [task.spec["budget"] for task in claimed if task.spec.get("budget") is not None]
            needed = 0 if infers else needed_bytes(int((claimed[0].plan or {}).get("bytes", 0)))
            budget = min([max(budget, needed), *limits])
        common = {
            "group": group.id,
            "names": {task.id: task.spec["task"].get("name") for task in members},  # as users gave them
            "out": str(runs / group.folder),
            "budget": budget,
            "limit": budget + self._state.options.overrun_bytes,
        }
        if infers:
            (task,) = members
            infer, trained = task.spec["infer"], task.spec["infer"].get("of")
            folder = None if trained is None else (self._state.db.get(trained).result or {}).get("folder", trained)
            weights = infer["weights"] if trained is None else runs / str(folder) / WEIGHTS
            work = {"weights": str(weights), "nodes": infer.get("nodes")}
            work |= {"layerwise": (task.plan or {}).get("layerwise"), "resident": RESIDENT_SECONDS if stays else None}
            worker.send("infer", **common, task=worker_settings(task), **work)
        else:
            options = members[0].spec.get("options", {})
            worker.send(
                "run",
                **common,
                plan=None if plan is None or cancelled or split or devices else plan.to_dict(),
                devices=[device.partition("@")[0] for device in devices],
                tasks=[worker_settings(task) for task in members],
                options={"checkpoint_every": self._state.options.checkpoint_seconds, **options},
                split=split,
                cancel=[task.id for task in cancelled],
                **scores_before(self._state, active),
            )
            send_to_later_groups(self._state, active, scores_of(active, active.members))
        return True

    def _plan_of(self, members: Sequence[QueueTask], total_bytes: int) -> Plan | None:
        """Return the plan of the first of ``members`` and of those that can share its group.

        None if the worker must plan: after a restart, or for a user's model. That takes it 0.02 s of one task whose
        step was captured before, and 0.14 to 0.23 s of the first group of eight, in which a GPU would be idle.
        """
        runnable = self._state.runnable.get(estimate_key(members[0].spec))
        if runnable is None:
            return None
        try:
            tasks = [Task.from_dict(worker_settings(member)) for member in members]
            stats, alone = GraphStats.from_dict(runnable["stats"]), Plan.from_dict(runnable["plan"])
            options, machine = RunOptions.of(**run_options_of(members[0].spec)), Machine.from_dict(runnable["machine"])
            return group_plan(tasks, stats, alone, total_bytes, machine, options)
        except InputError:
            return None  # the worker says what is wrong

    # Members and groups that leave before they end: cancelled, paused, or preempted.

    def heartbeat(self) -> None:
        """Renew the leases; make members leave that were cancelled or paused in the queue.

        Leases of running groups are renewed before expired ones are requeued: a clock that was set forward, or a
        machine that slept, ends no group.
        """
        for active in self._state.active.values():
            held = set(self._state.db.heartbeat(self._state.claimant(active.worker), self._state.options.lease_seconds))
            lost = [name for name in active.members if name not in held]
            states = self._state.db.states(lost)
            paused = [name for name in lost if states.get(name) in ("paused", "queued", "planned")]
            if paused and not active.leaving:
                self.preempt(active)
            cancelled = [name for name in lost if name not in paused]
            if active.fused and len(lost) < len(active.members):  # a group that is paused as a whole goes on as a whole
                split(self._state.db, active.group, [name for name in paused if name not in active.split])
                active.split.update(paused)
            if cancelled:
                active.worker.send("cancel", group=active.group.id, names=cancelled)
            if len(cancelled) == len(active.members):
                active.unwanted_since = min(active.unwanted_since, time.monotonic())
        self._state.db.requeue_expired()

    def end_overdue(self) -> bool:
        """Fail tasks that exceed their time limit; True if there was one, so that a heartbeat makes it leave its group.

        The other members of its group train on. A worker that does not release it is killed, as after a cancellation.
        """
        overdue = [(a, name) for a in self._state.active.values() for name, s in a.may_run.items() if a.seconds > s]
        for active, name in overdue:
            limit = self._state.time_limit(self._state.db.get(name)) or 0.0
            error = f"it ran for longer than its time limit of {limit:g} s, and was ended"
            claim = (self._state.claimant(active.worker), active.attempts[name])
            unless_lost(self._state.db.fail, name, *claim, error)
            del active.may_run[name]
        return bool(overdue)

    def dissolve(self, group: Group, names: Sequence[str], why: str, anew: bool = False) -> None:
        """Dissolve a preempted group: ``names`` continue alone from its checkpoint, or are planned ``anew``."""
        if anew:
            for name in names:
                unless_lost(self._state.db.unplan, name)
        else:
            split(self._state.db, group, names)
        self._state.db.record([(name, "note", {"message": why, "group": group.id}) for name in names])
        self._state.db.end_group(group.id, "dissolved", why)
        self._state.resumable.pop(group.id, None)
        self._state.dirty = True

    def preempt(self, active: ActiveGroup) -> None:
        """Let a group save a checkpoint and return."""
        active.leaving = True
        active.worker.send("preempt", group=active.group.id)

    # Preempted groups.

    def ready(self) -> dict[str, Preempted]:
        """Return the groups that a policy may start, by the name that it sees; the rest waits or is taken apart."""
        startable, self.preempted = {}, set()
        for group in list(self._state.resumable.values()):
            preempted = Preempted.of(group, self._state.db.known(group.members))
            self.preempted |= set(preempted.names)
            if self._can_continue(preempted):
                startable[group.folder] = preempted
        return startable

    def resume(self, preempted: Preempted, start: GroupStart) -> None:
        """Start a group that a policy has chosen; it stays preempted if its members cannot be claimed."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            self._state.why |= {task.id: "waits for a free worker" for task in preempted.present}
            return
        group, now = preempted.group, time.time()
        paused = [task.id for task in preempted.paused]
        split(self._state.db, group, paused)  # what the group saves next is without them
        gone = [*self._state.db.known(paused), *preempted.gone]
        again = replace(group, state="running", device=start.device, worker=worker.name, ended=None, started=now)
        again = replace(again, seconds=start.seconds)  # of the epochs that remain
        members = sorted((*preempted.present, *gone), key=lambda task: group.members.index(task.id))
        plan = None if gone else self._plan_of(members, group.bytes)
        if plan is not None and len(plan.members) < len(members):
            plan = None  # its folder says how it began
        if self.launch(again, worker, preempted.present, start.utilisation, plan, gone):
            del self._state.resumable[group.id]
        else:
            self._state.why |= {task.id: WAITS for task in preempted.present}

    def take_apart(self, preempted: Preempted, why: str) -> None:
        """Let the members continue by themselves, each from the checkpoint of the group."""
        self.dissolve(preempted.group, preempted.names, f"goes on alone, from the checkpoint of its group: {why}")

    def _can_continue(self, preempted: Preempted) -> bool:
        """Whether a group can continue as it was now; if it never can, its members are released."""
        devices = {worker.device for name, worker in self._pool.workers.items() if name != PLANNER}
        present, former = {_kind(name) for name in devices}, _kind(preempted.group.device)
        if not preempted.present and preempted.paused:  # until one of them is resumed
            return False
        if not preempted.present:
            self.dissolve(preempted.group, preempted.names, "no member of its group is left to run")
        elif any(task.state != "planned" for task in preempted.present):
            self._state.why |= {task.id: WAITS for task in preempted.present}
        elif former not in present:
            why = f"begins anew: the checkpoint of its group is of {former}, and this server has {', '.join(present)}"
            self.dissolve(preempted.group, [task.id for task in preempted.present], why, anew=True)
        elif len(preempted.names) + len(preempted.gone) < len(preempted.group.members):  # settings are missing
            self.take_apart(preempted, "another member was deleted")
        elif preempted.group.bytes > max(map(self._pool.task_bytes, self._pool.room)):
            if devices <= self._pool.room.keys():
                needs = show_bytes(preempted.group.bytes)
                self.take_apart(preempted, f"together they need {needs}, more than there is for tasks")
            else:
                reason = "waits for the workers of its device to start"
                self._state.why |= {task.id: reason for task in preempted.present}
        else:
            return True
        return False


def _kind(device: str) -> str:
    """``cpu`` or ``cuda``."""
    return device.partition("@")[0].partition(":")[0]
