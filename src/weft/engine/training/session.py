"""Session: drive a group to its end. Looks at the device now and then, tells, saves, and lets ended members go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.training.early_stops import EarlyStops
from weft.engine.training.event_source import EventSource
from weft.engine.training.interrupt import Interrupted, Interruption
from weft.engine.training.member_progress import MemberProgress
from weft.planner.grouping.repacking import LEAVE_EVERY, Pace, pays_to_leave
from weft.runtime.group import GroupRun, MemberUpdate

LOOK_SECONDS = 0.2  # often enough to feel live; rare enough that a GPU never waits for the host
CHECKPOINT_SECONDS = 30.0

Save = Callable[[GroupRun, dict[str, Any]], Path]


class Session:
    """One group, the tracks of its members, and where it is saved and told.

    ``save(group, about)`` writes a checkpoint (None: nothing is kept). ``period`` fixes the number of epochs between
    looks, which otherwise follows the speed of the group; only the number of events depends on it.
    """

    def __init__(
        self,
        group: GroupRun,
        events: EventSource,
        save: Save | None = None,
        early_stops: EarlyStops | None = None,
        checkpoint_every: float = CHECKPOINT_SECONDS,
        period: int | None = None,
    ) -> None:
        self.group, self._events, self._save_to = group, events, save
        self._endings = early_stops or EarlyStops()
        self._checkpoint_every, self._fixed_period = checkpoint_every, period
        self._period = period or 1
        self._told_notes = 0
        self._epoch_seconds, self._prepare_seconds, self._pace = 0.0, 0.0, Pace()
        self._whole_epochs, self._whole_seconds = 0, 0.0  # with every member in the step, set-up left out
        self.tracks = [MemberProgress.of(group, index) for index in range(len(group.tasks))]
        self._endings.board.update({track.name: track for track in self.tracks})

    @property
    def finished(self) -> bool:
        """Whether no member has anything left to train."""
        return not any(track.running for track in self.tracks)

    @property
    def measured(self) -> dict[str, float]:
        """Seconds of an epoch of the whole group, and over how many it was measured; empty where none was."""
        if not self._whole_epochs:
            return {}
        return {"epoch_seconds": self._whole_seconds / self._whole_epochs, "epochs": self._whole_epochs}

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

    # ---- doing ---------------------------------------------------------------------------------------

    def train(self, interruption: Interruption) -> None:
        """Train until every member has ended, or save what there is and raise Interrupted."""
        if self.finished:
            return
        saved_at = time.monotonic()
        while not self.finished:
            self._advance(interruption)
            if interruption.requested() and not self.finished:
                self._leave(interruption)
            if time.monotonic() - saved_at >= self._checkpoint_every:
                self.save()
                saved_at = time.monotonic()
        if not self._alone_and_diverged:
            self.save(finished=True)

    @property
    def _alone_and_diverged(self) -> bool:
        """Whether the state is no longer a number, all of it, and so not worth resuming."""
        return len(self.tracks) == 1 and self.tracks[0].status == "diverged"

    def _advance(self, interruption: Interruption) -> None:
        steady, whole = self._prepare(), len(self.group.present) == len(self.tracks)
        running, before = [track for track in self.tracks if track.running], self.group.epoch
        begin = time.perf_counter()
        seen = self.group.advance(self._next_period(), interruption.requested)
        seconds = time.perf_counter() - begin
        trained = self._take(seen, (seconds + (0.0 if steady else self._prepare_seconds)) / len(running), steady)
        if steady and whole:
            self._whole_epochs += self.group.epoch - before
            self._whole_seconds += seconds
        self._epoch_seconds = seconds / max(self.group.epoch - before, 1)
        self._pace = self._pace.after(len(self.group.present), self._epoch_seconds)
        self._end_members()
        self._tell(running, trained, seconds)
        self._adapt()

    def _take(self, seen: list[MemberUpdate], share: float, steady: bool) -> int:
        """Let every running member take over its progress and ``share`` of seconds; the epochs of all together."""
        trained = 0
        for track, progress in zip(self.tracks, seen, strict=True):
            if track.running:
                before = track.epoch
                track.take(progress)
                track.charge(share, track.epoch - before, steady)
                trained += track.epoch - before
        return trained

    def _prepare(self) -> bool:
        """Make the step ready where it is not; whether the epochs to come are worth timing."""
        if self.group.started:
            return True
        begin = time.perf_counter()
        self.group.prepare()
        self._prepare_seconds = time.perf_counter() - begin
        return False

    def _next_period(self) -> int:
        epoch, until = self.group.epoch, self._endings.until_next(self.group.epoch)
        ends = [] if until is None else [until]
        if self._leaves_by_epoch and len(self.group.present) > 1:
            ends.append(LEAVE_EVERY - epoch % LEAVE_EVERY)
        return min([self._period, *ends])

    def _adapt(self) -> None:
        if self._fixed_period is None:
            wanted = int(LOOK_SECONDS / max(self._epoch_seconds, 1e-9))
            self._period = max(1, min(wanted, 8 * self._period))

    # ---- members that end ----------------------------------------------------------------------------

    def _end_members(self) -> None:
        """Stop who is to stop, and take the ended ones out of the step where that pays."""
        stopped = self._endings.decide(self.group.epoch, self.tracks)
        self.group.stop(index for index, track in enumerate(self.tracks) if track in stopped)
        present = self.group.present
        ended = [member.index for member in present if not self.tracks[member.index].running]
        if self._time_to_leave(len(ended), len(present)):
            self.group.drop(ended)

    @property
    def _leaves_by_epoch(self) -> bool:
        """Whether members leave at fixed epochs: a smaller step may round differently, and numbers on a CPU are to be
        the same bits however fast it is and wherever it was interrupted. There a new step costs next to nothing, unless
        it is compiled: from such a one nobody leaves."""
        return self.group.device.type == "cpu"

    def _time_to_leave(self, ended: int, present: int) -> bool:
        if self._leaves_by_epoch:
            at_hand = self.group.epoch % LEAVE_EVERY == 0 and not self.group.plan.compiled
            return 0 < ended < present and at_hand
        left = max((track.task.epochs - track.epoch for track in self.tracks if track.running), default=0)
        return pays_to_leave(ended, present, left, self._pace, self._prepare_seconds)

    # ---- telling and saving --------------------------------------------------------------------------

    def _tell(self, running: list[MemberProgress], trained: int, seconds: float) -> None:
        for note in self.group.notes[self._told_notes :]:
            self._events.note(note)
        self._told_notes = len(self.group.notes)
        self._events.progress(running, self.group.epoch, trained, seconds)
        for track in running:
            if not track.running:
                self._events.ended(track)

    def save(self, finished: bool = False) -> Path | None:
        """Write a checkpoint, where one is wanted; its path."""
        if self._save_to is None:
            return None
        about = {"members": [track.about() for track in self.tracks], "finished": finished}
        path = self._save_to(self.group, about)
        self._events.checkpoint(path, self.group.epoch)
        return path

    def _leave(self, interruption: Interruption) -> None:
        path = self.save()
        self._events.interrupted(self.group.epoch)
        raise Interrupted(self.group.epoch, path.parent if path else None, interruption.number or 2)
