"""Session: a group in training, stepped from outside: ``apply(decide(advance()))`` until it is finished.

``advance`` trains as many epochs as were decided and reports updates, a driver decides, ``apply`` acts on it. Updates
and decisions are plain data, so the driver may live in this process, on another rank, or at the end of a pipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.core.compatibility import graph_key
from weft.core.decision import Decision, GroupOutline, MemberOutline, Requests, Update
from weft.core.division import Division
from weft.core.errors import SpecError, TrainingError
from weft.core.settings import lower_is_better
from weft.engine.control import Control
from weft.engine.driver import Driver
from weft.engine.errors import clear_model_errors
from weft.engine.events import EventSource, MemberProgress
from weft.engine.process_state import FreeThreads
from weft.runtime.group import GroupRun
from weft.runtime.profile_division import divided_source

Save = Callable[[GroupRun, dict[str, Any]], Path]


class Session:
    """One group, the progress of its members, and where it is saved and reported.

    ``save(group, about)`` writes a checkpoint (None: nothing is kept). ``driver`` decides, unless the caller
    does, who then calls :meth:`advance` and :meth:`apply` only; ``control`` has requests from outside. ``left`` says
    why it ended with members that still run: ``"interrupted"``, ``"preempted"``, or ``""``. ``threads`` chooses how
    many compute, between advances.
    """

    def __init__(
        self,
        group: GroupRun,
        events: EventSource,
        save: Save | None = None,
        driver: Driver | None = None,
        control: Control | None = None,
        threads: FreeThreads | None = None,
    ) -> None:
        self.group, self._events, self._save_to, self._threads = group, events, save, threads
        self._driver = driver or Driver(outline_of(group))
        self._control, self._acted_on = control or Control(), Requests()
        self._control.resumable = not any(stack.unsaved for stack in group.built)
        self.tracks = [MemberProgress.of(group, index) for index in range(len(group.tasks))]
        self._places = {track.name: index for index, track in enumerate(self.tracks)}
        self.left, self.paused = "", False
        self.checkpoint: Path | None = None  # the last one that was written
        self._next: int | None = None  # epochs to train, once that is decided
        self._trained: tuple[int, float] = (0, 0.0)  # by the last advance: epochs of all members together, seconds
        self._running = list(self.tracks)  # before the last advance
        self._told_notes: set[str] = set()
        self._told_threads = False
        self._not_saved = ""  # why the last checkpoint on the way was not written
        self._whole_epochs, self._whole_seconds = 0, 0.0  # with every member in the step, set-up left out

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do: no member runs, or it was decided to leave."""
        return bool(self.left) or not any(track.running for track in self.tracks)

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
        saved = about.get("members", [{}] * len(self.tracks))
        for track, one, progress in zip(self.tracks, saved, self.group.poll(0), strict=True):
            track.resume(one, progress)
        self._events.note(f"resumed after epoch {self.group.epoch} of {self.group.epochs}")
        for track in self.tracks:
            if not track.running:
                self._events.ended(track)
        self._running = [track for track in self.tracks if track.running]

    def train(self) -> None:
        """Train until every member has ended, or until it is decided to leave."""
        while not self.finished:
            self._choose_threads()
            self.apply(self.decide(self.advance()))

    def _choose_threads(self) -> None:
        changed = self._threads.choose() if self._threads is not None else None
        if changed is not None and not self._told_threads:  # once: they may change every second
            self._events.note(changed)
            self._told_threads = True

    # ---- advance -------------------------------------------------------------------------------------

    def advance(self) -> list[Update]:
        """Train as many epochs as were decided; an update of every member that ran.

        Before the first decision nothing is trained, and the updates say where every member stands.
        """
        if self._next is None:
            return self.standing()
        self._running = [track for track in self.tracks if track.running]
        before = [track.epoch for track in self._running]
        seconds, prepare_seconds = self._train(self._next) if self._next else (0.0, 0.0)
        done = sum(track.epoch for track in self._running) - sum(before)
        self._trained = (done, seconds)
        about = {"seconds": seconds, "prepare_seconds": prepare_seconds, "phases": self._phases()}
        return [self._update(track, first, **about) for track, first in zip(self._running, before, strict=True)]

    def standing(self) -> list[Update]:
        """Where every member stands, from its first epoch on: what a new driver needs to know."""
        return [self._update(track, 0) for track in self.tracks]

    def _phases(self) -> dict[str, float]:
        """Mean seconds per batch of the phases that were measured while training."""
        source = divided_source(self.group)
        return {} if source is None else {key: time.mean for key, time in source.phases().items()}

    def _update(self, track: MemberProgress, first: int, **measured: Any) -> Update:
        present = self.group.members[self._places[track.name]].row is not None
        return track.update(first, epochs=self.group.epoch, steps=self._steps, present=present, **measured)

    @property
    def _steps(self) -> int:
        """Steps that the group has trained."""
        return self.group.steps

    def _train(self, epochs: int) -> tuple[float, float]:
        """Train, and take over what came of it; seconds of the epochs, and of preparing the step before them."""
        steady, whole = self.group.started, len(self.group.present) == len(self.tracks)
        before, begin = self.group.epoch, time.perf_counter()
        with clear_model_errors(self.group.tasks):
            if not steady:
                self.group.prepare()
            prepared = time.perf_counter()
            seen = self.group.advance(epochs, self._is_to_leave if self.group.has_steps else bool)
        seconds, prepare_seconds = time.perf_counter() - prepared, 0.0 if steady else prepared - begin
        share = (seconds + prepare_seconds) / len(self._running)
        for track, progress in zip(self.tracks, seen, strict=True):
            if track.running:
                first = track.epoch
                track.take(progress)
                track.charge(share, track.epoch - first, steady)
        if steady and whole:
            self._whole_epochs += self.group.epoch - before
            self._whole_seconds += seconds
        return seconds, prepare_seconds

    def _is_to_leave(self) -> bool:
        """Whether to stop between two steps of an epoch: a long epoch is left where it is, and resumed there."""
        requests = self._control.requests()
        return requests.interrupt or requests.preempt or requests.pause

    # ---- decide --------------------------------------------------------------------------------------

    def decide(self, updates: Sequence[Update]) -> Decision:
        """What this session's own driver decides after ``updates``; while paused, wait for a request."""
        if self.paused:
            self._control.wait_while_paused(self._acted_on)
        self._acted_on = self._control.requests()
        return self._driver.decide(updates, self._acted_on)

    # ---- apply ---------------------------------------------------------------------------------------

    def apply(self, decision: Decision) -> None:
        """Do what was decided: end members, take them out of the step, emit events, save, and set how far to train."""
        self._check(decision)
        for stop in decision.stop:
            self.tracks[self._places[stop.member]].stop(stop.status, stop.message)
        self.group.stop(self._places[stop.member] for stop in decision.stop)
        self.group.scale_rates({self._places[name]: factor for name, factor in decision.rates.items()})
        if decision.drop:
            self.group.drop([self._places[name] for name in decision.drop])
        self._next = decision.advance
        self._divide(decision)
        self._tell()
        self._pause(decision.pause)
        if decision.finish:
            self._finish(decision)
        elif decision.save:
            self._save_or_warn()

    def _check(self, decision: Decision) -> None:
        if decision.epoch != self.group.epoch:
            raise SpecError(
                f"decision after epoch {decision.epoch}: the session is at epoch {self.group.epoch}; "
                "decide from its latest updates"
            )
        stopped = {stop.member for stop in decision.stop}
        unknown = [name for name in (*stopped, *decision.drop, *decision.rates) if name not in self._places]
        if unknown:
            raise SpecError(f"decision: no member is called {unknown[0]!r}; they are: {', '.join(self._places)}")
        ended = [name for name in stopped if not self.tracks[self._places[name]].running]
        if ended:
            raise SpecError(f"decision: {ended[0]!r} cannot be stopped, it has ended already")
        running = [track.name for track in self.tracks if track.running and track.name not in stopped]
        if set(decision.drop) & set(running):
            raise SpecError(f"decision: drop={list(decision.drop)} names members that run; stop them first")
        if decision.finish and running and not decision.reason:
            raise SpecError(f"decision: finish=True with {running[0]!r} running needs a reason, such as 'preempted'")

    def _divide(self, decision: Decision) -> None:
        source = divided_source(self.group)
        if decision.divide is not None:
            if source is None:
                raise SpecError("decision: divide is for a group whose batches are divided between two sides")
            source.divide(Division.from_dict(decision.divide))
        for note in decision.notes:
            self._events.note(f"after epoch {self.group.epoch}: {note}")

    def _pause(self, paused: bool) -> None:
        if paused != self.paused:
            self.paused = paused
            self._events.paused(paused, self.group.epoch)

    def _finish(self, decision: Decision) -> None:
        running = [track for track in self.tracks if track.running]
        if decision.save and running:
            self.save()
        elif decision.save:
            self._save_or_warn(finished=True)  # its results are still to be written
        self.left = decision.reason if running else ""
        if self.left:
            self._events.left(self.left, self.group.epoch)
        if self.left == "preempted":  # after the checkpoint, in which they still run
            for track in running:
                track.stop("preempted", f"task {track.name!r}: preempted after epoch {track.epoch}")

    # ---- emitting and saving -------------------------------------------------------------------------

    def _tell(self) -> None:
        for note in self.group.notes:
            if note not in self._told_notes:
                self._events.note(note)
        self._told_notes.update(self.group.notes)
        if self._trained[0]:
            self._events.progress(self._running, self.group.epoch, *self._trained, self.group.reads())
        for track in self._running:
            if not track.running:
                self._events.ended(track)
        self._running, self._trained = [track for track in self.tracks if track.running], (0, 0.0)

    def save(self, finished: bool = False) -> Path | None:
        """Write a checkpoint, if there is a place for one; its path."""
        if self._save_to is None:
            return None
        about = {"members": [track.about() for track in self.tracks], "finished": finished}
        self.checkpoint = self._save_to(self.group, about)
        self._events.checkpoint(self.checkpoint, self.group.epoch)
        return self.checkpoint

    def _save_or_warn(self, finished: bool = False) -> None:
        """A checkpoint that cannot be written does not end the training: the next one may succeed."""
        try:
            self.save(finished)
        except TrainingError as error:
            self._tell_not_saved(str(error))
        else:
            self._tell_saved_again()

    def _tell_not_saved(self, reason: str) -> None:
        """Once for every reason: a disk that stays full is the same news every time."""
        if reason != self._not_saved:
            self._events.note(f"no checkpoint after epoch {self.group.epoch}: {reason}; tried again every time")
        self._not_saved = reason

    def _tell_saved_again(self) -> None:
        if self._not_saved:
            self._events.note(f"checkpoints are written again, after epoch {self.group.epoch}")
        self._not_saved = ""


def outline_of(group: GroupRun) -> GroupOutline:
    """What a driver needs to know about ``group``."""
    members = []
    for task, member in zip(group.tasks, group.members, strict=True):
        watched, columns = f"val_{member.stack.metric}", member.stack.columns
        score = columns.index(watched) if watched in columns else -1
        graph = task.graph if isinstance(task.graph, str) else f"object {hash(graph_key(task))}"
        about = {"columns": tuple(columns), "lower": lower_is_better(watched)}
        members.append(MemberOutline(task.label, task.epochs, score, f"{watched} on {graph}", **about))
    return GroupOutline(tuple(members), group.device.type, group.plan.compiled)
