"""Train the trials of a tuner: one group whose rows take one trial after another (:mod:`weft.planner.tuning`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core.decision import RUNNING, Start
from weft.core.errors import SpecError, WeftError
from weft.core.files import write_text
from weft.core.member import Member
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.wording import option
from weft.engine.control import Control
from weft.engine.events import Broadcast, SweepEvents
from weft.engine.folder import CALLS, Groups, SweepFolder
from weft.engine.job import Job
from weft.engine.loading import read_result
from weft.engine.optuna_tuner import OptunaTuner
from weft.engine.result import Result, model_code
from weft.engine.session import Session, member_of
from weft.engine.tuned_driver import WAITING, Trial, TunedDriver, score_column
from weft.engine.tuned_plan import description, tuner_of
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
        self.event_of(task.label, "trial", **data)


class TunedFolder(SweepFolder):
    """The folder of a tuned sweep: that of a sweep, with the calls of the tuner in ``tuner.jsonl``."""

    extendable = False

    def __init__(self, path: Path, sweep: Sweep, kinds: Sequence[Task], options: RunOptions) -> None:
        super().__init__(path, Sweep.of_trials(one_of_each(kinds), sweep.name))
        self._written = 0  # calls
        described = {"tuner": description(tuner_of(options)), "trials": options.trials, "width": options.width}
        self._about = json.loads(json.dumps({"sweep": sweep.to_dict(), **described}, default=str))

    def saved_groups(self) -> Groups | None:
        """The group to go on with, if there is a checkpoint of it."""
        groups = super().saved_groups()
        return groups if self.has_checkpoint("1") else None

    def _described(self) -> dict[str, Any]:
        return {"tuned": self._about}

    def _check_saved(self, data: Mapping[str, Any], file: Path) -> None:
        former = data.get("tuned", {})
        for name, value in self._about.items():
            if (before := former.get(name)) != value:
                shown = f" ({before})" if isinstance(before, int) else ""
                raise SpecError(
                    f"{file}: was {'tuned' if former else 'trained'} with another {name}{shown}; resume with the same, "
                    f"or choose another {option('out')}"
                )

    def save_calls(self, lines: Sequence[str]) -> None:
        """Append the calls of the tuner that are not written yet, before the checkpoint that counts them."""
        with self.writing(), open(self.path / CALLS, "a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines[self._written :])
            file.flush()
            os.fsync(file.fileno())
        self._written = len(lines)

    def calls(self, count: int) -> list[str]:
        """The first ``count`` calls; those that no checkpoint counts are removed."""
        file = self.path / CALLS
        lines = file.read_text(encoding="utf-8").splitlines()[:count] if file.is_file() else []
        if len(lines) < count:
            raise SpecError(f"{file}: has {len(lines)} calls of the {count} that the checkpoint counts; start afresh")
        write_text(file, "".join(line + "\n" for line in lines))
        self._written = count
        return lines


class TunedSession(Session):
    """A session whose rows take one trial after another.

    ``began(row, member)`` is called for a trial that begins, ``ended(row, member)`` for one that ends, while its row
    still has its state.
    """

    began: Callable[[int, Member], None]
    ended: Callable[[int, Member], None]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._running = []  # a row without a trial has not ended

    @property
    def finished(self) -> bool:
        """Whether the driver has decided to leave: rows without a trial may get one."""
        return self._over or bool(self.left)

    def resume(self, tensors: dict[str, Any], about: dict[str, Any]) -> None:
        """Continue from a checkpoint: every row with the trial that it had."""
        driver, rows = self._driver, about["rows"]
        assert isinstance(driver, TunedDriver)
        trials = {row: driver.trials[name].task for row, name in enumerate(rows) if name in driver.trials}
        for row, task in trials.items():
            self.group.fill(row, task)
            self.members[row] = member_of(self.group, row)
            self._index[task.label] = row
            if about["members"][row]["status"] == RUNNING:  # of others there are results
                self._running.append(self.members[row])
                self.began(row, self.members[row])
        super().resume(tensors, about)
        driver.take_up(self.group.epoch)

    def _of_how_many(self) -> str:
        return f", with {sum(member.running for member in self.members)} trials under way"

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

    _session_kind = TunedSession

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
        self._trial_planner = planner = self._planner.for_trials(self._kinds)
        if saved:
            ((key, plan),) = saved
            counts = [len(members) for members in plan.stack_members]
            if len(counts) != len(planner.stacks):
                raise SpecError(
                    f"the run had {len(counts)} stacks of trials, and its sweep makes {len(planner.stacks)} here; "
                    "resume it on the machine that it began on, or start afresh"
                )
            tasks = planner.rows(counts)
        else:
            key, (tasks, plan, _) = "1", planner.group()
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
        rows, planner = list(self._tasks.values()), self._trial_planner
        run = "" if self._folder is None else self._tuned_events.run
        search = planner.search(self._sweep, rows, score_column(member_of(group, 0)), run)
        self._driver = driver = TunedDriver(
            [Member(task.label, 0, status=WAITING) for task in rows],
            self._options,
            tuner=self._tuner,
            sweep=self._sweep,
            stacks=planner.stacks,
            stack_of_row=[index for index, members in enumerate(group.plan.stack_members) for _ in members],
            search=search,
        )
        self._tasks = {}
        group.open_rows(bool(getattr(self._tuner, "copies", False)))
        session = self._make_session(key, group, driver)
        assert isinstance(session, TunedSession)
        session.began, session.ended = self._note_trial, partial(self._keep_trial, group)
        if checkpoint is not None:
            self._resume(session, checkpoint)
        resumable = self._folder is not None
        try:
            session.train()
            resumable = resumable and bool(session.left)
        finally:
            driver.end(resumable)
        self._leave_if_interrupted(session)
        for row, member in enumerate(session.members):
            if member.status == "preempted":
                self._keep_trial(group, row, member)
        self._record(key, session, {})

    def _resume(self, session: TunedSession, checkpoint: Checkpoint) -> None:
        """Call the tuner as before, read the trials that have ended, and continue those in the rows."""
        about, folder, driver = checkpoint.about, self._tuned_folder, self._driver
        assert folder is not None
        driver.repeat(folder.calls(about["calls"]), about["rows"], about["begun"])
        session.resume(checkpoint.tensors, about)
        running = {member.name for member in session.members if member.running}
        for name in driver.trials.keys() - running - {*driver.waiting}:
            task = self._tasks[name] = driver.trials[name].task
            result = read_result(folder.path / "tasks" / name, None if isinstance(task.model, str) else task.model)
            assert isinstance(result, Result)
            result.task = task  # whose graph may be an object
            self._loaded[name] = result

    def _note_trial(self, row: int, member: Member) -> None:
        """A trial begins, or continues."""
        trial = self._driver.trials[member.name]
        self._tasks[member.name], self._members[member.name] = trial.task, member
        self._codes[member.name] = model_code(trial.task)
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
        for name, (task, message) in self._driver.failed.items():
            self._tasks[name] = task or self._kinds[0].with_values(name=name)
            self._ended[name] = self._without_model(name, self._records.get(key, plan), "failed", message)
        status = "cancelled" if self._control.requests().cancel_all else "preempted"
        for name in self._driver.waiting:
            self._tasks[name] = self._driver.trials[name].task
            self._ended[name] = self._without_model(name, plan, status, f"task {name!r}: {status} before it began")
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
