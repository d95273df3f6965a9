"""TunedDriver: let a tuner decide for the rows of a group which trials they train. Imports no torch and reads no clock.

The same rows from the device and the same requests give the same decisions, whenever they come: the tuner is called at
fixed epochs of the group, and everything that it was told and answered is a journal, which is repeated after a resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.decision import Requests, Start, Stop
from weft.core.errors import DoesNotFitError, SpecError, WeftError
from weft.core.member import Member
from weft.core.settings import Rule, lower_is_better
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.driver import Driver, blamed
from weft.planner.grouping.trials import TrialStack, stack_for
from weft.planner.tuning import PARENT, SCORE, Search, trial_name

WAITING = "waiting"  # of a row without a trial


def score_column(member: Member) -> str:
    """The column that a tuner's scores are of: the validation metric, or the training loss without such nodes."""
    watched = f"val_{member.metric}"
    return watched if watched in member.columns else "train_loss"


@dataclass
class Trial:
    """A trial that was asked for: its task, the stack that it trains in, and the trial that it continues."""

    task: Task
    stack: int
    parent: str | None = None
    begun: int = 0  # the epoch of its parent at which it was copied


@dataclass
class TunedDriver(Driver):
    """Decides what a session of rows does next, for ``tuner``.

    ``members`` has a member per row, of stack ``stack_of_row``. ``trials``: those that were asked for, by name;
    ``search``: what they are chosen in. ``journal``: calls of the tuner so far, as lines of JSON.
    ``failed``: trials that cannot be trained, by name: the task, if there is one, and the reason. ``waiting``: those
    without a free row.
    """

    tuner: Any = None
    sweep: Sweep = field(kw_only=True)
    stacks: Sequence[TrialStack] = ()
    stack_of_row: Sequence[int] = ()
    search: Search = field(kw_only=True)
    trials: dict[str, Trial] = field(default_factory=dict)
    journal: list[str] = field(default_factory=list)
    failed: dict[str, tuple[Task | None, str]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._who = f"tuner {type(self.tuner).__name__}"
        if hasattr(self.tuner, "begin"):  # which may set how often it is called
            self._answer("begin", self.search)
        every = Rule(int, low=1).check("tuner: ", "every", getattr(self.tuner, "every", 1))
        # All rows evaluate in the same epochs of the group if trials begin at multiples of eval_every.
        step = min(stack.widest.eval_every for stack in self.stacks)
        self.every = every if self.search.epochs % step else math.ceil(every / step) * step
        self._counted = 0
        self._reported: dict[str, int] = {}  # epochs of running trials that the tuner knows
        self._open: set[str] = set()  # trials of which the tuner does not know that they have ended

    # ---- deciding ------------------------------------------------------------------------------------

    def _changes(self, first: bool, trained: int, requests: Requests) -> dict[str, Any]:
        return {"start": self._call() if (first or trained) and not requests.cancel_all else {}}

    def _advance(self, leaving: int) -> int:
        return self.every - self._epoch % self.every

    # ---- calling the tuner ---------------------------------------------------------------------------

    def _call(self) -> dict[int, Start]:
        """Tell the tuner what came of its trials, end those that it does not want, and begin others; by their rows."""
        for member in self.members:
            if member.name in self._open:
                self._report(member)
        for member in self.members:
            if member.name in self._open and not self._runs(member):
                stop = self._stops.get(member.name)
                self._tell(member, member.status if stop is None else stop.status)
        by_name = {member.name: member for member in self.members if self._runs(member)}
        for name in self._stopped():
            if name not in by_name:
                raise SpecError(f"tuner: stop() returned {name!r}; expected names of running trials")
            if name in self._open:
                # No message: a line for each that a tuner ends would hide those that are news.
                self._stops[name] = Stop(name, "pruned")
                self._tell(by_name[name], "pruned")
        return self._begin()

    def _report(self, member: Member) -> None:
        column = score_column(member)
        position = member.columns.index(column)
        sign = -1.0 if lower_is_better(column) else 1.0
        for epoch in range(self._reported[member.name], member.epoch):
            if not math.isnan(member.rows[epoch][position]):
                row = member.row(epoch)
                self._note("report", member.name, epoch + 1, {**row, SCORE: sign * row[column]})
        self._reported[member.name] = member.epoch

    def _tell(self, member: Member, status: str) -> None:
        scores = member.scores(member.epoch)
        metrics = {key: value for key, value in member.metrics().items() if not key.startswith("seconds")}
        summary = {"status": status, "epochs": member.epoch, SCORE: max(scores, default=None), "metrics": metrics}
        self._note("tell", member.name, summary)
        self._open.discard(member.name)

    def _stopped(self) -> list[str]:
        return self._listed(self._answer("stop"), str, "stop()", "a list of names of running trials", "stop")

    def _ask(self, count: int) -> list[dict[str, Any]]:
        words = f"a list of up to {count} dicts of settings"
        return self._listed(self._answer("ask", count), Mapping, f"ask({count})", words, "ask", count)

    def _listed(self, answer: Any, kind: type, call: str, words: str, *noted: Any) -> list[Any]:
        """``answer`` as a list, once it is one of ``kind``; ``noted``: the call as the journal has it."""
        listed = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, (str, Mapping)) else None
        most = noted[1] if len(noted) > 1 else math.inf
        if listed is None or not all(isinstance(each, kind) for each in listed) or len(listed) > most:
            raise SpecError(f"tuner: {call} returned {answer!r}; expected {words}")
        self._write(*noted, listed)
        return listed

    def _note(self, method: str, *arguments: Any) -> None:
        """Call a method of the tuner that answers nothing."""
        self._answer(method, *arguments)
        self._write(method, *arguments)

    def _answer(self, method: str, *arguments: Any) -> Any:
        with blamed(f"{self._who}: {method}()"):
            answer = getattr(self.tuner, method)(*arguments)
            return list(answer) if isinstance(answer, Iterator) else answer

    def _write(self, method: str, *arguments: Any) -> None:
        self.journal.append(json.dumps([method, *arguments], default=str))

    def end(self, resumable: bool) -> None:
        """Tell a tuner that wants to know that the run ends."""
        if hasattr(self.tuner, "end"):
            self._answer("end", resumable)

    def _begin(self) -> dict[int, Start]:
        """Ask for trials while rows are free; those that begin, by their rows."""
        free: dict[int, list[int]] = {}
        for row, member in enumerate(self.members):
            if not self._runs(member):
                free.setdefault(self.stack_of_row[row], []).append(row)
        start: dict[int, Start] = {}
        self._place(free, start)
        copies = bool(getattr(self.tuner, "copies", False))
        while True:
            rows = sum(map(len, free.values())) - len(self.waiting)
            count = rows if copies else min(rows, self.search.trials - self._counted)
            asked = self._ask(count) if count > 0 else []
            built = [self._new(settings) for settings in asked]
            self._place(free, start)
            if all(built):  # those that failed left their rows free
                return start

    def _new(self, settings: Mapping[str, Any], again: bool = False) -> bool:
        """Make a trial of what the tuner chose; whether that was possible. ``again``: as in the run that is resumed."""
        name, chosen = trial_name(len(self.trials) + len(self.failed)), dict(settings)
        parent = chosen.pop(PARENT, None)
        self._counted += parent is None
        if self._counted > self.search.trials:
            raise SpecError(f"tuner: ask() returned more than the {self.search.trials} trials that there are to be")
        task = None
        try:
            task, need = self.sweep.trial(chosen, name), self.search.need(chosen)
            if need is not None and need > self.search.budget:
                room = show_bytes(self.search.budget)
                raise DoesNotFitError(
                    f"task {name!r}: not trained: it needs {show_bytes(need)} ({need:,} bytes) of {room}"
                )
            trial = Trial(task, stack_for(task, self.stacks), parent)
        except WeftError as error:
            self.failed[name] = task, str(error)
            if not again:
                self._note("tell", name, {"status": "failed", "epochs": 0, SCORE: None, "metrics": {}})
            return False
        if parent is not None and not again:
            trial.begun = self._parent_of(trial, name).epoch
        self.trials[name] = trial
        self.waiting.append(name)
        return True

    def _parent_of(self, trial: Trial, name: str) -> Member:
        """The member that ``trial`` continues; a :class:`SpecError` if it cannot."""
        member = next((m for m in self.members if m.name == trial.parent and self._runs(m)), None)
        if member is None:
            raise SpecError(f"tuner: {name} is to continue {trial.parent!r}, which is not running")
        before = self.trials[member.name]
        if before.stack != trial.stack or before.task.hidden != trial.task.hidden:
            raise SpecError(
                f"tuner: {name} cannot continue {trial.parent!r}, whose model has another structure or width"
            )
        return member

    def _place(self, free: dict[int, list[int]], start: dict[int, Start]) -> None:
        """Give waiting trials the free rows of their stacks, in the order in which they were asked for."""
        rows = {member.name: row for row, member in enumerate(self.members)}
        for name in list(self.waiting):
            trial = self.trials[name]
            if not free.get(trial.stack):
                if trial.parent is not None:
                    raise SpecError(f"tuner: {name} is to continue {trial.parent!r}, but no row of its stack is free")
                continue
            row = free[trial.stack].pop(0)
            start[row] = Start(trial.task, None if trial.parent is None else rows[trial.parent])
            self.waiting.remove(name)
            self._reported[name] = trial.begun
            self._open.add(name)

    # ---- saving and resuming -------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """What a checkpoint holds besides the state of the group: the rest follows from the journal."""
        begun = {name: trial.begun for name, trial in self.trials.items() if trial.parent is not None}
        return {"rows": [member.name for member in self.members], "calls": len(self.journal), "begun": begun}

    def take_up(self, epoch: int) -> None:
        """Go on at ``epoch`` of the group, of which the tuner knows everything."""
        self._begun, self._epoch = True, epoch
        self._reported = {member.name: member.epoch for member in self.members}

    def repeat(self, lines: Sequence[str], rows: Sequence[str], begun: Mapping[str, int]) -> None:
        """Call the tuner as the run did that is resumed: ``lines`` of its journal; ``rows``: the trials in its rows.

        ``begun``: the epochs at which copies began. A :class:`SpecError` for a tuner that answers otherwise.
        """
        ended: set[str] = set()
        for line in lines:
            method, *arguments = json.loads(line)
            asked = self._ask(arguments[0]) if method == "ask" else []
            if method == "stop":
                self._stopped()
            elif method != "ask":
                self._note(method, *arguments)
            if self.journal[-1] != line:
                raise SpecError(
                    f"{self._who} answers otherwise than before when it is called in the same way, so its run cannot "
                    "be resumed; start afresh with overwrite"
                )
            for settings in asked:
                self._new(settings, again=True)
            if method == "tell":
                ended.add(arguments[0])
        for name, epoch in begun.items():
            self.trials[name].begun = epoch
        self._open = {name for name in rows if name in self.trials and name not in ended}
        self.waiting = [name for name in self.trials if name not in ended and name not in rows]
