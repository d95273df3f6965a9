"""Driver: decide for one group from its updates alone. Reads no clock and no device; imports no torch.

The same updates and requests give the same decisions, wherever the driver runs.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.decision import RUNNING, Decision, GroupOutline, MemberOutline, Requests, Stop, Update
from weft.core.errors import ModelError, SpecError, WeftError
from weft.core.settings import Callback, Moment
from weft.core.task import Task, name_of
from weft.planner.division.adapting import Adapter
from weft.planner.grouping.step_options import LEAVE_EVERY, Pace, pays_to_leave
from weft.planner.pruning import Policy, every

# ---- Call the callbacks of a member after an epoch, and collect what they ask for.

ByMember = Mapping[str, tuple[Callback, ...]]


def callbacks_of(tasks: Sequence[Task]) -> dict[str, tuple[Callback, ...]]:
    """The callbacks of tasks by their names, each a function; empty without any."""
    return {task.label: tuple(_found(task, one) for one in task.callbacks) for task in tasks if task.callbacks}


def _found(task: Task, callback: Callback) -> Callback:
    if not isinstance(callback.call, str):
        return callback
    from weft.runtime.modules.settings import import_from  # brings in torch, which a driver does without

    return replace(callback, call=import_from(task.label, "callbacks", callback.call))


def call(callbacks: Sequence[Callback], name: str, columns: Sequence[str], rows: Sequence[Sequence[float]]) -> Moment:
    """Call those of a member's callbacks that are due after the epochs ``rows``; what they asked for."""
    history = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    moment = Moment(name, len(rows), history)
    for callback in callbacks:
        if callback.is_due(moment.epoch):
            _call(callback.call, moment)
    return moment


def _call(function: Any, moment: Moment) -> None:
    try:
        function(moment)
    except WeftError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"task {moment.task!r}: callback {name_of(function)} raised {type(error).__name__}: {error} "
            f"(line {last.lineno} of {last.filename})"
        ) from error


def epochs_to_next(callbacks: Sequence[Callback], epoch: int) -> list[int]:
    """Epochs from ``epoch`` to the next call of each callback that is called again."""
    found = (callback.next_after(epoch) for callback in callbacks)
    return [after - epoch for after in found if after is not None]


LOOK_SECONDS = 0.2  # often enough to feel live; rare enough that the GPU never idles
CHECKPOINT_SECONDS = 30.0
GROWTH = 8  # how many times longer the next period may be than the last: the first epochs are no measure
NOTHING = Requests()


@dataclass
class Standing:
    """A member as its driver knows it: its validation metric per epoch (NaN: not measured) and how it stands."""

    outline: MemberOutline
    scores: list[float] = field(default_factory=list)
    rows: list[tuple[float, ...]] = field(default_factory=list)
    status: str = RUNNING
    present: bool = True

    @property
    def name(self) -> str:
        """What the member is called."""
        return self.outline.name

    @property
    def running(self) -> bool:
        """Whether there is something left to train."""
        return self.status == RUNNING

    @property
    def epoch(self) -> int:
        """Epochs trained that count."""
        return len(self.scores)

    def take(self, update: Update) -> None:
        """Take over what a session reports."""
        column = self.outline.score
        del self.scores[update.first :]
        sign = -1.0 if self.outline.lower else 1.0  # whoever compares scores takes more for better
        self.scores += [sign * row[column] if column >= 0 else math.nan for row in update.rows]
        self.rows[update.first :] = update.rows
        self.status, self.present = update.status, update.present

    def measured(self, epochs: int) -> list[float]:
        """The validation metric of the first ``epochs`` epochs, where it was measured."""
        return [score for score in self.scores[:epochs] if math.isfinite(score)]


@dataclass(frozen=True)
class DriverOptions:
    """``checkpoint_every``: seconds of training between checkpoints. ``policy``: who is pruned.

    ``period`` fixes the number of epochs between two updates, which otherwise follows the speed of the group so that an
    update comes every ``look_seconds``; only the number of events depends on it.
    """

    checkpoint_every: float = CHECKPOINT_SECONDS
    policy: Policy | None = None
    period: int | None = None
    look_seconds: float | None = None  # None: LOOK_SECONDS
    leave_every: int | None = None  # None: LEAVE_EVERY


class Driver:
    """Decides what a session of ``group`` does next.

    ``board`` has the standings of all members that have begun, in whichever group: a pruning policy compares them.
    ``adapter`` divides the batches of the group anew when their phases drift. ``callbacks``: of members, by name.
    """

    def __init__(
        self,
        group: GroupOutline,
        options: DriverOptions | None = None,
        board: dict[str, Standing] | None = None,
        adapter: Adapter | None = None,
        callbacks: ByMember | None = None,
    ) -> None:
        self._callbacks, self._rates = dict(callbacks or {}), dict[str, float]()
        self._adapter, self._adapted = adapter, dict[str, Any]()
        self._group, self._options = group, options or DriverOptions()
        self._look_seconds = LOOK_SECONDS if self._options.look_seconds is None else self._options.look_seconds
        self._leave_every = self._options.leave_every or LEAVE_EVERY
        self._board = {} if board is None else board
        self._members = {member.name: Standing(member) for member in group.members}
        self._board.update(self._members)
        self._epoch, self._period = 0, self._options.period or 1
        self._begun = False  # the first updates say where the group stands, which may be in the middle
        self._pace, self._prepare_seconds = Pace(), 0.0
        self._unsaved_seconds, self._paused = 0.0, False

    def decide(self, updates: Sequence[Update], requests: Requests = NOTHING) -> Decision:
        """What to do after ``updates``, given the requests from outside."""
        trained = self._take(updates)
        stops = self._cancelled(requests) + (self._pruned() if trained else [])
        self._rates = {}
        stops += self._called_back() if trained else []
        drop = self._leaving()
        for name in drop:
            self._members[name].present = False
        return self._next(stops, drop, requests, trained)

    # ---- learning ------------------------------------------------------------------------------------

    def _take(self, updates: Sequence[Update]) -> int:
        """Take over updates; how many epochs the group has trained since the last ones."""
        for update in updates:
            if update.member not in self._members:
                raise SpecError(f"update of {update.member!r}: this driver knows {', '.join(self._members)}")
            self._members[update.member].take(update)
        if not updates:
            return 0
        one = updates[0]
        trained = one.epochs - self._epoch if self._begun else 0
        self._begun, self._epoch = True, one.epochs
        self._adapted = {}
        if trained:
            self._learn_pace(one, trained)
            self._adapt(one, trained)
        return trained

    def _learn_pace(self, update: Update, trained: int) -> None:
        self._unsaved_seconds += update.seconds + update.prepare_seconds
        self._prepare_seconds = update.prepare_seconds or self._prepare_seconds
        epoch_seconds = update.seconds / trained
        self._pace = self._pace.after(len(self._present()), epoch_seconds)
        if self._options.period is None:
            wanted = int(self._look_seconds / max(epoch_seconds, 1e-9))
            self._period = max(1, min(wanted, GROWTH * self._period))

    def _adapt(self, update: Update, trained: int) -> None:
        """Whether to divide batches anew, and what the journal is to say of it.

        A device that prepares all batches in captured steps measures no phases; what the last change gained is told,
        and the host tried again, all the same.
        """
        if self._adapter is None:
            return
        change = self._adapter.observe(update.phases, trained)
        notes = self._adapter.told(update.seconds / trained, change)
        self._adapted = {"divide": None if change is None else change.division.to_dict(), "notes": tuple(notes)}

    def _present(self) -> list[Standing]:
        return [member for member in self._members.values() if member.present]

    def _running(self) -> list[Standing]:
        return [member for member in self._members.values() if member.running]

    # ---- who ends ------------------------------------------------------------------------------------

    def _cancelled(self, requests: Requests) -> list[Stop]:
        return [
            self._stop(member, "cancelled", member.epoch)
            for member in self._running()
            if requests.cancelled(member.name)
        ]

    def _pruned(self) -> list[Stop]:
        """Called at fixed epochs, so that decisions do not depend on how often updates come."""
        policy, running = self._options.policy, {member.name: member for member in self._running()}
        if policy is None or self._epoch % every(policy) or not running:
            return []
        peers = next(iter(running.values())).outline.peers
        comparable = [member for member in self._board.values() if member.outline.peers == peers]
        scores = {member.name: member.measured(self._epoch) for member in comparable}
        names = _checked(policy(self._epoch, scores, list(running)), running)
        return [self._stop(running[name], "pruned", self._epoch) for name in dict.fromkeys(names)]

    def _called_back(self) -> list[Stop]:
        """Call the callbacks of members that run: some stop, some go on at another rate."""
        stops = []
        for member in self._running():
            moment = call(self._callbacks.get(member.name, ()), member.name, member.outline.columns, member.rows)
            if moment.factor != 1.0:
                self._rates[member.name] = moment.factor
            if moment.reason is not None:
                stop = self._stop(member, "stopped", member.epoch)
                reason = f" by a callback: {moment.reason}" if moment.reason else " by a callback"
                stops.append(replace(stop, message=stop.message + reason))
        return stops

    def _stop(self, member: Standing, status: str, epoch: int) -> Stop:
        member.status = status
        return Stop(member.name, status, f"task {member.name!r}: {status} after epoch {epoch}")

    # ---- who leaves the step -------------------------------------------------------------------------

    @property
    def _leaves_by_epoch(self) -> bool:
        """Whether members leave at fixed epochs: a smaller step may round differently, and numbers on a CPU are to be
        the same bits however fast it is and wherever it was interrupted. Rebuilding the step is cheap on a CPU, except
        when compiled; members never leave a compiled step."""
        return self._group.device == "cpu"

    def _leaving(self) -> tuple[str, ...]:
        present = self._present()
        ended = [member for member in present if not member.running]
        return tuple(member.name for member in ended) if self._time_to_leave(len(ended), len(present)) else ()

    def _time_to_leave(self, ended: int, present: int) -> bool:
        if self._leaves_by_epoch:
            at_hand = self._epoch % self._leave_every == 0 and not self._group.compiled
            return 0 < ended < present and at_hand
        left = max((member.outline.epochs - member.epoch for member in self._running()), default=0)
        return pays_to_leave(ended, present, left, self._pace, self._prepare_seconds)

    # ---- what next -----------------------------------------------------------------------------------

    def _next(self, stops: list[Stop], drop: tuple[str, ...], requests: Requests, trained: int) -> Decision:
        about = {"stop": tuple(stops), "drop": drop, "rates": self._rates, **self._adapted}
        was_paused, self._paused = self._paused, False
        if not self._running():
            return Decision(self._epoch, **about, save=not self._alone_and_diverged, finish=True)
        if requests.interrupt or requests.preempt:
            reason = "interrupted" if requests.interrupt else "preempted"
            return Decision(self._epoch, **about, save=True, finish=True, reason=reason)
        if requests.pause:
            self._paused = True
            return Decision(self._epoch, **about, save=self._saved(not was_paused or bool(stops)), pause=True)
        due = trained > 0 and self._unsaved_seconds >= self._options.checkpoint_every
        return Decision(self._epoch, **about, save=self._saved(due), advance=self._epochs_to_train())

    def _saved(self, due: bool) -> bool:
        self._unsaved_seconds = 0.0 if due else self._unsaved_seconds
        return due

    def _epochs_to_train(self) -> int:
        """Epochs to the next update: never past one at which a policy is called or members may leave."""
        ends, policy = [self._period if self._adapter is None else 1], self._options.policy
        if policy is not None:
            ends.append(every(policy) - self._epoch % every(policy))
        for member in self._running():
            ends += epochs_to_next(self._callbacks.get(member.name, ()), self._epoch)
        if self._leaves_by_epoch and len(self._present()) > 1:
            ends.append(self._leave_every - self._epoch % self._leave_every)
        return min(ends)

    @property
    def _alone_and_diverged(self) -> bool:
        """Whether the state is no longer a number, all of it, and so not worth resuming."""
        return [member.status for member in self._members.values()] == ["diverged"]


def _checked(answer: Any, running: Mapping[str, Any] | Collection[str]) -> list[str]:
    """The names that a policy answered; None: no member."""
    if answer is not None and (isinstance(answer, str) or not isinstance(answer, Iterable)):
        raise SpecError(f"prune returned {answer!r}; expected a list of names of running members")
    names = list(answer or ())
    unknown = [name for name in names if name not in running]
    if unknown:
        raise SpecError(f"prune returned {unknown[0]!r}; expected names of running members: {', '.join(running)}")
    return names
