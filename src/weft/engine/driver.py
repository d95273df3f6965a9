"""Driver: decide for one group from its updates alone. Reads no clock and no device; imports no torch.

The same updates and requests give the same decisions, wherever the driver runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.core.decision import Decision, GroupOutline, Requests, Stop, Update
from weft.core.errors import ModelError, SpecError, WeftError
from weft.core.member import Member
from weft.core.run_options import RunOptions
from weft.core.settings import Callback, CallbackContext
from weft.core.task import Task, name_of
from weft.planner.grouping.step_options import LEAVE_EVERY, StepPace, pays_to_leave
from weft.planner.pruning import every, policy_for

ByMember = Mapping[str, tuple[Callback, ...]]


def callbacks_of(tasks: Sequence[Task]) -> dict[str, tuple[Callback, ...]]:
    """The callbacks of tasks by their names, each a function; empty without any."""
    functions: dict[str, tuple[Callback, ...]] = {}
    for task in tasks:
        for callback in task.callbacks:
            if isinstance(callback.call, str):
                from weft.runtime.modules.settings import import_from  # imports torch, which a driver does without

                callback = replace(callback, call=import_from(task.label, "callbacks", callback.call))
            functions[task.label] = (*functions.get(task.label, ()), callback)
    return functions


def call(callbacks: Sequence[Callback], member: Member, make_model: Callable[[str], Any] | None) -> CallbackContext:
    """Call those of a member's callbacks that are due after its last epoch; return what they requested."""
    columns, name = enumerate(member.outline.columns), member.name
    history = {column: [row[index] for row in member.rows] for index, column in columns}
    context = CallbackContext(name, len(member.rows), history, make_model)
    for callback in callbacks:
        if not callback.is_due(context.epoch):
            continue
        try:
            callback.call(context)  # type: ignore[operator]
        except WeftError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ModelError(
                f"task {name!r}: callback {name_of(callback.call)} raised {type(error).__name__}: {error} "
                f"(line {last.lineno} of {last.filename})"
            ) from error
    return context


POLL_SECONDS = 0.2  # often enough to feel live; rare enough that the GPU never idles
GROWTH = 8  # how many times longer the next period may be than the last: the first epochs are no measure
NOTHING = Requests()
DEFAULTS = RunOptions()


class Driver:
    """Decides what a session of ``group`` does next.

    ``board`` has all members that have begun, of every group: a pruning policy compares them.
    ``callbacks``: of members, by name;
    ``make_model`` makes the model of a member that a callback reads. ``period`` fixes the number of epochs between two
    updates, which otherwise follows the speed of the group so that an update comes every ``POLL_SECONDS``; only the
    number of events depends on it.
    """

    def __init__(
        self,
        group: GroupOutline,
        options: RunOptions = DEFAULTS,
        board: dict[str, Member] | None = None,
        callbacks: ByMember | None = None,
        make_model: Callable[[str], Any] | None = None,
        period: int | None = None,
    ) -> None:
        self._callbacks = dict(callbacks or {})
        self._group, self._checkpoint_every, self._policy = group, options.checkpoint_every, policy_for(options.prune)
        self._make_model, self._fixed_period = make_model, period
        self._board = {} if board is None else board
        self._members = {member.name: Member(member) for member in group.members}
        self._board.update(self._members)
        self._epoch, self._period = 0, period or 1
        self._begun = False  # the first updates say where the group stands, which may be in the middle
        self._pace, self._prepare_seconds = StepPace(), 0.0
        self._unsaved_seconds, self._paused = 0.0, False

    def decide(self, updates: Sequence[Update], requests: Requests = NOTHING) -> Decision:
        """What to do after ``updates``, given the requests from outside."""
        trained = self._learn(updates)
        stops = [self._stop(m, "cancelled", m.epoch) for m in self._running() if requests.cancelled(m.name)]
        rates: dict[str, float] = {}
        if trained:
            stops += self._pruned()
            stops += self._called_back(rates)
        drop = self._leaving()
        for name in drop:
            self._members[name].present = False
        about: dict[str, Any] = {"stop": tuple(stops), "drop": drop, "rates": rates}
        was_paused, self._paused = self._paused, False
        if not self._running():
            # The state of a lone member that diverged is no longer a number: not worth resuming.
            worth_saving = [member.status for member in self._members.values()] != ["diverged"]
            return Decision(self._epoch, **about, save=worth_saving, finish=True)
        if requests.interrupt or requests.preempt:
            reason = "interrupted" if requests.interrupt else "preempted"
            return Decision(self._epoch, **about, save=True, finish=True, reason=reason)
        self._paused = requests.pause
        if self._paused:
            save = not was_paused or bool(stops)
        else:
            save = trained > 0 and self._unsaved_seconds >= self._checkpoint_every
        if save:
            self._unsaved_seconds = 0.0
        if self._paused:
            return Decision(self._epoch, **about, save=save, pause=True)
        # Epochs to the next update: never past one at which a policy is called or members may leave.
        ends, policy = [self._period], self._policy
        if policy is not None:
            ends.append(every(policy) - self._epoch % every(policy))
        for member in self._running():
            later = (callback.next_after(self._epoch) for callback in self._callbacks.get(member.name, ()))
            ends += [epoch - self._epoch for epoch in later if epoch is not None]
        if self._group.device == "cpu" and len(self._present()) > 1:
            ends.append(LEAVE_EVERY - self._epoch % LEAVE_EVERY)
        epochs_to_train = min(ends)
        return Decision(self._epoch, **about, save=save, advance=epochs_to_train)

    def _learn(self, updates: Sequence[Update]) -> int:
        """Take over updates; epochs trained since the last ones."""
        for update in updates:
            if update.member not in self._members:
                raise SpecError(f"update of {update.member!r}: this driver knows {', '.join(self._members)}")
            member = self._members[update.member]
            member.take(update)
            member.status, member.present = update.status, update.present
        if not updates:
            return 0
        latest = updates[0]
        trained = latest.epochs - self._epoch if self._begun else 0
        self._begun, self._epoch = True, latest.epochs
        if not trained:
            return 0
        self._unsaved_seconds += latest.seconds + latest.prepare_seconds
        self._prepare_seconds = latest.prepare_seconds or self._prepare_seconds
        epoch_seconds = latest.seconds / trained
        self._pace = self._pace.after(len(self._present()), epoch_seconds)
        if self._fixed_period is None:
            self._period = max(1, min(int(POLL_SECONDS / max(epoch_seconds, 1e-9)), GROWTH * self._period))
        return trained

    def _present(self) -> list[Member]:
        return [member for member in self._members.values() if member.present]

    def _running(self) -> list[Member]:
        return [member for member in self._members.values() if member.running]

    def _pruned(self) -> list[Stop]:
        """Called at fixed epochs, so that decisions do not depend on how often updates come."""
        policy, running = self._policy, {member.name: member for member in self._running()}
        if policy is None or self._epoch % every(policy) or not running:
            return []
        peers = next(iter(running.values())).outline.peers
        comparable = [member for member in self._board.values() if member.outline.peers == peers]
        scores = {member.name: member.scores(self._epoch) for member in comparable}
        names = _checked(policy(self._epoch, scores, list(running)), running)
        return [self._stop(running[name], "pruned", self._epoch) for name in dict.fromkeys(names)]

    def _called_back(self, rates: dict[str, float]) -> list[Stop]:
        """Call the callbacks of running members; ``rates`` gets factors, the result has those that stop."""
        stops = []
        for member in self._running():
            context = call(self._callbacks.get(member.name, ()), member, self._make_model)
            if context.factor != 1.0:
                rates[member.name] = context.factor
            if context.reason is not None:
                stop = self._stop(member, "stopped", member.epoch)
                reason = f" by a callback: {context.reason}" if context.reason else " by a callback"
                stops.append(replace(stop, message=stop.message + reason))
        return stops

    def _stop(self, member: Member, status: str, epoch: int) -> Stop:
        member.status = status
        return Stop(member.name, status, f"task {member.name!r}: {status} after epoch {epoch}")

    def _leaving(self) -> tuple[str, ...]:
        """Ended members to take out of the step now.

        On a CPU they leave at fixed epochs: a smaller step may round differently, and numbers there are to be the same
        bits however fast it is and wherever it was interrupted. Rebuilding a step is cheap on a CPU, except a compiled
        one, which members never leave.
        """
        present = self._present()
        ended = [member for member in present if not member.running]
        if self._group.device == "cpu":
            at_hand = self._epoch % LEAVE_EVERY == 0 and not self._group.compiled
            leave = 0 < len(ended) < len(present) and at_hand
        else:
            remaining = max((member.outline.epochs - member.epoch for member in self._running()), default=0)
            leave = pays_to_leave(len(ended), len(present), remaining, self._pace, self._prepare_seconds)
        return tuple(member.name for member in ended) if leave else ()


def _checked(answer: Any, running: Mapping[str, Any] | Collection[str]) -> list[str]:
    """The names that a policy answered; None: no member."""
    if answer is not None and (isinstance(answer, str) or not isinstance(answer, Iterable)):
        raise SpecError(f"prune returned {answer!r}; expected a list of names of running members")
    names = list(answer or ())
    unknown = [name for name in names if name not in running]
    if unknown:
        raise SpecError(f"prune returned {unknown[0]!r}; expected names of running members: {', '.join(running)}")
    return names
