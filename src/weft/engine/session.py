"""Session: a group in training, stepped from outside: ``apply(decide(advance()))`` until it is finished.

``advance`` trains as many epochs as were decided and says how far the group is, a driver decides, ``apply`` acts on it.
Decisions are plain data, which rank 0 sends to the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.compatibility import function_name, graph_key
from weft.core.decision import RUNNING, Decision, Progress, Requests, Start, Update
from weft.core.errors import SpecError, TrainingError
from weft.core.member import Member
from weft.core.task import Task
from weft.engine.control import Control
from weft.engine.driver import Driver
from weft.engine.errors import clear_errors
from weft.engine.events import EventSource
from weft.engine.process_state import FreeThreads
from weft.runtime.group import GroupRun

Save = Callable[[GroupRun, dict[str, Any]], Path]


class Session:
    """One group, the progress of its members, and where it is saved and reported.

    ``driver`` decides and has the members, which the session keeps up to date. ``save(group, about)`` writes a
    checkpoint (None: nothing is kept). ``control`` has requests from outside. ``left`` says why it ended with members
    that still run: ``"interrupted"``, ``"preempted"``, or ``""``. ``threads`` chooses how many compute, between
    advances.
    """

    def __init__(
        self,
        group: GroupRun,
        driver: Driver,
        events: EventSource,
        save: Save | None = None,
        control: Control | None = None,
        threads: FreeThreads | None = None,
    ) -> None:
        self.group, self._driver, self.members, self._events = group, driver, driver.members, events
        self._save_to, self._threads = save, threads
        self._control, self._acted_on = control or Control(), Requests()
        self._control.resumable = not any(stack.unsaved for stack in group.built)
        self._index = {member.name: index for index, member in enumerate(self.members)}
        self.left, self.paused, self._over = "", False, False
        self.checkpoint: Path | None = None  # the last one that was written
        self._next = 0  # epochs to train, once that is decided
        self._trained: tuple[int, float] = (0, 0.0)  # by the last advance: epochs of all members together, seconds
        self._running = list(self.members)  # when it was last emitted who has ended
        self._noted: set[str] = set()
        self._not_saved = ""  # why the last checkpoint on the way was not written
        self._whole_epochs, self._whole_seconds = 0, 0.0  # with every member in the step, set-up left out

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do: no member runs, or it was decided to leave."""
        return bool(self.left) or not any(member.running for member in self.members)

    @property
    def measured(self) -> dict[str, float]:
        """Seconds of an epoch of the whole group, and over how many; what caches had. Empty if neither is known."""
        reads = self.group.reads()
        if not self._whole_epochs:
            return reads
        return {"epoch_seconds": self._whole_seconds / self._whole_epochs, "epochs": self._whole_epochs, **reads}

    def resume(self, tensors: dict[str, Any], about: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.group.restore(tensors)
        saved = about.get("members", [{}] * len(self.members))
        for index, (member, former, update) in enumerate(zip(self.members, saved, self.group.poll(0), strict=True)):
            if not member.running:  # a row without a trial
                continue
            member.seconds = float(former.get("seconds", 0.0))
            member.logged = {name: list(map(tuple, pairs)) for name, pairs in former.get("logged", {}).items()}
            self._take(index, update)
            if former.get("status", RUNNING) != RUNNING:
                del member.rows[int(former["epoch"]) :]
                member.status, member.message = former["status"], former.get("message", "")
        self._events.note(f"resumed after epoch {self.group.epoch}{self._of_how_many()}")
        self._events.rows(self.members)
        self._emit_ended()

    def _of_how_many(self) -> str:
        return f" of {self.group.epochs}"

    def train(self) -> None:
        """Train until every member has ended, or until it is decided to leave."""
        noted = False
        while not self.finished:
            changed = self._threads.choose() if self._threads is not None else None
            if changed is not None and not noted:  # once: they may change every second
                self._events.note(changed)
                noted = True
            self.apply(self.decide(self.advance()))

    # ---- advance -------------------------------------------------------------------------------------

    def advance(self) -> Progress:
        """Train as many epochs as were decided, none before the first decision; how far the group is."""
        seconds = prepare_seconds = 0.0
        if self._next:
            before = sum(member.epoch for member in self._running)
            seconds, prepare_seconds = self._train(self._next)
            self._trained = (sum(member.epoch for member in self._running) - before, seconds)
        for member, in_group in zip(self.members, self.group.members, strict=True):
            member.present = in_group.row is not None
        return Progress(self.group.epoch, seconds, prepare_seconds)

    def _train(self, epochs: int) -> tuple[float, float]:
        """Train, and take over what came of it; seconds of the epochs, and of preparing the step before them."""
        steady, whole = self.group.started, len(self.group.present) == len(self.members)
        before, begin = self.group.epoch, time.perf_counter()
        with clear_errors(self.group.tasks, self.group.device):
            if not steady:
                self.group.prepare()
            prepared = time.perf_counter()
            updates = self.group.advance(epochs, self._is_to_leave if self.group.has_steps else bool)
        seconds, prepare_seconds = time.perf_counter() - prepared, 0.0 if steady else prepared - begin
        share = (seconds + prepare_seconds) / len(self._running)
        for index, (member, update) in enumerate(zip(self.members, updates, strict=True)):
            if member.running:
                first = member.epoch
                self._take(index, update)
                member.seconds += share
                if steady:  # without set-up and the first poll
                    member.steady_seconds += share
                    member.steady_epochs += member.epoch - first
        if steady and whole:
            self._whole_epochs += self.group.epoch - before
            self._whole_seconds += seconds
        return seconds, prepare_seconds

    def _take(self, index: int, update: Update) -> None:
        """Take over what the device has recorded of a member, and notice its end or that it diverged."""
        member, task = self.members[index], self.group.tasks[index]
        member.take(update)
        columns = member.columns
        losses = [i for i, name in enumerate(columns) if name.endswith("loss")]
        for epoch, row in enumerate(update.rows, update.first):
            evaluated = not math.isnan(row[-1]) or member.end == epoch + 1
            bad = next((i for i in (losses if evaluated else losses[:1]) if not math.isfinite(row[i])), None)
            if bad is not None:
                del member.rows[epoch + 1 :]
                # A first loss of a full-graph step is from before any update, so no rate is to blame.
                steps = self.group.members[index].stack.source.steps_per_epoch
                untrained = epoch == 0 and columns[bad] == "loss" and steps == 1
                at = f"task {member.name!r}: {columns[bad]} became {row[bad]} at epoch {epoch + 1} of {task.epochs}"
                best = f"the best weights so far (epoch {member.best_epoch + 1}) are kept"
                usable = best if member.best_epoch >= 0 else "no epoch was usable"
                member.stop("diverged", f"{at}; {usable}; {_advice(task, untrained)}")
                return
        if member.epoch >= member.end:
            member.status = "finished" if member.end >= task.epochs else "stopped"

    def _is_to_leave(self) -> bool:
        """Whether to stop between two steps of an epoch: a long epoch is left where it is, and resumed there."""
        requests = self._control.requests()
        return requests.interrupt or requests.preempt or requests.pause

    # ---- decide --------------------------------------------------------------------------------------

    def decide(self, progress: Progress) -> Decision:
        """What the driver decides; while paused, wait for a request."""
        if self.paused:
            self._control.wait_while_paused(self._acted_on)
        self._acted_on = self._control.requests()
        return self._driver.decide(progress, self._acted_on)

    # ---- apply ---------------------------------------------------------------------------------------

    def apply(self, decision: Decision) -> None:
        """Do what was decided: end members, take them out of the step, emit events, save, and set how far to train."""
        if decision.epoch != self.group.epoch:  # ranks that are not as far as rank 0 would train something else
            raise SpecError(
                f"decision after epoch {decision.epoch}: the session is at epoch {self.group.epoch}; "
                "decide from how far it is now"
            )
        for stop in decision.stop:
            self.members[self._index[stop.member]].stop(stop.status, stop.message)
        self.group.stop(self._index[stop.member] for stop in decision.stop)
        self.group.scale_rates({self._index[name]: factor for name, factor in decision.rates.items()})
        if decision.drop:
            self.group.drop([self._index[name] for name in decision.drop])
        self._next, self._over = decision.advance, decision.finish
        self._events.rows(self.members)
        for name, values in decision.logged.items():
            member = self.members[self._index[name]]
            for key, value in values.items():
                member.logged.setdefault(key, []).append((member.epoch, value))
            self._events.logged(member, values)
        self._emit()
        self._begin(decision.start)
        if decision.pause != self.paused:
            self.paused = decision.pause
            self._events.paused(self.paused, self.group.epoch)
        if not decision.finish:
            if decision.save:
                self._save_or_warn()
            return
        running = [member for member in self.members if member.running]
        if decision.save and running:
            self.save()
        elif decision.save:
            self._save_or_warn(finished=True)  # its results are still to be written
        self.left = decision.reason if running else ""
        if self.left:
            self._events.left(self.left, self.group.epoch)
        if self.left == "preempted":  # after the checkpoint, in which they still run
            for member in running:
                member.stop("preempted", f"task {member.name!r}: preempted after epoch {member.epoch}")

    def _begin(self, start: Mapping[int, Start]) -> None:
        """Let trials begin in rows of the group, which their members have left."""
        for row, trial in start.items():
            rows = [] if trial.parent is None else list(self.members[trial.parent].rows)
            self.group.fill(row, trial.task, trial.parent)
            self.members[row] = replace(member_of(self.group, row), rows=rows)
            self._index[trial.task.label] = row
        self._running = [member for member in self.members if member.running]

    # ---- emitting and saving -------------------------------------------------------------------------

    def _emit(self) -> None:
        for note in self.group.notes:
            if note not in self._noted:
                self._events.note(note)
        self._noted.update(self.group.notes)
        if self._trained[0]:
            self._events.progress(self._running, self.group.epoch, *self._trained, self.group.reads())
        self._trained = (0, 0.0)
        self._emit_ended()

    def _emit_ended(self) -> None:
        for member in self._running:
            if not member.running:
                self._events.ended(member)
        self._running = [member for member in self.members if member.running]

    def save(self, finished: bool = False) -> None:
        """Write a checkpoint, if there is a folder for one."""
        if self._save_to is not None:
            columns = ("status", "message", "seconds", "epoch", "logged")
            members = [{column: getattr(member, column) for column in columns} for member in self.members]
            self.checkpoint = self._save_to(self.group, {"members": members, "finished": finished})
            self._events.checkpoint(self.checkpoint, self.group.epoch)

    def _save_or_warn(self, finished: bool = False) -> None:
        """A checkpoint that cannot be written does not end the training: the next one may succeed."""
        try:
            self.save(finished)
        except TrainingError as error:
            if str(error) != self._not_saved:  # a disk that stays full is noted once
                self._events.note(f"no checkpoint after epoch {self.group.epoch}: {error}; tried again every time")
            self._not_saved = str(error)
        else:
            if self._not_saved:
                self._events.note(f"checkpoints are written again, after epoch {self.group.epoch}")
            self._not_saved = ""


def _advice(task: Task, untrained: bool) -> str:
    """What to look at after a divergence; ``untrained``: no weight had been updated yet."""
    suspects = [f"objective {function_name(task.objective)}"] if task.has_own("objective") else []
    suspects += [f"what model {task.model_name} computes"] if task.traits is None else []
    look = f"look at {' and '.join(suspects)}" if suspects else ""
    if untrained:
        return f"{look or 'look at the features'}: no weight had been updated yet"
    lower = f"try a lower lr than {task.lr:g}"
    return f"{look}, or {lower}" if suspects else lower


def members_of(group: GroupRun) -> list[Member]:
    """The members of ``group``, before their first epoch."""
    return [member_of(group, index) for index in range(len(group.tasks))]


def member_of(group: GroupRun, index: int) -> Member:
    """One of them."""
    task, stack = group.tasks[index], group.members[index].stack
    graph = task.graph if isinstance(task.graph, str) else f"object {hash(graph_key(task))}"
    columns, peers = tuple(stack.columns), f"val_{stack.metric} on {graph}"
    return Member(task.label, task.epochs, columns, stack.metric, stack.objective.name, peers)
