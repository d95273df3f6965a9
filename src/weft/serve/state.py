"""What the parts of the supervisor share: the queue, the groups that run, and what happened so far."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import statistics
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError
from weft.core.models import BUILT_IN
from weft.core.sweep import all_settings
from weft.core.task import OWN_FUNCTIONS, Task, is_own
from weft.sched.queue_state import QueuedTask, RunningGroup
from weft.sched.task_queue import UserShares
from weft.serve.options import DAY, ServeOptions
from weft.serve.queue_db import ENDED, Group, LostClaimError, Owner, QueueDB, QueueError, QueueTask

if TYPE_CHECKING:
    from weft.serve.worker_pool import WorkerProcess

# ---- Events of a run as events of its tasks, which dashboards and ``weft watch`` read.

Record = tuple[str, str, Mapping[str, Any]]  # task, kind, data
LEFT_OUT = ("event", "task", "time", "run", "seq", "worker", "group_key", "plan", "settings", "path", "report")
MOST_NOTED = 8  # members of a group that a note is written for


def records_of(event: Mapping[str, Any], members: Sequence[str], group: str) -> Iterator[Record]:
    """The queue's events for one event of a run; none for those that only concern the run as a whole."""
    kind, data = event["event"], {key: value for key, value in event.items() if key not in LEFT_OUT}
    if kind == "progress" and "members" in data:
        for member in data["members"]:
            if member["task"] in members:
                progress = {key: value for key, value in member.items() if key != "task"}
                yield member["task"], "progress", {**progress, "group": group}
    elif kind == "progress":
        yield members[0], "progress", {**data, "group": group}
    elif kind in ("note", "ready", "checkpoint", "start"):
        kept = {
            "note": {"message": data.get("message", "")},
            "ready": data,
            "checkpoint": {"epoch": data.get("epoch")},
            "start": {"device": data.get("device"), "members": len(members)},
        }[kind]
        for name in members[:MOST_NOTED] if kind in ("note", "ready") else members:
            yield name, kind, {**kept, "group": group}


# ---- Tasks of the queue as a policy, an estimate and a worker see them.

FREE_OF_COST = ("seed", "name", "lr", "weight_decay", "betas", "eps")  # settings that no estimate depends on


def queued_task(task: QueueTask, setup_seconds: float = 0.0, share: float = 1.0) -> QueuedTask:
    """What a policy sees of a planned task: its epochs, and ``setup_seconds`` in which it leaves the device idle.

    ``share``: the part of the device that a worker can use, of a CPU its threads over the cores.
    """
    plan, infers = task.plan or {}, is_inference(task)
    epochs, setup_seconds = float(plan["seconds"]), 0.0 if infers else setup_seconds
    seconds = epochs + setup_seconds
    has_checkpoint = bool(task.attempts)
    join_key = "" if infers else str(plan.get("join_key", ""))
    apart = " ".join([*([task.user] if runs_users_code(task) else []), *map(str, contest_of(task) or ())])
    return QueuedTask(
        id=task.id,
        bytes=max(int(plan["bytes"]), 0),
        seconds=seconds,
        graph=str(plan.get("graph", "")),
        # One user's code shares no process with another user's tasks: it may end it, hang or change it.
        # A policy compares the members of one sweep, so that one that is pruned has groups to itself.
        join_key=f"{join_key} {apart}" if join_key and apart else join_key,
        fusable=not (infers or plan.get("alone") or task.spec.get("budget") is not None or has_checkpoint),
        structure=str(plan.get("structure", "")),
        shared_bytes=0 if infers else min(int(plan.get("shared_bytes", 0)), int(plan["bytes"])),
        common_bytes=0 if infers else min(int(plan.get(name, 0)) for name in ("common_bytes", "shared_bytes", "bytes")),
        utilisation=share * float(plan.get("utilisation", 1.0)) * (epochs / seconds if seconds > 0 else 1.0),
        arrival=task.created,
        user=task.user,
        priority=task.priority,
        deadline=task.spec.get("deadline"),
        kind="inference" if infers else "training",
        latency_target=task.spec["infer"].get("latency_target") if infers else None,
        attempts=int(plan.get("failures", 0)),
        start_seconds=setup_seconds,
        turn_seconds=float(plan.get("turn_seconds", 0.0)),
        ranks=1 if infers else int(plan.get("ranks", 1)),
    )


def raised_priorities(tasks: Sequence[QueueTask]) -> dict[str, int]:
    """Priorities of tasks that one of ``tasks`` with a higher priority waits for, directly or through others, by id."""
    needs = {task.id: task.after for task in tasks}
    own = {task.id: task.priority for task in tasks}
    raised: dict[str, int] = {}
    for task in sorted(tasks, key=lambda task: -task.priority):  # so that each is reached once, by the highest
        names = list(task.after)
        while names:
            name = names.pop()
            if name not in raised and own.get(name, task.priority - 1) < task.priority:
                raised[name] = task.priority
                names += needs.get(name, ())
    return raised


def is_inference(task: QueueTask) -> bool:
    """Whether a task infers rather than trains."""
    return task.spec.get("kind") == "inference"


def is_resident(task: QueueTask) -> bool:
    """Whether a task keeps a model loaded that answers requests."""
    return is_inference(task) and bool(task.spec["infer"].get("resident"))


def is_late(task: QueueTask) -> bool | None:
    """Whether a task is or was done after its deadline, or its latency target; None for one that has neither."""
    target = task.spec["infer"].get("latency_target") if is_inference(task) else None
    due = task.spec.get("deadline") if target is None else task.created + target
    return None if due is None else (task.updated if task.state == "done" else time.time()) > due


def contest_of(task: QueueTask) -> tuple[str, str, str] | None:
    """Pruning policy, sweep and graph of a task of a sweep that is pruned; None of any other."""
    prune = task.spec.get("options", {}).get("prune")
    return (prune, task.sweep, str(task.spec["task"].get("graph"))) if prune and task.sweep else None


def runs_users_code(task: QueueTask) -> bool:
    """Whether a task runs code that is not Weft's: a model, a callback, or another function that it names."""
    settings = task.spec["task"]
    functions = (settings[name] for name in OWN_FUNCTIONS if settings.get(name) is not None)
    return (
        settings.get("model", "gcn") not in BUILT_IN or bool(settings.get("callbacks")) or any(map(is_own, functions))
    )


def worker_settings(task: QueueTask) -> dict[str, Any]:
    """A task as a worker gets it: named by its id, with the path of its graph and what was planned of it."""
    path, planned = task.spec.get("graph_path"), task.plan or {}
    decided = {name: planned[name] for name in ("mode", "batch") if planned.get(name)}
    return {**task.spec["task"], **({"graph": path} if path else {}), **decided, "name": task.id}


def planned_for_more(plan: Mapping[str, Any], room: int | None) -> bool:
    """Whether a plan needs more than the ``room`` that a task has now, and was made where there was more."""
    return room is not None and plan["bytes"] > room < plan.get("room", math.inf)


def without_twins(tasks: Sequence[QueueTask]) -> list[QueueTask]:
    """Tasks less those with the settings of another, which no sweep may have twice: they start in a later group.

    Settings that were left out are those of a task that gives their usual values.
    """
    chosen: dict[tuple[Any, ...], QueueTask] = {}
    for task in tasks:
        chosen.setdefault(all_settings(Task.from_dict(worker_settings(task))), task)
    return list(chosen.values())


def run_options_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options of :class:`weft.RunOptions` that a task was submitted with, its budget among them, by name."""
    budget = {} if spec.get("budget") is None else {"budget": spec["budget"]}
    return {**spec.get("options", {}), **budget}


def estimate_key(spec: Mapping[str, Any]) -> str:
    """The key of a task's estimate: tasks of one key need the same memory and time."""
    settings = {key: value for key, value in spec["task"].items() if key not in FREE_OF_COST}
    settings[""] = [run_options_of(spec), spec.get("kind", "training"), spec.get("graph_path")]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


TRANSIENT_ERRORS = (WeftError, OSError, sqlite3.Error)  # may pass: a full disk, too many open files, a read that failed

FIRST_SETUP_SECONDS, STARTS_KNOWN = 0.1, 15
RESIDENT_SECONDS, QUIET_SECONDS = 300.0, 2.0  # without a request: a resident model is let go, or makes way
LEAST_URGENT = -(2**31)  # below every priority that a task can have
QUARTER = 900.0  # seconds: what ran in one counts as one, so that a decision does not read every task of a day
RAN = "ran_seconds"  # of a plan: how long a task with a time limit ran before


@dataclass
class ActiveGroup:
    """A group that a worker runs."""

    group: Group
    worker: WorkerProcess
    attempts: dict[str, int]
    users: dict[str, str]
    running: RunningGroup  # as policies see it, without its times
    heard: float
    users_code: bool = False  # whether it runs code that is not Weft's
    epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)  # score so far, by member
    progress_at: float = 0.0  # when its progress was last recorded
    leaving: bool = False  # it is to save and return
    alone_until: float = 0.0  # by the clock of ``began``: until then nothing else starts
    unwanted_since: float = math.inf  # when its last member was cancelled
    shared: bool = False  # whether another group ran on the device meanwhile
    took: Mapping[str, Any] | None = None  # of the processor, once it has ended
    may_run: dict[str, float] = field(default_factory=dict)  # seconds, of members with a time limit
    split: set[str] = field(default_factory=set)  # members that were paused, and go on alone
    contest: tuple[str, str, str] | None = None  # of a sweep that is pruned
    first: int = 0  # the position of its first member
    scores: dict[str, Any] = field(default_factory=dict)  # of such a sweep, by member
    began: float = field(default_factory=time.monotonic)  # the clock of the day may be set meanwhile
    answers_for: frozenset[str] = frozenset()  # tasks whose model is resident in it, once it is loaded

    @property
    def members(self) -> tuple[str, ...]:
        """The tasks that it trains: the group's, less those that had left before it went on."""
        return tuple(self.attempts)

    @property
    def fused(self) -> bool:
        """Whether it is a group of several, with a folder of its own."""
        return len(self.group.members) > 1

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self.began

    @property
    def had(self) -> float:
        """Device-seconds of each of its members so far."""
        return self.seconds * self._share

    @property
    def will_have(self) -> float:
        """Device-seconds of each of its members when it ends as predicted; more if it runs for longer."""
        return max(self.had, self.group.seconds * self._share)

    @property
    def _share(self) -> float:
        """How many devices each of its members keeps busy."""
        return self.running.utilisation * len(self.running.places) / max(len(self.members), 1)

    def state(self) -> RunningGroup:
        """What a policy sees of it."""
        started, priority = time.time() - self.seconds, self.running.priority
        ends = started + self.group.seconds
        if self.answers_for:  # it makes way for whatever waits, unless it was asked just now
            quiet = time.monotonic() - max(self.worker.asked_at, self.began) > QUIET_SECONDS
            ends, priority = time.time() + RESIDENT_SECONDS, LEAST_URGENT if quiet else priority
        return replace(self.running, started=started, ends=ends, priority=priority, leaving=self.leaving)


# What is counted since the server started, as the metrics describe it.
COUNTERS = {
    "groups_started": "Groups started.",
    "tasks_started": "Tasks started, retries included.",
    "workers_lost": "Workers that ended by themselves.",
    "memory_errors": "Tasks that ran out of memory.",
    "tasks_requeued": "Tasks queued again after their worker was lost.",
    "graphs_ready": "Groups whose graph was on the device when they started.",
}


@dataclass
class SupervisorState:
    """Read and changed by the supervisor's thread alone, but for ``draining``."""

    options: ServeOptions
    owner: Owner | None = None
    db: QueueDB = field(init=False)  # opened by the thread that uses it
    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))
    active: dict[str, ActiveGroup] = field(default_factory=dict)  # by group
    resumable: dict[str, Group] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    shares: UserShares = field(default_factory=UserShares)
    ran: Counter[tuple[float, str]] = field(default_factory=Counter)  # seconds, by quarter of an hour and user
    started_on: dict[str, int] = field(default_factory=dict)  # tasks by device
    why: dict[str, str] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)  # priorities of tasks that more urgent ones wait for
    runnable: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # plans by the key of their estimate
    setup_seconds: dict[str, deque[float]] = field(default_factory=dict)  # by device: of groups besides their epochs
    records: list[Record] = field(default_factory=list)
    dirty: bool = True  # the queue may have changed
    again: float = math.inf  # when the policy wants to decide though nothing has happened, on the clock of the day
    urgent: bool = False  # an inference task waits that no decision has seen
    draining: bool = False
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    def claimant(self, worker: WorkerProcess) -> str:
        """The name under which ``worker`` holds its tasks."""
        return f"{self.session}/{worker.name}/{worker.pid}"

    def setup_of(self, device: str) -> float:
        """Seconds that a group takes on ``device`` besides its epochs, as learned so far."""
        seconds = self.setup_seconds.get(device)
        return statistics.median(seconds) if seconds else FIRST_SETUP_SECONDS

    def learn_setup(self, device: str, seconds: float) -> None:
        """Take one more group into account; one that had kernels to compile says nothing of the next."""
        self.setup_seconds.setdefault(device, deque(maxlen=STARTS_KNOWN)).append(seconds)

    def time_limit(self, task: QueueTask) -> float | None:
        """Seconds that a task may run in all: its own limit and the server's, whichever is less; None for neither."""
        limits = (self.options.time_limit, task.spec.get("time_limit"))
        return min((limit for limit in limits if limit is not None), default=None)

    def user_seconds(self) -> dict[str, float]:
        """Seconds that the tasks of each user have run in the last 24 hours; members of a group share its seconds."""
        seconds, oldest = defaultdict[str, float](float), (time.monotonic() - DAY) // QUARTER
        self.ran = Counter({key: length for key, length in self.ran.items() if key[0] >= oldest})
        active = [(user, a.seconds / len(a.users)) for a in self.active.values() for user in a.users.values()]
        for user, length in (*((user, length) for (_, user), length in self.ran.items()), *active):
            seconds[user] += length
        return seconds

    def end_group(self, active: ActiveGroup, how: str, note: str = "") -> None:
        """Write that a group no longer runs, and what its users have had so far."""
        for name in active.members:  # the lane of a task that continues was served until now: it does not rise
            with suppress(QueueError):
                task = self.db.get(name)
                if task.state not in ENDED:
                    self.shares.started(queued_task(task), time.time())
                    if self.time_limit(task) is not None:
                        had = float((task.plan or {}).get(RAN, 0.0)) + active.seconds
                        self.db.replan(name, {**(task.plan or {}), RAN: had})
        shares = [self.shares.of(user) for user in dict.fromkeys(active.users.values())]
        self.db.end_group(active.group.id, how, note, shares)
        if how == "preempted":
            self.resumable[active.group.id] = replace(active.group, state=how, note=note)

    def fail(self, active: ActiveGroup, name: str, reason: str, retry: bool, plan: Mapping[str, Any]) -> None:
        """Report that an attempt of a member failed, and what is known of the task now, in one transaction.

        A member of a fused group continues alone, from the group's checkpoint.
        Written apart, the second try of a task would be lost where there is room on the disk for one of the two only.
        """
        if active.fused:
            plan = {**plan, "alone": True, "from": active.group.folder}
        try:
            self.db.fail(name, self.claimant(active.worker), active.attempts[name], reason, retry, plan=plan)
        except LostClaimError:  # cancelled, or paused: then it continues by this
            self.db.replan(name, plan)
            raise

    def write_records(self) -> None:
        """Write the events that were collected; they are kept if there is no room for them now."""
        if not self.records:
            return
        records, self.records = self.records, []
        try:
            self.db.record(records)
        except QueueError:
            raise
        except WeftError:
            self.records = records + self.records
            raise


def unless_lost(action: Callable[..., Any], *arguments: Any) -> None:
    """Do something to a task, unless it was cancelled or paused meanwhile."""
    with suppress(LostClaimError, QueueError):
        action(*arguments)


# ---- Tasks that ran when a server died, which their model may have killed.
#
# Each is released without a word the first time, and after every checkpoint that it saved since. A task that has saved
# none since a server died is a suspect: it is started alone, so that it alone can cause the next death, and every
# further death costs an attempt. When it has none left it is held: paused, until a user resumes it.

SUSPECT, DEATHS = "suspect_of_death", "deaths"  # in the plan of a task: since its last checkpoint, and in all
MOST_DEATHS = 10  # in all, whatever the task has saved between them
ALONE_SECONDS = 60.0  # that a suspect runs by itself at most
RESTARTED = "the server was restarted"
WAITS_ALONE = "waits to be tried alone: a server died while it ran"
WAITS_FOR_SUSPECT = "waits while a task is tried alone that ran when a server died"


def is_suspect(task: QueueTask) -> bool:
    """Whether a task ran when a server died and has saved nothing since."""
    return bool((task.plan or {}).get(SUSPECT))


def take_over(db: QueueDB, ran: Iterable[QueueTask], died: bool) -> set[str]:
    """Queue again what a server ran, or hold what it ``died`` of too often; those that go on without their groups."""
    apart: set[str] = set()
    for task in ran:
        if is_resident(task):  # whoever asks next has it loaded again
            db.cancel(task.id)
            continue
        if not died:
            db.release(task.id, RESTARTED)
            continue
        plan: dict[str, Any] = dict(task.plan or {})
        last = db.last_events(task.id, ("running", "checkpoint"), 1)
        saved = bool(last) and last[-1].kind == "checkpoint"
        suspect = 1 if saved else int(plan.get(SUSPECT, 0)) + 1
        plan |= {DEATHS: int(plan.get(DEATHS, 0)) + 1, SUSPECT: suspect}
        if saved:
            del plan[SUSPECT]
        apart |= {task.id} if suspect > 1 or plan[DEATHS] >= MOST_DEATHS else set()
        if plan[DEATHS] >= MOST_DEATHS or (suspect > 1 and task.attempts >= task.max_attempts):
            why = f"{plan[DEATHS]} servers died while it ran; it is held: resume it to try it again, or cancel it"
            db.hold(task.id, why, {name: value for name, value in plan.items() if name not in (SUSPECT, DEATHS)})
        elif suspect > 1:
            db.fail(task.id, str(task.worker), task.attempts, "the server died while it ran", retry=True, plan=plan)
        else:
            db.release(task.id, RESTARTED, plan=plan)  # in one transaction: a server that dies here is counted once
    return apart


# ---- The files that an estimate depends on: a graph, and the code of a user's model.

Stamps = Mapping[str, Sequence[int]]
MOST_FILES = 200  # of a graph's folder, or of a package


def stamps_of(paths: Iterable[str]) -> dict[str, list[int]]:
    """When each file was written and how long it is; of a folder, its files as well. What is no file is left out."""
    files: list[str] = []
    for path in paths:
        files.append(str(Path(path)))
        with suppress(OSError):
            files += sorted(map(str, Path(path).iterdir()))[:MOST_FILES] if Path(path).is_dir() else []
    return {file: stamp for file in files if (stamp := _stamp(file)) is not None}


def unchanged(stamps: Stamps | None) -> bool:
    """Whether all files are as they were."""
    return all(_stamp(path) == list(stamp) for path, stamp in (stamps or {}).items())


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_mtime_ns, status.st_size]
