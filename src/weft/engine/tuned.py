"""Train the trials of a tuner: one group whose rows take one trial after another (:mod:`weft.planner.tuning`)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core.decision import RUNNING, Decision, Start
from weft.core.errors import SpecError, WeftError
from weft.core.files import write_json
from weft.core.member import Member
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.version import __version__
from weft.core.wording import option
from weft.engine.control import Control, Interrupted
from weft.engine.events import Broadcast, SweepEvents
from weft.engine.folder import CALLS, SWEEP, Groups, SweepFolder
from weft.engine.job import Job
from weft.engine.loading import read_result
from weft.engine.optuna_tuner import OptunaTuner
from weft.engine.process_state import FreeThreads
from weft.engine.result import FORMAT, Result
from weft.engine.session import Session, member_of
from weft.engine.tuned_driver import WAITING, Trial, TunedDriver, score_column
from weft.engine.tuned_plan import description, rows_of, search_of, tuner_of
from weft.planner.grouping.trials import one_of_each
from weft.runtime.checkpoint import Checkpoint, read_checkpoint
from weft.runtime.group import GroupRun


class TunedEvents(SweepEvents):
    """The events of a tuned sweep: ``trial`` where one begins, and otherwise those of a sweep."""

    def __init__(self, sweep: Sweep, kinds: Sequence[Task], emit: Broadcast, trials: int) -> None:
        super().__init__(Sweep.of_trials(one_of_each(kinds), sweep.name), emit)
        self.run = emit.run
        self._space, self._trials = sweep, trials
        self._total = trials * max(task.epochs for task in kinds)

    def _whole(self) -> dict[str, Any]:
        branches = self._space.space().branches
        varying = dict.fromkeys(name for branch in branches for name in (*branch.fixed, *branch.varying))
        whole = {"tasks": self._trials, "epochs": self._total, "varying": list(varying)}
        return {**whole, "settings": self._space.to_dict()}

    def _names(self, group: GroupRun) -> list[str]:
        return []  # trials begin one by one

    def trial(self, trial: Trial, row: int) -> None:
        """A trial begins in ``row``."""
        task, copied = trial.task, {}
        if trial.parent is not None:
            self._total += task.epochs
            copied = {"parent": trial.parent, "copied_at": trial.begun}
        settings = task.to_dict()
        data = {"sweep": self._sweep.label, "row": row, "epochs": task.epochs, **copied, "settings": settings}
        self._emit_of(task.label, "trial", data)


class TunedFolder(SweepFolder):
    """The folder of a tuned sweep: that of a sweep, with the calls of the tuner in ``tuner.jsonl``."""

    def __init__(self, path: Path, sweep: Sweep, kinds: Sequence[Task], options: RunOptions) -> None:
        super().__init__(path, Sweep.of_trials(one_of_each(kinds), sweep.name))
        self._written = 0  # calls
        described = {"tuner": description(tuner_of(options)), "trials": options.trials, "width": options.width}
        self._about = json.loads(json.dumps({"sweep": sweep.to_dict(), **described}, default=str))

    def saved_groups(self) -> Groups | None:
        """The group to go on with; refuses the run of another sweep or tuner."""
        file = self.path / SWEEP
        if not file.exists() or not self.has_checkpoint("1"):
            return None
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            former, groups = data["tuned"], [(one["key"], Plan.from_dict(one["plan"])) for one in data["groups"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(
                f"{file}: holds no tuned sweep, or is damaged ({error}); remove it to start afresh"
            ) from None
        for name, value in self._about.items():
            if former.get(name) != value:
                raise SpecError(
                    f"{file}: was tuned with another {name}; resume with the same, or choose another {option('out')}"
                )
        return groups

    def save_groups(self, groups: Groups) -> None:
        data = {
            "format": FORMAT,
            "version": __version__,
            "tuned": self._about,
            "tasks": [task.to_dict() for task in self._sweep],
            "groups": [{"key": key, "plan": plan.to_dict()} for key, plan in groups],
        }
        with self.writing():
            write_json(self.path / SWEEP, data)

    def save_members(self, results: Sequence[Result]) -> None:
        with self.writing():
            for result in results:
                result.write(self.path / "tasks" / result.name)

    def save_calls(self, lines: Sequence[str]) -> None:
        """Append the calls of the tuner that are not written yet, before the checkpoint that counts them."""
        with self.writing(), open(self.path / CALLS, "a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines[self._written :])
            file.flush()
            os.fsync(file.fileno())
        self._written = len(lines)

    def calls(self, count: int) -> list[str]:
        """The first ``count`` calls; those that no checkpoint counts are removed."""
        lines = (self.path / CALLS).read_text(encoding="utf-8").splitlines()[:count]
        (self.path / CALLS).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self._written = count
        return lines


class TunedSession(Session):
    """A session whose rows take one trial after another.

    ``began(row, member)`` is called for a trial that begins, ``ended(row, member)`` for one that ends, while its row
    still has its state.
    """

    began: Callable[[int, Member], None]
    ended: Callable[[int, Member], None]
    _over = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._running = []  # a row without a trial has not ended

    @property
    def finished(self) -> bool:
        """Whether the driver has decided to leave: rows without a trial may get one."""
        return self._over or bool(self.left)

    def resume(self, tensors: dict[str, Any], about: dict[str, Any]) -> None:
        """Continue from a checkpoint: every row with the trial that it had."""
        driver, group = self._driver, self.group
        assert isinstance(driver, TunedDriver)
        for row, name in enumerate(about["rows"]):
            if name in driver.trials:
                group.fill(row, driver.trials[name].task)
        group.restore(tensors)
        for member in group.members:
            member.begun = group.epoch - int(member.tensor("epoch"))
        updates = zip(about["rows"], about["members"], group.poll(0), strict=True)
        for row, (name, former, update) in enumerate(updates):
            if name not in driver.trials:
                continue
            self.members[row] = member = replace(member_of(group, row), seconds=float(former["seconds"]))
            self._index[name] = row
            self._take(row, update)
            member.status, member.message = former["status"], former["message"]
            del member.rows[int(former["epoch"]) :]
            if member.status == RUNNING:
                self.began(row, member)
        self._running = [member for member in self.members if member.running]
        driver.take_up(group.epoch)
        self._events.note(f"resumed after epoch {group.epoch}, with {len(self._running)} trials under way")

    def apply(self, decision: Decision) -> None:
        """As of any session; a row without a trial is no end."""
        super().apply(decision)
        self._over = decision.finish

    def _begin(self, start: Mapping[int, Start]) -> None:
        super()._begin(start)
        for row in start:
            self.began(row, self.members[row])

    def _emit_ended(self) -> None:
        for member in self._running:
            if not member.running:
                self.ended(self._index[member.name], member)
        super()._emit_ended()


class TunedJob(Job):
    """The trials of ``sweep`` that a tuner chooses; ``kinds``: a task of every kind that there may be."""

    def __init__(
        self,
        sweep: Sweep,
        kinds: Sequence[Task],
        device: torch.device,
        events: TunedEvents,
        folder: TunedFolder | None,
        options: RunOptions,
        control: Control,
    ) -> None:
        super().__init__(one_of_each(kinds), device, events, folder, options, control)
        self._sweep, self._kinds, self._tuner = sweep, kinds, tuner_of(options)
        self._tuned_events, self._tuned_folder = events, folder
        self._loaded: dict[str, Result] = {}  # trials that had ended before the run was resumed

    def _find_groups(self, saved: Groups | None) -> Groups:
        """One group of rows, as planned now or before."""
        self._bounds = self._planner.bounds(self._kinds)
        self._stacks = self._planner.stacks(self._bounds)
        if saved:
            ((key, plan),) = saved
            counts = [len(members) for members in plan.stack_members]
            if len(counts) != len(self._stacks):
                raise SpecError(
                    f"the run had {len(counts)} stacks of trials, and its sweep makes {len(self._stacks)} here; resume "
                    "it on the machine that it began on, or start afresh"
                )
            tasks = rows_of(self._stacks, counts)
        else:
            key, (tasks, plan) = "1", self._planner.tuned(self._bounds)
        self._tasks = {task.label: task for task in tasks}
        return [(key, plan)]

    def _checkpoint(self, key: str, tasks: list[Task]) -> Checkpoint | None:
        return read_checkpoint(self._tuned_folder.place(key)) if self._tuned_folder and self._resuming else None

    def _failed(self, key: str, plan: Plan, error: WeftError) -> Groups:
        raise error

    def _save(self, key: str, group: GroupRun, about: dict[str, Any]) -> Path:
        assert self._tuned_folder is not None
        self._tuned_folder.save_calls(self._driver.journal)
        return super()._save(key, group, {**about, **self._driver.about()})

    def _train(self, key: str, group: GroupRun, checkpoint: Checkpoint | None) -> None:
        rows, plan = list(self._tasks.values()), group.plan
        stacks = {row: index for index, members in enumerate(plan.stack_members) for row in members}
        search = search_of(self._sweep, self._bounds, rows, self._options.trials or 1)
        run = "" if self._folder is None else self._tuned_events.run
        search = replace(search, metric=score_column(member_of(group, 0)), run=run)
        if hasattr(self._tuner, "begin"):  # which may set how often it is called
            self._tuner.begin(search)
        stack_of_row = [stacks[row] for row in range(len(rows))]
        every = self._options.checkpoint_every
        self._driver = TunedDriver(self._tuner, self._sweep, self._stacks, stack_of_row, search, every)
        self._driver.members = [Member(task.label, 0, status=WAITING) for task in rows]
        self._tasks = {}
        group.open_rows()
        session = self._make_tuned_session(key, group)
        if checkpoint is not None:
            self._resume(session, checkpoint)
        resumable = self._folder is not None
        try:
            session.train()
            resumable = resumable and bool(session.left)
        finally:
            if hasattr(self._tuner, "end"):
                self._tuner.end(resumable)
        if session.left == "interrupted":
            self._report(force=True)
            place = None if session.checkpoint is None else session.checkpoint.parent
            raise Interrupted(session.group.epoch, place, self._control.signal or signal.SIGINT)
        for row, member in enumerate(session.members):
            if member.status == "preempted":
                self._keep_trial(group, row, member)
        self._record(key, session, {})

    def _make_tuned_session(self, key: str, group: GroupRun) -> TunedSession:
        save = None if self._folder is None else partial(self._save, key)
        threads = FreeThreads(self._began) if self._device.type == "cpu" else None
        session = TunedSession(group, self._driver, self._events, save, self._control, threads)
        session.began, session.ended = self._note_trial, partial(self._keep_trial, group)
        return session

    def _resume(self, session: TunedSession, checkpoint: Checkpoint) -> None:
        """Call the tuner as before, read the trials that have ended, and continue those in the rows."""
        about, folder, driver = checkpoint.about, self._tuned_folder, self._driver
        assert folder is not None
        driver.repeat(folder.calls(about["calls"]), about["rows"], about["begun"])
        session.resume(checkpoint.tensors, about)
        running = {member.name for member in session.members if member.running}
        for name in driver.trials.keys() - running - {*driver.waiting}:
            result = read_result(folder.path / "tasks" / name)
            assert isinstance(result, Result)
            result.task = self._tasks[name] = driver.trials[name].task  # whose graph may be an object
            self._loaded[name] = result

    def _note_trial(self, row: int, member: Member) -> None:
        """A trial begins, or continues."""
        trial = self._driver.trials[member.name]
        self._tasks[member.name], self._members[member.name] = trial.task, member
        self._codes[member.name] = None
        self._tuned_events.trial(trial, row)

    def _keep_trial(self, group: GroupRun, row: int, member: Member) -> None:
        """Keep the result of a trial that has ended: its model on the host, since a device holds those that train."""
        result, trial = self._result(group, row, member, group.plan), self._driver.trials[member.name]
        if trial.parent is not None:
            result.metrics |= {"parent": trial.parent, "copied_at": trial.begun}
        if result.model is not None:
            result.model.to("cpu")
        self._ended[member.name] = result
        self._keep([result])

    @property
    def importance(self) -> dict[str, float]:
        """The settings' shares in what makes trials good, if a study chose them."""
        return self._tuner.importance() if isinstance(self._tuner, OptunaTuner) else {}

    def _report(self, force: bool = False) -> None:
        if self._tasks:  # a tuner may ask for no trial
            super()._report(force)

    def _standings(self) -> list[Result]:
        ((_, plan),) = self.groups
        return [self._loaded.get(name) or self._standing(name, plan) for name in _in_order(self._tasks)]

    def _outcome(self) -> list[Result]:
        """The results of all trials, in the order in which they were asked for."""
        if not hasattr(self, "_driver"):  # cancelled or preempted before it began
            return super()._outcome()
        ((key, plan),) = self.groups
        for name, message in self._driver.failed.items():
            self._tasks[name] = self._driver.unfit.get(name) or self._kinds[0].with_values(name=name)
            self._ended[name] = self._without_model(name, self._records.get(key, plan), "failed", message)
        for name in self._driver.waiting:
            self._tasks[name] = self._driver.trials[name].task
            self._ended[name] = self._without_model(name, plan, "preempted", f"task {name!r}: preempted")
        found = self._loaded | self._ended
        results = [found[name] for name in _in_order(found)]
        if not results or all(result.status == "failed" for result in results):
            raise SpecError(results[0].message if results else "the tuner asked for no trial")
        with suppress(WeftError):
            self._keep([self._ended[name] for name in self._driver.failed])
        return results


def _in_order(names: Mapping[str, Any]) -> list[str]:
    """The names of trials by their numbers."""
    return sorted(names, key=lambda name: (len(name), name))
