"""Job: train tasks group by group; halve a group that fails until only the members at fault are lost."""

from __future__ import annotations

import re
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.batches.source import FullGraph, MakeSource, is_memory_error
from weft.core.compatibility import deciding_column
from weft.core.errors import InputError, ModelError, OutOfMemoryError, SpecError, TrainingError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.member import Member, short
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.startup import gc_paused
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.choosing import in_mode, phases_key
from weft.engine.control import Control, Interrupted, interruptible
from weft.engine.driver import Driver, callbacks_of
from weft.engine.errors import clear_errors, give_back_memory, what_was_raised
from weft.engine.estimator import merger_for
from weft.engine.events import EventSource
from weft.engine.folder import Groups, RunFolder
from weft.engine.graphs import HOST, Graphs, check_trainable, shared_store
from weft.engine.machine import basis_of, environment
from weft.engine.memory import give_back_heap, memory_cap, memory_taken, watch_memory
from weft.engine.process_state import FreeThreads, LoadSample, start_device
from weft.engine.result import Result, Top, copied_weights, model_code
from weft.engine.run_planner import Progress, RunPlanner, check_here, check_same_groups, other_weights
from weft.engine.session import Session, members_of
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.placement import may_sample
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import Checkpoint
from weft.runtime.device.process import cpu_threads, matmul_precision, seeded
from weft.runtime.group import GroupRun
from weft.runtime.infer import treat_inputs
from weft.runtime.modules.convert import stacks_of
from weft.runtime.modules.settings import check_tasks
from weft.sched.admission import refusals
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask
from weft.sched.task_queue import TaskQueue

if TYPE_CHECKING:
    from weft.engine.dividing import Dividing


# ---- Groups run in order of their tasks, one at a time: another order would let what a pruning policy compares depend
# on predicted times. What shares the device at one time is within a group, as planned. Admission is that of a server,
# against the bytes that the run may take now. There a task that is refused fails; here the user waits for it, and
# predictions are no proof, so a group that is refused is tried at its turn, and the reason is noted.

SAFETY = 1.0  # plans bound their bytes already
ADMITTED = "is next, and has the device to itself"
TRIED = "tried all the same: nothing else runs here, and a prediction may be too high"


def admission(key: str, plan: Plan, device: str, room: int) -> str:
    """Why the group ``key`` is trained now on ``device``, where it may take ``room`` bytes."""
    group = QueuedTask(key, int(plan.cost.get("total_bytes", 0)), 0.0)
    refused = refusals(TaskQueue.of([group]), MachineState((DeviceState(device, max(room, 1)),)), SAFETY)
    return f"{refused[key]}; {TRIED}" if refused else ADMITTED


REPORT_SECONDS = 10.0  # between two reports of a run that trains
REPORT_SHARE = 0.02  # of the time that writing them may take


class Job:
    """``tasks`` on ``device``; emits to ``events``, saves to ``folder``.

    Trains the groups of ``report``, or plans them. ``groups`` are the plans, each with the key of its checkpoint.
    """

    _session_kind = Session

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        events: EventSource,
        folder: RunFolder | None,
        options: RunOptions,
        control: Control | None = None,
        report: PlanReport | None = None,
    ) -> None:
        start_device(device)
        self._tasks = {task.label: task for task in tasks}
        self._device, self._events, self._folder, self._options = device, events, folder, options
        self._control, self._planned = control or Control(), report
        self._began = LoadSample.now()  # what else the machine does meanwhile
        self._store = shared_store()  # of a worker that keeps graphs between runs
        # A whole graph may not fit on one of several devices.
        on_host = options.budget is not None
        self._graphs = Graphs(HOST) if options.ranks > 1 else Graphs(device, on_host=on_host, store=self._store)
        self._planner = RunPlanner(device, self._graphs, options)
        self._codes = {name: model_code(task) for name, task in self._tasks.items()}  # as it is before training
        self._ended: dict[str, Result] = {}
        self._members: dict[str, Member] = {}  # all that have begun
        self._errors: list[WeftError] = []
        self._resuming, self._begun = False, 0
        self._parts: list[weakref.ref[Any]] = []  # of the last group that trained; none: not known
        self._scheduled = ""  # why the group at hand is trained now
        self.write_report: Callable[[list[Result]], None] | None = None  # shows the members while they train
        self._next_report = 0.0
        self.groups: Groups = []
        self._records: dict[str, Plan] = {}  # of groups that have trained, by key
        self.not_written: TrainingError | None = None  # why results are in memory only

    def graph_of(self, task: Task) -> GraphStats:
        """The summary of the graph of ``task``."""
        return self._graphs.true_stats(task)

    def train(self, resume: bool) -> list[Result]:
        """Train everything; the results in the order of the tasks. Raises the error if not one task could begin."""
        saved = self._folder.saved_groups() if resume and self._folder else None
        self._resuming = saved is not None
        if self._resuming and self._folder:
            self._events.sent.update(self._folder.sent())
        if resume and saved is None and self._folder:
            self._events.note("no checkpoint to resume from; starting afresh")
        self._prepare(saved)
        waiting = list(self.groups)
        with interruptible(self._control), self._cap():
            while waiting:
                key, plan = waiting.pop(0)
                self._scheduled = admission(key, plan, str(self._device), self._planner.room)
                if not self._ended_before(key, plan):
                    waiting = copy_context().run(self._group, key, plan) + waiting  # what a model sets is its own
                    self._graphs.let_go(self._tasks[name] for _, plan in waiting for name in plan.members)
                    if waiting or self._device.type == "cuda":
                        # Only now does nothing hold the group any more, unless it refers to itself.
                        give_back_memory(self._device, gone=bool(self._parts) and all(p() is None for p in self._parts))
        if self._device.type == "cpu":
            give_back_heap()
        return self._outcome()

    def _outcome(self) -> list[Result]:
        """All results, in the order of the tasks; raises the error if not one task could begin."""
        lost = [result for result in self._ended.values() if result.model is None]
        if lost and self._folder is not None and self._folder.opened:
            self._keep(lost)
        if all(result.status == "failed" for result in self._ended.values()):
            raise self._errors[0]
        return [self._ended[name] for name in self._tasks]

    def _prepare(self, saved: Groups | None) -> None:
        """Check the tasks and their graphs, and find the groups."""
        report = self._planned
        if saved and report is not None:
            check_same_groups([plan for _, plan in saved], report.plans, str(self._folder.path if self._folder else ""))
        with ExitStack() as stack:
            tasks = list(self._tasks.values())
            stack.enter_context(clear_errors(tasks, self._device, models=False))
            check_tasks(tasks)
            for task in tasks:
                check_trainable(task, self._graphs.summary(task))
            # What reading the graphs left out or changed; summaries of graphs have nothing to say.
            graphs = [self._graphs.summary(task) for task in tasks]
            read = [graph for graph in graphs if isinstance(graph, Graph)]
            for note in dict.fromkeys(f"graph {graph.name!r}: {note}" for graph in read for note in graph.notes):
                self._events.note(note)
            stack.enter_context(self._cap())
            if report is not None:
                check_here(report.plans, self._graphs, self._planner)
            self.groups = self._find_groups(saved)
        for _, plan in self.groups:  # what a task leaves open, the plan has decided
            self._tasks |= {name: in_mode(self._tasks[name], plan.mode, plan.batch) for name in plan.members}
        budget = self._options.budget
        most = max((plan.cost.get("process_bytes", 0) for _, plan in self.groups), default=0)
        # A server limits what its workers take.
        if self._store is None and self._device.type == "cpu" and budget is not None and most > budget:
            self._events.note(
                f"the budget of {show_bytes(budget)} covers what training adds; the process will take "
                f"about {show_bytes(most)} in all, Python, torch and kernels included, and nothing on a CPU stops it"
            )
        several = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        count = self._options.trials or len(tasks)
        words = f"planned: {count} task{'s' if count > 1 else ''}{several}"
        self._events.preparing(words, groups=len(self.groups), tasks=count)

    def _cap(self) -> AbstractContextManager[None]:
        names = {task.graph for task in self._tasks.values() if isinstance(task.graph, str)}
        return memory_cap(self._device, self._planner.machine, self._options.budget, self._store, names)

    # ---- before training -----------------------------------------------------------------------------

    def _find_groups(self, saved: Groups | None) -> Groups:
        """Those of a former run, or new ones."""
        former = saved or []
        known = {name for _, plan in former for name in plan.members}
        missing = [task for name, task in self._tasks.items() if name not in known]
        if saved and not missing:
            return saved
        if saved:
            self._events.note(f"{len(known)} of {len(self._tasks)} members are there already")
        if self._planned is not None:
            # The settings are in the folder once, not with every member's plan.
            plans = [replace(plan, tasks=()) for plan in self._planned.plans]
        else:
            # The mode and batch of the run that is resumed, if tasks leave them to how much memory is free.
            former_task = self._folder.former_task if self._folder is not None and self._resuming else {}
            mode, batch = former_task.get("mode"), former_task.get("batch")
            as_before = [task.with_values(mode=mode) if mode and may_sample(task) else task for task in missing]
            as_before = [in_mode(task, task.mode, batch) for task in as_before]
            tasks = self._planner.with_modes(as_before)
            self._planner.check(tasks)
            plans = self._planner.groups(tasks)
        # A key begins with a number; halves have a letter behind it, shares of a cluster a point and another number.
        numbers = [int(re.split(r"\D", key)[0] or 0) for key, _ in former]
        return [*former, *((str(number), plan) for number, plan in enumerate(plans, 1 + max(numbers, default=0)))]

    def _ended_before(self, key: str, plan: Plan) -> bool:
        """Whether all members were cancelled, or the run preempted, before this group began in this run or a former."""
        requests = self._control.requests()
        begun = self._resuming and self._folder is not None and self._folder.has_checkpoint(key)
        if not begun and all(map(requests.cancelled, plan.members)):
            for name in plan.members:
                self._never_begun(name, plan, "cancelled", f"task {name!r}: cancelled before it began")
            return True
        for name in plan.members if requests.preempt else ():
            self._ended[name] = self._without_model(name, plan, "preempted", f"task {name!r}: preempted")
        return requests.preempt

    # ---- one group -----------------------------------------------------------------------------------

    def _group(self, key: str, plan: Plan) -> Groups:
        """Train one group; what has to be tried instead, where it failed."""
        tasks, self._parts = [self._tasks[name] for name in plan.members], []
        checkpoint = self._checkpoint(key, tasks)

        def report_compiling(done: int, total: int) -> None:
            self._events.preparing(f"compiling kernels: {done} of {total}", done=done, total=total)

        first = tasks[0]
        with seeded(first.seed, self._device), matmul_precision(first.precision), cpu_threads(plan.threads):
            try:
                with clear_errors(tasks, self._device):
                    self._warm(tasks, plan, report_compiling)
                    graph = self._graphs.placed(first, plan.places)
                    watch_memory(self._device)
                    with gc_paused():  # it imports and loads kernels, which make many objects that stay
                        group = self._make_group(tasks, graph, plan, checkpoint)
            except (InputError, OutOfMemoryError, ModelError) as error:
                if checkpoint is not None and isinstance(error, InputError):
                    raise  # halves would begin anew, without what was trained
                return self._failed(key, plan, error)
            if all(task.traits is not None for task in tasks):  # a user's module may hold itself, and much else
                self._parts = [weakref.ref(part) for part in (group, *group.stacks)]
            if checkpoint is not None and self._folder is not None:
                self._folder.check_data(checkpoint, graph, plan.places.sampler)
            if self._planned is not None and plan.weights and plan.weights != group.weight_digests():
                raise SpecError(other_weights(plan.members[0], first.model_name))
            self._begin(key, group)
            try:
                with clear_errors(tasks, self._device, models=False):
                    self._train(key, group, checkpoint)
            except (OutOfMemoryError, ModelError) as error:
                return self._failed(key, plan, error)
            finally:
                group.close()
        return []

    def _warm(self, tasks: list[Task], plan: Plan, progress: Progress) -> None:
        """Compile the kernels of a group."""
        self._planner.warm(tasks, plan, progress)

    def _checkpoint(self, key: str, tasks: list[Task]) -> Checkpoint | None:
        return self._folder.checkpoint_of(key, tasks) if self._folder and self._resuming else None

    def _make_group(self, tasks: list[Task], graph: Graph, plan: Plan, checkpoint: Checkpoint | None) -> GroupRun:
        """The group as planned, slow stacks taken apart unless its plan was given; or as the run that is resumed."""
        source = self._source(tasks[0], plan)
        former = () if checkpoint is None else stacks_of(checkpoint.about)
        measure = checkpoint is None and self._planned is None and self._options.ranks == 1  # ranks decide alike
        return GroupRun(tasks, graph, plan, self._device, merger_for(plan), source, measure, former)

    def _source(self, task: Task, plan: Plan) -> MakeSource:
        """The whole graph in every step, or batches that are sampled or loaded."""
        if not task.sampled and self._options.batches is None:
            return FullGraph
        from weft.batches.loaded import loading_for  # a run on the whole graph does without
        from weft.batches.sampled import source_for

        if self._options.batches is None:
            source = source_for(task, plan, self._options.placement.user_policy)
        else:
            source = loading_for(task, self._options.batches, plan)
        return self._dividing.source(source, plan)

    @cached_property
    def _dividing(self) -> Dividing:
        from weft.engine.dividing import Dividing

        return Dividing(self._planner.machine, self._options.hardware, self._options.placement)

    def _divide(self, group: GroupRun) -> dict[str, Any]:
        """Divide the batches of ``group`` if both sides can prepare them; the fields of its plan as they turned out."""
        if not group.stacks or group.stacks[0].source.constant:  # a run on the whole graph imports nothing of sampling
            return {}
        from weft.engine.dividing import divided_source

        source, hardware = divided_source(group), self._options.hardware
        if source is None:
            return {}
        digest = self._graphs.stats(group.tasks[0]).fingerprint().digest
        trainer = getattr(hardware, "profile_key", getattr(hardware, "name", "gpu"))
        key = phases_key(group.tasks, group.plan.places, digest, trainer)
        divided, remark = self._dividing.divide(group, source, key)
        self._events.note(remark)
        return divided

    def _begin(self, key: str, group: GroupRun) -> None:
        self._begun += 1
        if self._folder is not None and self._begun == 1:
            self._folder.open(afresh=not self._resuming)
            self._folder.save_groups(self.groups)
        position = [name for name, _ in self.groups].index(key) + 1
        self._events.group(group, [plan for _, plan in self.groups], position, key, self._scheduled)
        if self._scheduled.endswith(TRIED):
            self._events.note(f"group {key}: {self._scheduled}")
        self._report()

    def _report(self, force: bool = False) -> None:
        """Show the members as they stand, every so often; a page that cannot be written is left out."""
        begin = time.monotonic()
        if self.write_report is None or self._folder is None or not self._folder.opened:
            return
        if begin >= self._next_report or force:
            with suppress(OSError, WeftError):
                self.write_report(self._standings())
            end = time.monotonic()
            self._next_report = end + max(REPORT_SECONDS, (end - begin) / REPORT_SHARE)

    def _standings(self) -> list[Result]:
        """All members as they stand now."""
        plans = {name: plan for _, plan in self.groups for name in plan.members}
        return [self._standing(name, plans[name]) for name in self._tasks]

    def _save(self, key: str, group: GroupRun, about: dict[str, Any]) -> Path:
        """Write a checkpoint, and the report as it is by then."""
        path = self._folder.save_state(key, group, about)
        self._report()
        return path

    def _train(self, key: str, group: GroupRun, checkpoint: Checkpoint | None) -> None:
        divided = self._divide(group)
        index = {task.label: position for position, task in enumerate(group.tasks)}

        def model_of(name: str) -> torch.nn.Module:
            member = index[name]
            return treat_inputs(group.current_model(member), group.tasks[member], group.made_dense(member))

        driver = Driver(members_of(group), self._options, self._device.type, group.plan.compiled, self._members)
        driver.callbacks, driver.make_model = callbacks_of(group.tasks), model_of
        driver.gradient_norm = lambda name: group.gradient_norm(index[name])
        driver.rivals = self._control.rivals
        session = self._make_session(key, group, driver)
        if checkpoint is not None:
            session.resume(checkpoint.tensors, checkpoint.about)
        session.train()
        self._leave_if_interrupted(session)
        plan = self._record(key, session, divided)
        trained = [self._result(group, row, member, plan) for row, member in enumerate(session.members)]
        self._ended |= {result.name: result for result in trained}
        self._keep(trained)
        if len(self._ended) < len(self._tasks):
            self._report()

    def _keep(self, found: list[Result]) -> None:
        """Write what a group left behind; where that fails, what it trained is still returned, with the error."""
        if self._folder is None:
            return
        try:
            self._folder.save_members(found)
        except TrainingError as error:
            self.not_written = error
            self._events.note(str(error))

    def _make_session(self, key: str, group: GroupRun, driver: Driver) -> Session:
        save = None if self._folder is None else partial(self._save, key)
        threads = FreeThreads(self._began) if self._device.type == "cpu" and self._options.ranks == 1 else None
        return self._session_kind(group, driver, self._events, save, self._control, threads)

    def _leave_if_interrupted(self, session: Session) -> None:
        if session.left == "interrupted":
            self._report(force=True)
            folder = None if session.checkpoint is None else session.checkpoint.parent
            raise Interrupted(session.group.epoch, folder, self._control.signal or signal.SIGINT)

    def _record(self, key: str, session: Session, divided: dict[str, Any]) -> Plan:
        """What results hold of a group that has trained: its plan, how it really ran, and what it took."""
        group, plan = session.group, session.group.plan
        happened: dict[str, Any] = {**divided, "measured": {**session.measured, **memory_taken(self._device)}}
        happened["why"] = (*plan.why, *(f"as it ran: {note}" for note in group.notes))
        if len(group.built) > len(plan.stack_members):
            happened["stacks"] = tuple(sorted(stack.members for stack in group.built))
            happened["join"] = "in turn" if len(plan.stack_members) == 1 else plan.join
        self._records[key] = record = replace(plan, **happened)
        # Predictions say how far the rates known of this machine are off only if they are from those rates.
        rated_here = self._planned is None or basis_of(self._planned.machine) == basis_of(self._planner.machine)
        if rated_here and self._options.ranks == 1:
            aside = None if self._store is None else self._store.observations
            self._planner.learn(record, self._folder.path if self._folder is not None else None, aside)
        return record

    @property
    def records(self) -> tuple[Plan, ...]:
        """The plan of every group; of those that have trained with how they ran."""
        return tuple(self._records.get(key, plan) for key, plan in self.groups)

    # ---- what became of the members --------------------------------------------------------------------

    def _result(self, group: GroupRun, index: int, member: Member, plan: Plan) -> Result:
        """The result of one member; a model that cannot be copied costs that model alone."""
        task, model, message, dense = group.tasks[index], None, member.message, group.made_dense(index)
        try:
            model = treat_inputs(group.best_model(index), task, dense)
        except Exception as error:
            if task.traits is not None or is_memory_error(error):
                raise
            lost = f"task {member.name!r}: trained, but its model could not be copied, so there are no weights: "
            message = "; ".join(filter(None, (message, lost + what_was_raised(error, task))))
            self._events.note(message)
        result = self._without_model(member.name, plan, member.status, message, member.metrics())
        trained_on, code = self._graphs.true_stats(task), self._codes[member.name]
        result = replace(result, model=model, trained_on=trained_on, dense_features=dense, model_code=code)
        kept_epochs = () if model is None else group.top(index)  # one model at a time: they are on the device
        decides = deciding_column(task, member.metric, member.columns)
        top = [Top(epoch + 1, short(member.rows[epoch][decides]), copied_weights(it)) for epoch, it in kept_epochs]
        return replace(result, kept=group.best_kept(index), top=top)

    def _never_begun(self, name: str, plan: Plan, status: str, message: str) -> None:
        """Keep and report that a member did not begin."""
        self._ended[name] = self._without_model(name, plan, status, message)
        self._events.never_begun(self._ended[name])

    def _without_model(
        self, name: str, plan: Plan, status: str, message: str = "", metrics: dict[str, Any] | None = None
    ) -> Result:
        """A member without weights, with what it recorded if something went wrong on the way."""
        member = self._members.get(name)
        epochs, history = (0, {}) if member is None else (member.epoch, member.history())
        metrics = metrics or {"best_epoch": 0, "epochs_run": epochs, "seconds": 0.0, "seconds_per_epoch": 0.0}
        result = Result(self._tasks[name], plan, metrics, history, None, environment(self._device), status, message)
        return result if member is None else replace(result, logged=member.logged)

    def _standing(self, name: str, plan: Plan) -> Result:
        """A member as it stands now: ended, in training, or waiting."""
        member = self._members.get(name)
        if name in self._ended:
            return self._ended[name]
        if member is None:
            return self._without_model(name, plan, "waiting")
        return self._without_model(name, plan, member.status, member.message, member.metrics() if member.rows else None)

    # ---- trouble -------------------------------------------------------------------------------------

    def _failed(self, key: str, plan: Plan, error: WeftError) -> Groups:
        """Try a group in two halves; give up on a member that fails alone."""
        if len(self._tasks) == 1 or self._options.ranks > 1:  # ranks cannot agree on halves while one may be gone
            raise error
        if len(plan.members) == 1:
            self._errors.append(type(error)(str(error)))  # without the frames that hold its tensors
            self._never_begun(plan.members[0], plan, "failed", str(error))
            return []
        reason = f"one of two halves of a group of {len(plan.members)} that could not be trained as a whole"
        halves = []
        for letter, half in zip("ab", plan.halves(), strict=True):
            why = plan.why
            if len(half.members) == 1:  # reasons that are true of it
                task = self._tasks[half.members[0]]
                why = plan_as_one_group([task], self._graphs.stats(task), half.device).why
            halves.append((f"{key}{letter}", replace(half, why=(reason, *why))))
        position = self.groups.index((key, plan))
        self.groups[position : position + 1] = halves
        if self._begun:
            self._events.note(f"{error}; trying them in two halves")
            if self._folder is not None:
                self._folder.save_groups(self.groups)
        return halves
