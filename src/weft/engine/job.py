"""Job: train tasks group by group; halve a group that fails until only the members at fault are lost."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.batches.source import FullGraph, MakeSource, is_memory_error
from weft.core.errors import InputError, ModelError, OutOfMemoryError, SpecError, TrainingError, WeftError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.member import Member
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.startup import gc_paused
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.background_probe import LoadSample
from weft.engine.choosing import in_mode, phases_key
from weft.engine.control import Control, Interrupted, Interruption
from weft.engine.derived_cache import kept_forms
from weft.engine.driver import Driver, callbacks_of
from weft.engine.errors import clear_memory_errors, clear_model_errors, give_back_memory, what_was_raised
from weft.engine.estimator import NONE
from weft.engine.events import EventSource
from weft.engine.folder import Groups, RunFolder, RunningReport
from weft.engine.graphs import Graphs, shared_store
from weft.engine.machine import basis_of, environment
from weft.engine.memory import DevicePool, give_back_heap, memory_cap, memory_taken, move_in, move_out, watch_memory
from weft.engine.merger import merger_for
from weft.engine.process_state import FreeThreads, group_state, start_device
from weft.engine.result import Result, model_code
from weft.engine.run_planner import RunPlanner, check_here, check_same_groups, other_weights
from weft.engine.session import Save, Session, outline_of
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.placement import may_sample
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import Checkpoint
from weft.runtime.group import GroupRun
from weft.runtime.infer import treat_inputs
from weft.runtime.modules.convert import stacks_of
from weft.runtime.modules.settings import check_tasks
from weft.runtime.profile_division import divided_source
from weft.sched.admission import decide
from weft.sched.baselines import PipeSwitchLike
from weft.sched.queue_state import DeviceState, MachineState, QueueDecision, QueuedTask

if TYPE_CHECKING:
    from weft.engine.dividing import Dividing


# ---- The groups of a run as a queue, decided on like a server's: one device, and one worker, which is this process.
#
# Groups run in order of their tasks, one at a time (the policy ``pipeswitch``): another order would let what a pruning
# policy compares depend on predicted times. What shares the device at one time is within a group, as planned.
# Admission
# is that of a server, against the bytes that the run may take now. There a task that is refused fails; here the user
# waits for it, and predictions are no proof, so a group that is refused is tried at its turn, and the reason is told.

Group = tuple[str, Plan]
IN_PROCESS = PipeSwitchLike(safety=1.0)  # plans bound their bytes already
CONSIDERED = 32  # of the groups that wait: they start in order
TRIED = "tried all the same: nothing else runs here, and a prediction may be too high"


class GroupQueue:
    """The groups that wait in a run of ``tasks`` on ``device``; ``room()``: the bytes that a group may take now."""

    def __init__(self, device: str, room: Callable[[], int], tasks: Mapping[str, Task]) -> None:
        self._device, self._room, self._tasks = device, room, tasks

    def decide(self, waiting: Sequence[Group]) -> QueueDecision:
        """What the scheduler says of the groups that wait."""
        queued = [queued_group(group, self._tasks) for group in waiting[:CONSIDERED]]
        here = DeviceState(self._device, max(self._room(), 1), workers=1)
        return decide(IN_PROCESS, queued, (), MachineState((here,)))

    def next(self, waiting: Sequence[Group]) -> tuple[Group, str]:
        """The group to train next, and why."""
        decision, first = self.decide(waiting), waiting[0]
        if first[0] in decision.refuse:
            return first, f"{decision.refuse[first[0]]}; {TRIED}"
        (start,) = decision.start
        return next(group for group in waiting if group[0] == start.members[0]), start.why


def queued_group(group: Group, tasks: Mapping[str, Task]) -> QueuedTask:
    """A group as the scheduler sees it: its key, and what it is predicted to take."""
    key, plan = group
    members = [tasks[name] for name in plan.members]
    seconds = float(plan.cost.get("epoch_seconds", 0.0)) * max(task.epochs for task in members)
    return QueuedTask(key, int(plan.cost.get("total_bytes", 0)), seconds, graph=members[0].graph_name, fusable=False)


# ---- What a job says before it trains: what reading the graphs changed, what a budget covers, what was planned.


def remarks_on_graphs(graphs: Sequence[Any]) -> list[str]:
    """What reading the graphs left out or changed; summaries of graphs have nothing to say."""
    notes = [f"graph {graph.name!r}: {note}" for graph in graphs if isinstance(graph, Graph) for note in graph.notes]
    return list(dict.fromkeys(notes))


def remarks_on_budget(budget: int | None, device: str, plans: Sequence[Plan]) -> list[str]:
    """What a budget covers on a CPU, where nothing stops a process that takes more."""
    most = max((plan.cost.get("process_bytes", 0) for plan in plans), default=0)
    if budget is None or device != "cpu" or most <= budget:
        return []
    return [
        f"the budget of {show_bytes(budget)} covers what training adds; the process will take "
        f"about {show_bytes(most)} in all, Python, torch and kernels included, and nothing on a CPU stops it"
    ]


def planned_words(groups: Sequence[tuple[str, Plan]]) -> str:
    """How many tasks and groups there are."""
    tasks = sum(len(plan.members) for _, plan in groups)
    several = f" in {len(groups)} groups" if len(groups) > 1 else ""
    return f"planned: {tasks} task{'s' if tasks > 1 else ''}{several}"


# ---- MemberResults: what became of every member of a job: ended, in training, or not begun.


class MemberResults:
    """The results of ``tasks``, by name; the code of users' modules is taken as it is before training."""

    def __init__(self, tasks: Mapping[str, Task], device: torch.device, events: EventSource, graphs: Graphs) -> None:
        self._tasks, self._device, self._events, self._graphs = tasks, device, events, graphs
        self._codes = {name: model_code(task) for name, task in tasks.items()}
        self._ended: dict[str, Result] = {}
        self._begun: dict[str, Member] = {}  # all members that have begun, as their sessions know them

    @property
    def all_failed(self) -> bool:
        """Whether not one member could be trained."""
        return all(result.status == "failed" for result in self._ended.values())

    @property
    def complete(self) -> bool:
        """Whether every member has ended."""
        return len(self._ended) == len(self._tasks)

    def in_order(self) -> list[Result]:
        """All results, in the order of the tasks."""
        return [self._ended[name] for name in self._tasks]

    def without_weights(self) -> list[Result]:
        """Those of members that have no model to give back."""
        return [result for result in self._ended.values() if result.model is None]

    def add(self, results: Sequence[Result]) -> None:
        """Keep the results of members that have ended."""
        self._ended |= {result.name: result for result in results}

    def follow(self, members: Sequence[Member]) -> None:
        """Keep the records of members that begin."""
        self._begun |= {member.name: member for member in members}

    def of(self, group: GroupRun, members: Sequence[Member], plan: Plan) -> list[Result]:
        """The results of a trained group; a model that cannot be copied costs that model alone."""
        results = []
        for index, (member, task) in enumerate(zip(members, group.tasks, strict=True)):
            model, message = None, member.message
            try:
                model = treat_inputs(group.best_model(index), task, group.made_dense(index))
            except Exception as error:
                if task.traits is not None or is_memory_error(error):
                    raise
                lost = f"task {member.name!r}: trained, but its model could not be copied, so there are no weights: "
                message = "; ".join(filter(None, (message, lost + what_was_raised(error, task))))
                self._events.note(message)
            results.append(
                Result(
                    task,
                    plan,
                    member.metrics(),
                    member.history(),
                    model,
                    environment(self._device),
                    member.status,
                    message,
                    self._graphs.true_stats(task),
                    group.made_dense(index),
                    self._codes[member.name],
                    group.best_kept(index),
                )
            )
        return results

    def never_begun(self, name: str, plan: Plan, status: str, message: str) -> None:
        """Keep and report that a member did not begin."""
        self._ended[name] = self.without_model(name, plan, status, message)
        self._events.never_begun(self._ended[name])

    def without_model(self, name: str, plan: Plan, status: str, message: str) -> Result:
        """A member without weights, with what it recorded if something went wrong on the way."""
        member = self._begun.get(name)
        metrics: dict[str, Any] = {"best_epoch": 0, "epochs_run": 0, "seconds": 0.0, "seconds_per_epoch": 0.0}
        metrics |= {"epochs_run": 0 if member is None else member.epoch}
        history = {} if member is None else member.history()
        return Result(self._tasks[name], plan, metrics, history, None, environment(self._device), status, message)

    def standing(self, plans: Mapping[str, Plan]) -> list[Result]:
        """Every member as it stands now: those that ended, those in training, those that wait."""
        results = []
        for name, task in self._tasks.items():
            member = self._begun.get(name)
            if name in self._ended:
                results.append(self._ended[name])
            elif member is None or not member.rows:
                results.append(
                    self.without_model(name, plans[name], "waiting" if member is None else member.status, "")
                )
            else:
                ended = (environment(self._device), member.status, member.message)
                results.append(Result(task, plans[name], member.metrics(), member.history(), None, *ended))
        return results


# ---- GroupSources: where the batches of a job's groups come from, and who prepares them.


class GroupSources:
    """Sources of batches for groups on ``machine``.

    ``options.batches`` makes the batches in place of Weft's sampler; ``options.hardware`` prepares batches in addition
    to the host (:class:`weft.batches.Hardware`; None: the GPU).
    """

    def __init__(self, machine: Machine, graphs: Graphs, options: RunOptions) -> None:
        self._machine, self._graphs, self._placement = machine, graphs, options.placement
        self._loader, self._hardware = options.batches, options.hardware

    def source(self, task: Task, plan: Plan) -> MakeSource:
        """The whole graph in every step, or batches that are sampled or loaded."""
        if not task.sampled and self._loader is None:
            return FullGraph
        from weft.batches.loaded import loading_for  # a run on the whole graph does without
        from weft.batches.sampled import source_for

        if self._loader is None:
            source = source_for(task, plan, self._placement.user_policy)
        else:
            source = loading_for(task, self._loader, plan)
        return self._dividing.source(source, plan)

    @cached_property
    def _dividing(self) -> Dividing:
        from weft.engine.dividing import Dividing

        return Dividing(self._machine, self._hardware, self._placement)

    def divide(self, group: GroupRun) -> str:
        """Divide the batches of ``group`` if both sides can prepare them; a remark on how, empty if they cannot."""
        source = divided_source(group)
        if source is None:
            return ""
        digest = self._graphs.stats(group.tasks[0]).fingerprint().digest
        trainer = getattr(self._hardware, "profile_key", getattr(self._hardware, "name", "gpu"))
        key = phases_key(group.tasks, group.plan.places, digest, trainer)
        group.plan, remark = self._dividing.divide(group, source, key)
        return remark


class Job:
    """``tasks`` on ``device``; emits to ``events``, saves to ``folder``.

    Trains the groups of ``report``, or plans them. ``groups`` are the plans as they were carried out, each with
    the key of its checkpoint.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        events: EventSource,
        folder: RunFolder | None,
        options: RunOptions = NONE,
        control: Control | None = None,
        report: PlanReport | None = None,
    ) -> None:
        start_device(device)
        self._tasks = {task.label: task for task in tasks}
        self._device, self._events, self._folder, self._options = device, events, folder, options
        self._control, self._planned = control or Control(), report
        self._began = LoadSample.now()  # what else the machine does meanwhile
        self._store = shared_store()  # of a worker that keeps graphs between runs
        self._graphs = self._make_graphs()
        self._planner = RunPlanner(device, self._graphs, options)
        self._sources = GroupSources(self._planner.machine, self._graphs, options)
        self._results = MemberResults(self._tasks, device, events, self._graphs)
        self._errors: list[WeftError] = []
        self._board: dict[str, Member] = {}  # of all members that have begun, as the drivers know them
        self._resuming, self._begun = False, 0
        self._told_of_forms = False
        self._parts: list[weakref.ref[Any]] = []  # of the last group that trained; none: not known
        self._scheduled = ""  # why the group at hand is trained now
        self.running_report: RunningReport | None = None  # where the members are shown while they train
        self.groups: Groups = []
        self.not_written: TrainingError | None = None  # why results are in memory only

    def _make_graphs(self) -> Graphs:
        return Graphs(self._device, on_host=self._options.budget is not None, store=self._store)

    def graph_of(self, task: Task) -> GraphStats:
        """The summary of the graph of ``task``."""
        return self._graphs.true_stats(task)

    def train(self, resume: bool) -> list[Result]:
        """Train everything; the results in the order of the tasks. Raises the error if not one task could begin."""
        saved = self._folder.saved_groups() if resume and self._folder else None
        self._resuming = saved is not None
        if resume and saved is None and self._folder:
            self._events.note("no checkpoint to resume from; starting afresh")
        self._prepare(saved)
        # Group after group, in the order of the queue.
        waiting = list(self.groups)
        queue = GroupQueue(str(self._device), lambda: self._planner.room, self._tasks)
        with Interruption(self._control), self._cap():
            while waiting:
                (key, plan), self._scheduled = queue.next(waiting)
                waiting.remove((key, plan))
                if not self._cancelled(key, plan) and not self._preempted(plan):
                    waiting = self._group(key, plan) + waiting
                    self._graphs.let_go(self._tasks[name] for _, plan in waiting for name in plan.members)
                    if self._pool is not None:
                        move_out(self._pool)
                    if waiting or self._device.type == "cuda":
                        # Only now does nothing hold the group any more, unless it refers to itself.
                        give_back_memory(self._device, gone=bool(self._parts) and all(p() is None for p in self._parts))
        if self._device.type == "cpu":
            give_back_heap()
        lost = self._results.without_weights()
        if lost and self._folder is not None and self._folder.opened:
            self._keep(lost)
        if self._results.all_failed:
            raise self._errors[0]
        return self._results.in_order()

    def _prepare(self, saved: Groups | None) -> None:
        """Check the tasks and their graphs, and find the groups."""
        report = self._planned
        if saved and report is not None:
            check_same_groups([plan for _, plan in saved], report.plans, str(self._folder.path if self._folder else ""))
        with ExitStack() as stack:
            stack.enter_context(clear_memory_errors(list(self._tasks), self._device))
            check_tasks(list(self._tasks.values()))
            for task in self._tasks.values():
                self._graphs.check(task)
            self._note(remarks_on_graphs([self._graphs.summary(task) for task in self._tasks.values()]))
            stack.enter_context(self._cap())
            if report is not None:
                check_here(report.plans, self._graphs, self._planner)
            self.groups = self._find_groups(saved)
        self._take_modes()
        if self._store is None:  # a server limits what its workers take
            self._note(remarks_on_budget(self._options.budget, self._device.type, [plan for _, plan in self.groups]))
        self._events.preparing(planned_words(self.groups), groups=len(self.groups), tasks=len(self._tasks))

    def _note(self, remarks: Sequence[str]) -> None:
        for remark in remarks:
            self._events.note(remark)

    def _cap(self) -> AbstractContextManager[None]:
        names = {task.graph for task in self._tasks.values() if isinstance(task.graph, str)}
        return memory_cap(self._device, self._planner.machine, self._options.budget, self._store, names)

    # ---- before training -----------------------------------------------------------------------------

    def _take_modes(self) -> None:
        """Let every task train in the mode that its plan says: what a task leaves open, the plan has decided."""
        for _, plan in self.groups:
            for name in plan.members:
                self._tasks[name] = in_mode(self._tasks[name], plan.mode)

    def _find_groups(self, saved: Groups | None) -> Groups:
        """Those of a former run, or new ones."""
        known = {name for _, plan in saved or () for name in plan.members}
        missing = [task for name, task in self._tasks.items() if name not in known]
        if saved and not missing:
            return saved
        first = 1 + max((_number(key) for key, _ in saved or ()), default=0)
        if saved:
            self._events.note(f"{len(known)} of {len(self._tasks)} members are there already")
        return [*(saved or ()), *((str(place), plan) for place, plan in enumerate(self._plans(missing), first))]

    def _plans(self, missing: Sequence[Task]) -> list[Plan]:
        if self._planned is not None:
            # The settings are in the folder once, not with every member's plan.
            return [replace(plan, tasks=()) for plan in self._planned.plans]
        tasks = self._planner.with_modes([self._as_before(task) for task in missing])
        self._planner.check(tasks)
        return self._planner.groups(tasks)

    def _as_before(self, task: Task) -> Task:
        """``task`` in the mode of the run that is resumed, where it leaves that to how much memory is free."""
        mode = self._folder.mode if self._folder is not None and self._resuming else None
        return task.with_values(mode=mode) if mode is not None and may_sample(task) else task

    def _cancelled(self, key: str, plan: Plan) -> bool:
        """Whether every member of the group was cancelled before it began; a former run may have begun it."""
        if len(self._control.wanted(plan.members)) < len(plan.members):
            return False
        if self._resuming and self._folder is not None and self._folder.has_checkpoint(key):
            return False
        for name in plan.members:
            self._results.never_begun(name, plan, "cancelled", f"task {name!r}: cancelled before it began")
        return True

    def _preempted(self, plan: Plan) -> bool:
        """Whether the run is to end before this group begins."""
        if not self._control.requests().preempt:
            return False
        for name in plan.members:
            self._results.add([self._results.without_model(name, plan, "preempted", f"task {name!r}: preempted")])
        return True

    # ---- one group -----------------------------------------------------------------------------------

    def _group(self, key: str, plan: Plan) -> Groups:
        """Train one group; what has to be tried instead, where it failed."""
        tasks, self._parts = [self._tasks[name] for name in plan.members], []
        checkpoint = self._checkpoint(key, tasks)
        with group_state(tasks[0], plan.threads, self._device), ExitStack() as stack:
            try:
                with clear_memory_errors(plan.members, self._device), clear_model_errors(tasks):
                    self._warm(tasks, plan)
                    graph = self._graphs.placed(tasks[0], plan.places)
                    stack.enter_context(self._forms_of(graph))
                    watch_memory(self._device)
                    with gc_paused():  # it imports and loads kernels, which make many objects that stay
                        group = self._make_group(tasks, graph, plan, checkpoint)
            except (InputError, OutOfMemoryError, ModelError) as error:
                if checkpoint is not None and isinstance(error, InputError):
                    raise  # halves would begin anew, without what was trained
                return self._failed(key, plan, error)
            plan = group.plan
            if all(task.traits is not None for task in tasks):  # a user's module may hold itself, and much else
                self._parts = [weakref.ref(part) for part in (group, *group.stacks)]
            if checkpoint is not None and self._folder is not None:
                self._folder.check_graph(checkpoint, graph)
            if self._planned is not None and plan.weights and plan.weights != group.weight_digests():
                raise SpecError(other_weights(plan.members[0], tasks[0].model_name))
            self._begin(key, group)
            try:
                with clear_memory_errors(plan.members, self._device):
                    self._train(key, group, checkpoint)
            except (OutOfMemoryError, ModelError) as error:
                return self._failed(key, plan, error)
            finally:
                group.close()
        return []

    @contextmanager
    def _forms_of(self, graph: Graph) -> Iterator[None]:
        """Remember the forms of ``graph`` inside; say once what could not be."""
        with kept_forms(graph) as keeper:
            yield
        if keeper is not None and keeper.problem and not self._told_of_forms:
            self._told_of_forms = True
            self._events.note(keeper.problem)

    def _warm(self, tasks: list[Task], plan: Plan) -> None:
        """Compile the kernels that the group lacks, before the first of them is launched."""
        self._planner.warm(tasks, plan, self._tell_compiling)

    def _tell_compiling(self, done: int, total: int) -> None:
        self._events.preparing(f"compiling kernels: {done} of {total}", done=done, total=total)

    def _checkpoint(self, key: str, tasks: list[Task]) -> Checkpoint | None:
        return self._folder.checkpoint_of(key, tasks) if self._folder and self._resuming else None

    def _make_group(self, tasks: list[Task], graph: Graph, plan: Plan, checkpoint: Checkpoint | None) -> GroupRun:
        """The group as planned, slow stacks taken apart unless its plan was given; or as the run that is resumed."""
        source = self._sources.source(tasks[0], plan)
        former = () if checkpoint is None else stacks_of(checkpoint.about)
        measure = checkpoint is None and self._planned is None
        group = GroupRun(tasks, graph, plan, self._device, merger_for(plan), source, measure, former)
        if group.plan is not plan:
            group.plan = replace(group.plan, weights=group.weight_digests()) if plan.weights else group.plan
            self._replace(plan, group.plan)
        told = move_in(group, self._pool) if self._pool is not None else ""
        if told:
            self._events.note(told)
        return group

    @property
    def _pool(self) -> DevicePool | None:
        """The buffer of the device that a worker has for all of its groups."""
        return None if self._store is None else self._store.pool

    def _replace(self, old: Plan, new: Plan) -> None:
        """Take another plan for a group than the one it was planned with."""
        self.groups = [(name, new if one == old else one) for name, one in self.groups]
        if self._folder is not None and self._folder.opened:
            self._folder.save_groups(self.groups)

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
        if self.running_report is not None and self._folder is not None and self._folder.opened:
            self.running_report(self._standing, force)

    def _standing(self) -> list[Result]:
        return self._results.standing({name: plan for _, plan in self.groups for name in plan.members})

    def _save(self, key: str, group: GroupRun, about: dict[str, Any]) -> Path:
        """Write a checkpoint, and the report as it is by then."""
        assert self._folder is not None
        path = self._folder.save_state(key, group, about)
        self._report()
        return path

    def _train(self, key: str, group: GroupRun, checkpoint: Checkpoint | None) -> None:
        save = None if self._folder is None else partial(self._save, key)
        planned, remark = group.plan, self._sources.divide(group)
        if remark:
            self._replace(planned, group.plan)
            self._events.note(remark)
        index = {task.label: position for position, task in enumerate(group.tasks)}

        def model_of(name: str) -> torch.nn.Module:
            member = index[name]
            return treat_inputs(group.current_model(member), group.tasks[member], group.made_dense(member))

        driver = Driver(outline_of(group), self._options, self._board, callbacks_of(group.tasks), make_model=model_of)
        session = self._make_session(group, save, driver)
        self._results.follow(session.members)
        if checkpoint is not None:
            session.resume(checkpoint.tensors, checkpoint.about)
        session.train()
        if session.left == "interrupted":
            self._report(force=True)
            place = None if session.checkpoint is None else session.checkpoint.parent
            interrupted = Interrupted(session.group.epoch, place, self._control.signal or signal.SIGINT)
            raise interrupted
        plan = self._took(key, group.plan, session)
        found = self._results.of(group, session.members, plan)
        self._results.add(found)
        self._keep(found)
        if not self._results.complete:
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

    def _make_session(self, group: GroupRun, save: Save | None, driver: Driver) -> Session:
        threads = FreeThreads(self._began) if self._device.type == "cpu" else None
        return Session(group, self._events, save, driver, self._control, threads)

    def _took(self, key: str, plan: Plan, session: Session) -> Plan:
        """The plan with what the group took, which the plans to come learn from, and with how it really ran."""
        why = (*plan.why, *(f"as it ran: {note}" for note in dict.fromkeys(session.group.notes)))
        measured = replace(plan, measured={**session.measured, **memory_taken(self._device)}, why=why)
        self.groups[self.groups.index((key, plan))] = (key, measured)
        if self._predicted_here:
            self._planner.learn(measured, self._folder.path if self._folder is not None else None)
        return measured

    @property
    def _predicted_here(self) -> bool:
        """Whether predictions are from the rates known of this machine: only then do they say how far those are off."""
        report = self._planned
        return report is None or basis_of(report.machine) == basis_of(self._planner.machine)

    # ---- trouble -------------------------------------------------------------------------------------

    def _failed(self, key: str, plan: Plan, error: WeftError) -> Groups:
        """Try a group in two halves; give up on a member that fails alone."""
        if len(self._tasks) == 1:
            raise error
        if len(plan.members) == 1:
            self._errors.append(type(error)(str(error)))  # without the frames that hold its tensors
            self._results.never_begun(plan.members[0], plan, "failed", str(error))
            return []
        halves = [
            (f"{key}{letter}", self._explained(half, plan)) for letter, half in zip("ab", plan.halves(), strict=True)
        ]
        place = self.groups.index((key, plan))
        self.groups[place : place + 1] = halves
        if self._begun:
            self._events.note(f"{error}; trying them in two halves")
            if self._folder is not None:
                self._folder.save_groups(self.groups)
        return halves

    def _explained(self, half: Plan, whole: Plan) -> Plan:
        """Half of a group with reasons that are true of it."""
        reason = f"one of two halves of a group of {len(whole.members)} that could not be trained as a whole"
        if len(half.members) > 1:
            return replace(half, why=(reason, *whole.why))
        task = self._tasks[half.members[0]]
        return replace(half, why=(reason, *plan_as_one_group([task], self._graphs.stats(task), half.device).why))


def _number(key: str) -> int:
    """The number that the key of a group begins with; halves have a letter behind it."""
    digits = key[: len(key) - len(key.lstrip("0123456789"))]
    return int(digits) if digits else 0
