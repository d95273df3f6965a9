"""Driver: decide for one group from what its members recorded. Reads no clock and no device; imports no torch.

The same records and requests give the same decisions.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.decision import Decision, Progress, Requests, Stop
from weft.core.errors import ModelError, SpecError, WeftError
from weft.core.member import Member
from weft.core.run_options import RunOptions
from weft.core.settings import Callback, CallbackContext
from weft.core.task import Task, name_of
from weft.planner.grouping.step_options import LEAVE_EVERY, StepPace, pays_to_leave
from weft.planner.pruning import Policy, Rivals, every, policy_for

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


# Decisions come after whole epochs and depend on records alone: ranks that each read their own clock would decide
# differently and wait for each other for ever in a collective. A request takes effect after about this much training.
POLL_SECONDS = 0.2  # often enough to feel live; rare enough that the GPU never idles
GROWTH = 8  # how many times longer the next period may be than the last: the first epochs are no measure
NOTHING = Requests()
DEFAULTS = RunOptions()


@dataclass
class Driver:
    """Decides what a session of ``members`` does next.

    ``device`` and ``compiled``: of the group's step. ``board`` has all members that have begun, of every group: a
    pruning policy compares them, with the ``rivals``, members of the same sweep in other processes. ``callbacks``: of
    members, by name; ``make_model`` makes the model of a member that a callback reads, ``gradient_norm`` reads that of
    its last step. ``period`` fixes the number of epochs between two decisions, which otherwise follows the speed of the
    group so that one comes every ``POLL_SECONDS``; only the number of events depends on it.
    """

    members: list[Member]
    options: RunOptions = DEFAULTS
    device: str = "cpu"
    compiled: bool = False
    board: dict[str, Member] = field(default_factory=dict)
    callbacks: ByMember = field(default_factory=dict)
    make_model: Callable[[str], Any] | None = None
    gradient_norm: Callable[[str], float] | None = None
    period: int | None = None
    rivals: Rivals | None = None

    def __post_init__(self) -> None:
        self.board.update({member.name: member for member in self.members})
        self._epoch, self._period = 0, self.period or 1
        self._begun = False  # the first decision may be in the middle of a training
        self._pace, self._prepare_seconds = StepPace(), 0.0
        self._unsaved_seconds, self._paused = 0.0, False
        self._stops: dict[str, Stop] = {}  # of the decision at hand

    @property
    def _policy(self) -> Policy | None:
        return policy_for(self.options.prune) if self.rivals is None else self.rivals.policy

    def decide(self, progress: Progress, requests: Requests = NOTHING) -> Decision:
        """What to do now that the group is as far as ``progress`` says, given the requests from outside."""
        trained = self._learn(progress)
        self._stops = {}
        for member in self._running():
            if requests.cancelled(member.name):
                self._stop(member, "cancelled", member.epoch)
        rates: dict[str, float] = {}
        logged: dict[str, dict[str, float]] = {}
        if trained or (self.rivals is not None and self._epoch):  # a run that left while it waited asks again
            self._prune()
        if trained:
            self._call_back(rates, logged)
        drop = self._leaving()
        decided: dict[str, Any] = {"stop": tuple(self._stops.values()), "drop": drop, "rates": rates, "logged": logged}
        was_paused, self._paused = self._paused, False
        if not self._running():
            # The state of a lone member that diverged is no longer a number: not worth resuming.
            worth_saving = [member.status for member in self.members] != ["diverged"]
            return Decision(self._epoch, **decided, save=worth_saving, finish=True)
        if requests.interrupt or requests.preempt:
            reason = "interrupted" if requests.interrupt else "preempted"
            return Decision(self._epoch, **decided, save=True, finish=True, reason=reason)
        save = trained > 0 and self._unsaved_seconds >= self.options.checkpoint_every
        if requests.pause:
            self._paused, save = True, not was_paused or bool(self._stops)
        if save:
            self._unsaved_seconds = 0.0
        if self._paused:
            return Decision(self._epoch, **decided, save=save, pause=True)
        # Epochs to the next decision: never past one at which a policy is called or members may leave.
        ends, policy = [self._period], self._policy
        if policy is not None:
            ends.append(every(policy) - self._epoch % every(policy))
        for member in self._running():
            later = (callback.next_after(self._epoch) for callback in self.callbacks.get(member.name, ()))
            ends += [epoch - self._epoch for epoch in later if epoch is not None]
        if self.device == "cpu" and sum(member.present for member in self.members) - len(drop) > 1:
            ends.append(LEAVE_EVERY - self._epoch % LEAVE_EVERY)
        return Decision(self._epoch, **decided, save=save, advance=min(ends))

    def _learn(self, progress: Progress) -> int:
        """Learn how long epochs take; returns the epochs trained since the last time."""
        trained = progress.epochs - self._epoch if self._begun else 0
        self._begun, self._epoch = True, progress.epochs
        if not trained:
            return 0
        self._unsaved_seconds += progress.seconds + progress.prepare_seconds
        self._prepare_seconds = progress.prepare_seconds or self._prepare_seconds
        epoch_seconds = progress.seconds / trained
        self._pace = self._pace.after(sum(member.present for member in self.members), epoch_seconds)
        if self.period is None:
            self._period = max(1, min(int(POLL_SECONDS / max(epoch_seconds, 1e-9)), GROWTH * self._period))
        return trained

    def _runs(self, member: Member) -> bool:
        return member.running and member.name not in self._stops

    def _running(self) -> list[Member]:
        return [member for member in self.members if self._runs(member)]

    def _stop(self, member: Member, status: str, epoch: int, reason: str = "") -> None:
        message = f"task {member.name!r}: {status} after epoch {epoch}{reason}"
        self._stops[member.name] = Stop(member.name, status, message)

    def _prune(self) -> None:
        """Called at fixed epochs, so that decisions do not depend on how often they come."""
        policy, running = self._policy, {member.name: member for member in self._running()}
        if policy is None or self._epoch % every(policy) or not running:
            return
        peers = next(iter(running.values())).peers
        comparable = [member for member in self.board.values() if member.peers == peers]
        scores = {member.name: member.scores(self._epoch) for member in comparable}
        if self.rivals is not None:
            rivals = self.rivals.at(self._epoch, self.board.values(), peers)
            if rivals is None:
                return
            scores |= rivals
        answer = policy(self._epoch, scores, list(running))
        if answer is not None and (isinstance(answer, str) or not isinstance(answer, Iterable)):
            raise SpecError(f"prune returned {answer!r}; expected a list of names of running members")
        for name in list(answer or ()):
            if name not in running:
                raise SpecError(f"prune returned {name!r}; expected names of running members: {', '.join(running)}")
            self._stop(running[name], "pruned", self._epoch)

    def _call_back(self, rates: dict[str, float], logged: dict[str, dict[str, float]]) -> None:
        """Call the callbacks that are due, of running members and of those whose last epoch this was.

        ``rates`` gets factors of learning rates, ``logged`` what was logged.
        """
        for member in self.members:
            ends_now = member.status in ("finished", "stopped") and member.epoch == self._epoch
            if not self._runs(member) and not ends_now:
                continue
            name, due = member.name, [c for c in self.callbacks.get(member.name, ()) if c.is_due(member.epoch)]
            if not due:
                continue
            history = member.history()
            del history["epoch"]
            context = CallbackContext(name, member.epoch, history, self.make_model, self.gradient_norm)
            for callback in due:
                try:
                    callback.call(context)
                except WeftError:
                    raise
                except Exception as error:
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    raise ModelError(
                        f"task {name!r}: callback {name_of(callback.call)} raised {type(error).__name__}: {error} "
                        f"(line {last.lineno} of {last.filename})"
                    ) from error
            if context.logged:
                logged[name] = context.logged
            if ends_now:  # nothing is left to change
                continue
            if context.factor != 1.0:
                rates[name] = context.factor
            if context.reason is not None:
                reason = f" by a callback: {context.reason}" if context.reason else " by a callback"
                self._stop(member, "stopped", member.epoch, reason)

    def _leaving(self) -> tuple[str, ...]:
        """Ended members to take out of the step now.

        On a CPU they leave at fixed epochs: a smaller step may round differently, and numbers there are to be the same
        bits however fast it is and wherever it was interrupted. Rebuilding a step is cheap on a CPU, except a compiled
        one, which members never leave.
        """
        present = [member for member in self.members if member.present]
        ended = [member for member in present if not self._runs(member)]
        if self.device == "cpu":
            at_hand = self._epoch % LEAVE_EVERY == 0 and not self.compiled
            leave = 0 < len(ended) < len(present) and at_hand
        else:
            remaining = max((member.epochs - member.epoch for member in self._running()), default=0)
            leave = pays_to_leave(len(ended), len(present), remaining, self._pace, self._prepare_seconds)
        return tuple(member.name for member in ended) if leave else ()
