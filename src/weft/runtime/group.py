"""GroupRun: train tasks on one graph and one device together, one epoch at a time.

It owns the stacks and advances them; the engine decides when to poll, what to show and when to save.

Shapes: T members of a stack, L epochs, M columns of history.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.placement import place_graph
from weft.batches.source import Batch, BeginsAhead, FullGraph, MakeSource, Source
from weft.core.decision import Update
from weft.core.errors import InputError, SpecError
from weft.core.models import BUILT_IN
from weft.core.placement import on_device, within_device
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.wording import option
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.sparse.row_clusters import ordered_rows
from weft.runtime.device.cuda_graph import ConcurrentSteps, Recordings, Replay, Steps
from weft.runtime.device.process import HOST, OwnGenerator, generator_states, restore_generators, same_draws, seed_all
from weft.runtime.epoch import NOT_CAPTURED, SteppedEpoch, slower_than_alone
from weft.runtime.modules.convert import BuiltStack, Converted
from weft.runtime.modules.state import TEXT, ModuleState, restore_state, with_tensors
from weft.runtime.step.evaluation import evaluates_at
from weft.runtime.step.forward import Layout
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack, MemberSlot
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import GRADIENT_NORM, RATE, TOP, TOP_BUFFER, buffer_called, copied_name, is_flat

BEST = "best."  # before names in a checkpoint: of what a module kept with its best weights
STEP_PARTS = ("objective", "metric", "optimizer")  # of a task, that may be a function of the user's own


@dataclass
class GroupMember:
    """One task of a group: its index among the tasks, its stack, and its row there (None: dropped).

    ``begun``: the epoch of the group after which it began.
    """

    index: int
    task: Task
    stack: Stack
    row: int | None
    slot: MemberSlot
    dropped: dict[str, Tensor] = field(default_factory=dict)  # its state on the host, once dropped
    begun: int = 0

    def tensor(self, name: str) -> Tensor:
        """This member's part of the state, by the names of :meth:`weft.runtime.step.state.State.tensors`."""
        return self.dropped[name] if self.row is None else self.stack.state.tensors()[name][self.row]

    def best(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The best weights and buffers, padded as the stack has them."""
        names = self.stack.state.best_buffers
        return self.tensor("best_flat"), {name: self.tensor(f"best_buffer.{name}") for name in names}

    @property
    def _true_layout(self) -> Layout:
        """Of the parameters at their true size."""
        layout, padding = self.stack.members.layout, self.slot.padding
        return layout if padding is None else padding.layout(layout)

    def saved(self, name: str) -> Tensor:
        """The same as a checkpoint holds it, so that the member may also continue in another group, or alone.

        Weights and buffers have the member's true size, tensors with one number per parameter are in the order of
        the parameters' elements, and the history has the member's epochs.
        """
        tensor, copied = self.tensor(name), copied_name(name)
        return torch.stack([self._true(copied, part) for part in tensor]) if copied else self._true(name, tensor)

    def _true(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor called ``name`` of this member at its true size."""
        padding = self.slot.padding
        if name == "history":
            return tensor[: self.task.epochs]
        if is_flat(name):
            return self._true_layout.in_order(tensor if padding is None else padding.narrow(tensor))
        buffer = buffer_called(name)
        return tensor if padding is None or not buffer else padding.narrow_buffer(buffer, tensor)

    def from_saved(self, name: str, saved: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`saved`, from a checkpoint; what was written as the stack has it is accepted, too.

        Raises :class:`SpecError` if the checkpoint does not have it, or in another shape.
        """
        tensor, copied = saved.get(f"{self.index}.{name}"), copied_name(name)
        if copied and tensor is not None and len(tensor) == self.task.keep_top:
            return torch.stack([self._as_in_stack(copied, part) for part in tensor])
        return self._as_in_stack(name, tensor)

    def _as_in_stack(self, name: str, tensor: Tensor | None) -> Tensor:
        """The inverse of :meth:`_true`."""
        shape, padding, buffer = self.stack.state.tensors()[name].shape[1:], self.slot.padding, buffer_called(name)
        true = shape
        if name == "history":
            true = torch.Size((self.task.epochs, *shape[1:]))
        elif padding is not None and is_flat(name):
            true = torch.Size((padding.parameters,))
        elif padding is not None and buffer:
            true = padding.own_shape(buffer)
        if tensor is None or tensor.shape not in (true, shape):
            raise SpecError(
                f"task {self.task.label!r}: the checkpoint holds {'nothing' if tensor is None else list(tensor.shape)} "
                f"for {name!r}, but this model needs {list(shape)}; it was written for another model or graph"
            )
        if name == "history" and tensor.shape != shape:
            longer = tensor.new_full(shape, torch.nan)  # nothing was measured in the rows that it lacks
            longer[: self.task.epochs] = tensor
            return longer
        if padding is None or tensor.shape == shape:
            return self.stack.members.layout.laid_out(tensor) if is_flat(name) else tensor
        if is_flat(name):
            return padding.widen(self._true_layout.laid_out(tensor))
        return padding.widen_buffer(buffer, tensor)


@dataclass(eq=False, repr=False)
class GroupRun:
    """Tasks in training on ``device``, with the graph where the plan says; ``notes`` holds remarks for the user.

    ``plan.stack_members`` says which tasks stack; tasks that turn out not to fit into one stack train side by side in
    stacks of their own, with a note. ``epoch``: how many epochs the group has trained, ``step_in_epoch``: steps of the
    next one. ``make_source`` makes the source of batches: the whole graph by default. ``measure``: users' modules
    whose stack turns out slower than each alone train side by side as well. ``former``: the stacks of the run that is
    resumed, which are built again as they were; ``built``: those of this one, for its checkpoints and results.
    ``merger`` merges the steps of stacks if the plan says so: a :class:`weft.weave.step.Weaver`, which the engine
    supplies.
    """

    tasks: Sequence[Task]
    graph: Graph
    plan: Plan
    device: torch.device
    merger: Any = None
    make_source: MakeSource = FullGraph
    measure: bool = False
    former: Sequence[BuiltStack] = ()

    def __post_init__(self) -> None:
        self.tasks, plan, device = tuple(self.tasks), self.plan, self.device
        self.epochs = max(task.epochs for task in self.tasks)
        self.epoch = self.step_in_epoch = 0
        self._notes: list[str] = []
        splits = {task.split or 0 for task in self.tasks}
        graph = self.graph.split(*splits) if len(splits) == 1 and self.graph.num_splits > 1 else self.graph
        placement = plan.places if device.type in (plan.device, "meta") else on_device(device.type)
        self.graph = place_graph(graph, placement, device)
        if plan.row_order == "clustered" and device.type == "cuda":
            self.graph = clustered(self.graph, self._notes)
        features = within_device(placement, plan.device if device.type == "meta" else device.type).features
        self.inputs = Inputs(self.graph, self.make_source, device, features)
        self.inputs.group_size = len(self.tasks)
        self._own_random: dict[int, OwnGenerator] = {}  # by the id of the stack
        if self.former:
            stacks = self._build_again(self.former)
        else:
            stacks = [made for rows in plan.stack_members for made in self._build_stacks(list(rows), self.measure)]
        self.stacks = [stack for stack, _ in stacks]
        self.built = tuple(
            BuiltStack(tuple(rows), stack.members.converted, stack.members.findings.unsaved) for stack, rows in stacks
        )
        members = [
            GroupMember(index, self.tasks[index], stack, row, stack.members.slots[row])
            for stack, rows in stacks
            for row, index in enumerate(rows)
        ]
        self.members = sorted(members, key=lambda member: member.index)
        self.merged: Any = None  # the merged step of several stacks, once it is prepared
        at_once = plan.join == "concurrent" and device.type == "cuda"
        self.run_steps: Callable[[Steps], None] | None = ConcurrentSteps(device) if at_once else None
        self._has_run: set[bool] = set()  # kinds of epochs, with and without evaluation, that have run before
        self._not_compiled: set[int] = set()  # stacks that failed to compile: not tried again
        self._recordings = Recordings()
        self._run_epoch: dict[bool, Callable[[], None]] = {}  # with evaluation or without; empty: not prepared
        self._stepped: list[SteppedEpoch] | None = None  # if an epoch has several batches

    # ---- building ------------------------------------------------------------------------------------

    def _build_again(self, former: Sequence[BuiltStack]) -> list[tuple[Stack, list[int]]]:
        """The stacks of a former run: what was decided there is not decided anew, which might give other numbers."""
        planned, stacks = len(self.plan.stack_members), []
        if len(former) != planned:
            self._notes.append(f"{len(self.tasks)} tasks train as {len(former)} stacks, not {planned}, as before")
        for built in former:
            try:
                stacks.append((self._build_stack(list(built.members), built.converted, True), list(built.members)))
            except CannotStack as error:
                names = ", ".join(repr(self.tasks[index].label) for index in built.members)
                raise SpecError(
                    f"tasks {names}: were trained as one stack, which cannot be done again: {error}; resume with what "
                    f"they were trained with, or choose another {option('out')} to start afresh"
                ) from None
        return stacks

    def _build_stacks(self, rows: list[int], measure: bool) -> list[tuple[Stack, list[int]]]:
        """One stack of the tasks ``rows``, or one of each if they do not fit into one or are slower in it."""
        try:
            stack = self._build_stack(rows)
        except CannotStack as error:
            reason, converted = str(error), None
        else:
            slower = slower_than_alone(stack, self.plan) if measure else None
            stack.members.alone = None  # it holds a module and a state
            if slower is None:
                return [(stack, rows)]
            reason, converted = slower, stack.members.converted  # tried once: each trains as in the stack
            del stack
        self._notes.append(f"{len(rows)} tasks train side by side, not as one stack: {reason}")
        return [(self._build_stack([row], converted), [row]) for row in rows]

    def _build_stack(self, rows: list[int], converted: Converted | None = None, agree: bool = False) -> Stack:
        """The stack of the tasks ``rows``; ``converted`` and ``agree``: what was found before, see :class:`Inputs`."""
        self.inputs.converted, self.inputs.agree = converted, agree
        tasks = [self.tasks[row] for row in rows]
        dropped = any(task.input_dropout for task in tasks)
        once = self.plan.first_layer == "once" and not dropped and not tasks[0].sampled
        draws = tasks[0].traits is None or tasks[0].has_own("objective") or tasks[0].has_own("metric")
        if len(rows) > 1 or len(self.tasks) == 1 or not draws or self.device.type == "meta":
            return Stack(tasks, self.inputs, first_once=once, length=self.epochs)
        # A user's module or function may draw from torch's generators, here as it would alone.
        generator = OwnGenerator(tasks[0].seed, self.device)
        with generator:
            stack = Stack(tasks, self.inputs, first_once=once, length=self.epochs)
        findings, generator.with_python = stack.members.findings, stack.members.findings.varies
        if self.device.type == "cpu" or findings.draws or findings.varies or stack.eager is not None:
            self._own_random[id(stack)] = generator
        return stack

    # ---- one epoch -----------------------------------------------------------------------------------

    def step(self, evaluated: bool = True) -> None:
        """One epoch of every stack, as it is captured; without an evaluation it records only the training losses."""
        apart = self.stacks
        if self.device.type == "cpu":  # a captured step has all of them
            apart = [stack for stack in self.stacks if not stack.state.idle]
        if self.merged is not None:
            self.merged(evaluated)
            apart = [stack for stack in self.stacks if stack not in self.merged.stacks]
        steps = [partial(self._in_own_random, stack, partial(stack.epoch, evaluated)) for stack in apart]
        # Concurrent if the plan says so; the first time in turn, since steps build shared data on first use.
        if self.run_steps is not None and evaluated in self._has_run and len(steps) > 1:
            self.run_steps(steps)
        else:
            for step in steps:
                step()
        self._has_run.add(evaluated)

    def _in_own_random(self, stack: Stack, step: Callable[[], None]) -> None:
        """Call ``step`` with the stack's own generator, if it has one."""
        with self._own_random.get(id(stack)) or nullcontext():
            step()

    def merge(self) -> None:
        """Merge the steps of several stacks into one if the plan says so.

        The merged step is checked against the stacks' own; if it fails, training continues without it, with a note.
        """
        stacks = [stack for stack in self.stacks if id(stack) not in self._own_random and stack.eager is None]
        if not self.plan.woven or len(stacks) < 2 or self.merged is not None:
            return
        try:
            if self.merger is None:
                raise InputError("this run has no step merger")
            self.merged = self.merger.merge(stacks)
        except torch.OutOfMemoryError:
            raise
        except Exception as reason:
            what = str(reason) if isinstance(reason, InputError) else f"{type(reason).__name__}: {reason}"
            self._notes.append(f"{len(stacks)} stacks train side by side, not as one step: {what.splitlines()[0]}")

    def _compile(self) -> None:
        """Compile the steps of stacks with Inductor if the plan says so; if that fails, a note says why."""
        if not self.plan.compiled or self.merged is not None:
            return
        from weft.runtime.compile import compile_stack  # brings in torch's compilers

        evaluated = any(member.task.eval_every < member.task.epochs for member in self.present)
        for stack in self.stacks:
            if id(stack) in self._not_compiled:
                continue
            try:
                self._in_own_random(stack, partial(compile_stack, stack, evaluated))
            except (InputError, torch.OutOfMemoryError) as reason:
                what = "memory ran out" if isinstance(reason, torch.OutOfMemoryError) else str(reason)
                self._notes.append(f"the step is not compiled: {what}")
                self._not_compiled.add(id(stack))

    @property
    def started(self) -> bool:
        """Whether the step has been prepared (and captured, if the plan says so)."""
        return True in self._run_epoch or self._stepped is not None

    @property
    def recorded(self) -> bool:
        """Whether an epoch is the replay of a CUDA graph."""
        if self._stepped is not None:
            return any(epoch.recorded for epoch in self._stepped)
        return any(isinstance(run, Replay) for run in self._run_epoch.values())

    def prepare(self) -> None:
        """Capture the step as a CUDA graph if the plan says so; the state is unchanged."""
        if self.has_steps:
            by_source: dict[int, list[Stack]] = {}
            for stack in self.stacks:
                by_source.setdefault(id(stack.source), []).append(stack)
            record = self._may_record()
            self._stepped = [
                SteppedEpoch(stacks[0].source, stacks, record, self._in_own_random, self._notes)
                for stacks in by_source.values()
            ]
            return
        self.merge()
        self._compile()
        kinds = (True,) if any(member.task.eval_every == 1 for member in self.present) else (True, False)
        too_much = False
        try:
            self._record(*kinds)
        except torch.OutOfMemoryError:
            too_much = any(stack.compiled is not None for stack in self.stacks)
            if not too_much:
                raise
        if too_much:  # the compiled step holds folded constants: without it the run may fit
            self._recordings = Recordings()
            for stack in self.stacks:
                stack.compiled = None
            self._notes.append("the step is not compiled: memory ran out")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._record(*kinds)

    def _record(self, *kinds: bool) -> None:
        """Set how epochs of these ``kinds`` run, with an evaluation or without: captured if they may be."""
        # By a proxy: a group that held itself would keep its memory until the next garbage collection.
        steps = {evaluated: partial(GroupRun.step, weakref.proxy(self), evaluated) for evaluated in kinds}
        self._run_epoch |= steps
        if not self._may_record():
            return
        changed = [tensor for stack in self.stacks for tensor in stack.state.tensors().values()]
        # A step of Weft's own operators, as they are written, does not wait for the device.
        built_in = all(task.traits is not None and task.model_name in BUILT_IN for task in self.tasks)
        own = any(task.has_own(name) for task in self.tasks for name in STEP_PARTS)
        plain = self.merged is None and all(stack.compiled is None for stack in self.stacks)
        replays = {
            evaluated: Replay(step, changed, record=False, never_waits=built_in and plain and not own)
            for evaluated, step in steps.items()
        }
        self._recordings.add(*replays.values())
        self._notes += [NOT_CAPTURED.format("the step runs", reason) for reason in self._recordings.reasons]
        self._run_epoch |= {evaluated: replay for evaluated, replay in replays.items() if replay.recorded}

    def _may_record(self) -> bool:
        """Whether to capture the step: as planned, unless something is kept in Python between calls."""
        if not self.plan.replay:
            return False
        for stack in self.stacks:
            reason, model = stack.eager, stack.tasks[0].model_name
            if stack.members.findings.hidden_state is not None:
                reason = f"model {model}: {stack.members.findings.hidden_state}, and a CUDA graph would repeat one call"
            elif stack.members.findings.branches and not stack.source.constant:  # what it keeps then is followed
                reason = f"model {model} reads numbers into Python, and may do something else in a later step"
            elif HOST in stack.members.findings.draws:
                reason = f"model {model} draws random numbers on the host, and a CUDA graph would repeat one"
            elif id(stack) in self._own_random:
                reason = f"model {model} draws random numbers, each of several tasks from a generator of its own"
            if reason is not None:
                self._notes.append(f"the step runs eagerly: {reason}")
                return False
        return True

    # ---- advancing -----------------------------------------------------------------------------------

    def advance(self, epochs: int, stop: Callable[[], bool] = bool) -> list[Update]:
        """Train up to ``epochs`` more epochs, fewer once ``stop()`` says so, and read what happened."""
        if not self.started and self.stacks:
            self.prepare()
        first = self.epoch
        last = min(first + epochs, self._last_epoch)
        while self.epoch < last and not (self.epoch > first and stop()):
            if not self._one_epoch(stop):
                break
        return self.poll(first)

    @property
    def _last_epoch(self) -> int:
        return max((member.begun + member.task.epochs for member in self.present), default=0)

    def _one_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train one epoch, or the rest of it; returns whether it ended before ``stop()`` was true."""
        tasks = [(self.epoch - member.begun, member.task) for member in self.present]
        evaluated = any(evaluates_at(epoch, task.eval_every, task.epochs) for epoch, task in tasks)
        if self._stepped is None:
            self.epoch += 1
            self._run_epoch[evaluated]()
            return True
        for stepped in self._stepped:
            if isinstance(stepped.source, BeginsAhead):
                stepped.source.expect(self.epoch + 1 if self.epoch + 1 < self._last_epoch else None)
        steps_per_epoch = self._stepped[0].source.steps_per_epoch
        batches = [stepped.batches(self.epoch, self.step_in_epoch) for stepped in self._stepped]
        for together in zip(*batches, strict=True):  # all sources in lockstep
            for stepped, batch in zip(self._stepped, together, strict=True):
                stepped.train_on(batch)
            self.step_in_epoch += 1
            if self.step_in_epoch < steps_per_epoch and stop():
                break
        if self.step_in_epoch < steps_per_epoch:
            return False
        for stepped in self._stepped:
            stepped.end(evaluated)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return True

    def one_step(self, source: Source) -> Callable[[Batch], None]:
        """A function that trains the stacks of ``source`` on one of its batches: for profiles."""
        if not self.started:
            self.prepare()
        return next(stepped.train_on for stepped in self._stepped or () if stepped.source is source)

    def close(self) -> None:
        """Training has ended: sources that have begun the next epoch give it up, other runs find globals as before."""
        _close(self.stacks)
        for member in self.members:
            if member.stack.members.globals is not None:
                member.stack.members.globals.restore()

    # ---- describing ----------------------------------------------------------------------------------

    @property
    def present(self) -> list[GroupMember]:
        """The members that have not been dropped."""
        return [member for member in self.members if member.row is not None]

    @property
    def has_steps(self) -> bool:
        """Whether an epoch has several steps."""
        return any(not stack.source.constant for stack in self.stacks)

    @property
    def notes(self) -> list[str]:
        """Remarks for the user so far, each once."""
        return list(dict.fromkeys(self._notes + [note for stack in self.stacks for note in stack.members.notes]))

    def reads(self) -> dict[str, float]:
        """What caches of sampled training had of what was read, so far; empty without any."""
        return {name: value for stack in self.stacks for name, value in stack.source.reads().items()}

    def num_parameters(self, index: int) -> int:
        """Parameters of a member's model at its true size."""
        member = self.members[index]
        return member.stack.members.layout.total if member.slot.padding is None else member.slot.padding.parameters

    def describe(self, index: int) -> dict[str, Any]:
        """What a member trains, for the journal."""
        stack = self.members[index].stack
        return {
            "parameters": self.num_parameters(index),
            "metric": stack.metric,
            "objective": stack.objective.name,
            "precision": self.tasks[index].precision,
        }

    def _rows_from(self, since: int, stack: Stack) -> Tensor:
        """The history ``[T, K, M]`` of every member of ``stack`` in the epochs of the group from ``since`` on."""
        history, rows = stack.state.history, {m.row or 0: m for m in self.present if m.stack is stack}
        begun = [rows[row].begun for row in sorted(rows)]
        if not any(begun):
            return history[:, since : self.epoch]
        count = self.epoch - since if max(begun) <= since else self.epoch
        first = torch.tensor([max(since - epoch, 0) for epoch in begun], device=self.device)[:, None]
        epochs = (first + torch.arange(count, device=self.device)).clamp(max=history.shape[1] - 1)
        return history.gather(1, epochs[:, :, None].expand(-1, -1, history.shape[2]))

    def poll(self, first: int = 0) -> list[Update]:
        """What the device has recorded of every member from epoch ``first`` of the group (counted from 0) on.

        One read per stack.
        """
        columns = {}
        for stack in self.stacks:
            state = stack.state
            rows, end = self._rows_from(first, stack).tolist(), state.end.tolist()
            columns[id(stack)] = rows, end, state.best_epoch.tolist(), state.best_score.tolist()
        updates = []
        for member in self.members:
            dropped, begin = member.dropped, max(first - member.begun, 0)
            if member.row is None:
                rows = dropped["history"][begin : int(dropped["epoch"])].tolist()
                end, best_epoch = int(dropped["end"]), int(dropped["best_epoch"])
                best_score = float(dropped["best_score"])
            else:
                rows, end, best_epoch, best_score = (column[member.row] for column in columns[id(member.stack)])
            last = min(end, self.epoch - member.begun)
            rows = rows[: max(last - begin, 0)]  # those past the member's end do not count
            updates.append(Update(begin, tuple(map(tuple, rows)), end, best_epoch, best_score))
        return updates

    # ---- ending members ------------------------------------------------------------------------------

    def stop(self, members: Iterable[int]) -> None:
        """End the training of members (indices of the tasks): later epochs do not count for them."""
        for member in map(self.members.__getitem__, members):
            if member.row is not None:
                member.stack.state.end[member.row].clamp_(max=self.epoch - member.begun)

    def scale_rates(self, factors: Mapping[int, float]) -> None:
        """Multiply the rates of members (indices of the tasks) in all later steps."""
        for index, factor in factors.items():
            member = self.members[index]
            if member.row is not None:
                member.stack.state.extras[RATE][member.row].mul_(factor)

    def open_rows(self, copies: bool = False) -> None:
        """Let every member be at an epoch of its own, and count for nothing before its row is filled.

        ``copies``: rows are to continue with the state of others. A :class:`SpecError` for modules with which tasks in
        rows that others have left would not have the numbers that they have alone.
        """
        for stack in self.stacks:
            unsaved, copied = stack.members.findings.unsaved, " that copies trials" * copies
            reason = f"it keeps {unsaved} between calls, which is not plain data" if unsaved else None
            if reason is None and (copies or stack.state.members > 1):  # a stack of one is built anew
                reason = stack.keeps
            try:
                if copies and reason is None and stack.members.is_users:
                    with same_draws(self.device):
                        stack.members.row_of(self.tasks[0], stack.state.buffers)
            except CannotStack as error:
                reason = str(error)
            if reason is not None:
                raise SpecError(f"model {stack.tasks[0].model_name} does not go with a tuner{copied}: {reason}")
            stack.state.rowwise = True
            stack.state.end.zero_()

    def fill(self, index: int, task: Task, parent: int | None = None) -> None:
        """Let ``task`` train from now on in place of a member, whose state is lost; the step stays as it is.

        A stack of one that keeps more than tensors is built anew, and its step prepared again. ``parent``: the index of
        the member whose state it continues with.
        """
        member, source = self.members[index], None if parent is None else self.members[parent]
        if member.row is None or (source is not None and source.row is None):
            raise InputError(f"task {task.label!r} cannot begin in row {index}: there is no state to write or copy")
        self.tasks = (*self.tasks[:index], task, *self.tasks[index + 1 :])
        stack, seed = member.stack, task.seed
        try:
            with self._random_from(stack, seed):
                stack.fill(member.row, task, None if source is None else (source.stack, source.row))
        except CannotStack as reason:
            if stack.state.members > 1 or source is not None:
                raise SpecError(f"task {task.label!r} cannot begin in a row that another has left: {reason}") from None
            self._own_random.pop(id(stack), None)
            member.stack = self._build_stack([index])
            member.stack.state.rowwise = True
            self.stacks[self.stacks.index(stack)] = member.stack
            self._prepare_anew()
        own = None if source is None else self._own_random.get(id(source.stack))
        if own is not None and source.task.seed == seed:
            self._own_random[id(member.stack)].states = dict(own.states)
        member.task, member.slot = task, member.stack.members.slots[member.row]
        member.begun = self.epoch if source is None else source.begun

    @contextmanager
    def _random_from(self, stack: Stack, seed: int) -> Iterator[None]:
        """Inside, generators start at ``seed``; from then on those of ``stack`` are where they are at the end."""
        if len(self.tasks) == 1:  # whose generators are those of the process
            seed_all(seed)
            yield
            return
        former = self._own_random.get(id(stack))
        generator = OwnGenerator(seed, self.device)
        with generator:
            yield
        if former is not None:
            generator.with_python = former.with_python
            self._own_random[id(stack)] = generator

    def _prepare_anew(self) -> None:
        """Prepare the step again before the next epoch, since stacks have changed."""
        self._has_run.clear()  # it builds shared data again
        self._run_epoch, self._stepped, self.merged = {}, None, None
        self._recordings = Recordings()

    def drop(self, members: Iterable[int]) -> list[Stack]:
        """Remove members (indices of the tasks) from training: their state moves to the host, the rest close up.

        The step is captured again before the next epoch. Returns the stacks that changed.
        """
        leaving = {index for index in members if self.members[index].row is not None}
        changed = []
        for stack in list(self.stacks):
            present = [member for member in self.present if member.stack is stack]
            staying = sorted((m for m in present if m.index not in leaving), key=lambda member: member.row)
            if len(staying) == len(present):
                continue
            changed.append(stack)
            for member in present:
                if member.index in leaving:
                    row, tensors = member.row, stack.state.tensors()
                    member.dropped = {name: tensor[row].detach().cpu().clone() for name, tensor in tensors.items()}
                    member.row = None
            if not staying:
                self.stacks.remove(stack)
                continue
            stack.select([member.row for member in staying])
            for row, member in enumerate(staying):
                member.row = row
        used = {id(stack.source) for stack in self.stacks}
        _close(stack for stack in changed if id(stack.source) not in used)
        if changed:
            self._prepare_anew()
        return changed

    # ---- saving --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint: every member's state, which were dropped, and the states of generators."""
        saved: dict[str, Tensor] = {
            "present": torch.tensor([member.row is not None for member in self.members]),
            "epoch": torch.tensor(self.epoch),
            "step": torch.tensor(self.step_in_epoch),
        }
        for member in self.members:
            parts = {name: member.saved(name) for name in member.stack.state.tensors()}
            generator = self._own_random.get(id(member.stack))
            with generator or nullcontext():
                parts |= member.stack.members.saved_state() | member.stack.optimizer.saved()
            if generator is not None:
                parts |= generator.states
            best = {} if member.stack.best_state is None else member.stack.best_state.to_tensors()
            parts |= {BEST + name: value for name, value in best.items()}
            saved |= {f"{member.index}.{name}": value for name, value in parts.items()}
        return saved | generator_states(self.device)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the ``tensors()`` of a group of equal tasks, dropped members included."""
        present = saved.get("present", torch.zeros(0))
        if present.numel() != len(self.members):
            raise SpecError(
                f"the checkpoint holds {present.numel()} tasks, but this group has {len(self.members)}; "
                "it was written for other tasks"
            )
        states = [{name: m.from_saved(name, saved) for name in m.stack.state.tensors()} for m in self.members]
        self.drop(index for index, there in enumerate(present.tolist()) if not there)
        for member, state in zip(self.members, states, strict=True):
            if member.row is None:
                member.dropped = {name: tensor.clone() for name, tensor in state.items()}
                continue
            for name, tensor in member.stack.state.tensors().items():
                tensor[member.row].copy_(state[name])
            start = f"{member.index}."
            parts = {name.removeprefix(start): value for name, value in saved.items() if name.startswith(start)}
            generator = self._own_random.get(id(member.stack))
            with generator or nullcontext():
                member.stack.members.restore_saved_state(parts)
            member.stack.restore_optimizer(parts)
            best = {name.removeprefix(BEST): value for name, value in parts.items() if name.startswith(BEST)}
            member.stack.best_state = ModuleState.from_tensors(best) if TEXT in best else None
            if generator is not None:
                generator.states |= {name: parts[name].clone() for name in generator.states if name in parts}
        restore_generators(saved, self.device)
        self.epoch, self.step_in_epoch = int(saved["epoch"]), int(saved["step"])
        for member in self.members:
            if member.stack.state.rowwise:
                member.begun = self.epoch - int(member.tensor("epoch"))

    # ---- best weights --------------------------------------------------------------------------------

    def best_model(self, index: int) -> nn.Module:
        """The model of a member with its best weights, at its true size, in evaluation mode."""
        member = self.members[index]
        if member.stack.best_copy is not None:
            return member.stack.best_copy
        model = member.stack.members.model_of(member.slot, *member.best())
        if member.stack.best_state is not None:
            restore_state(model, member.stack.best_state)
        return model

    def current_model(self, index: int) -> nn.Module:
        """A copy of the model of a member with the weights of its last step, in evaluation mode."""
        member = self.members[index]
        buffers = {name: member.tensor(f"buffer.{name}") for name in member.stack.state.buffers}
        return member.stack.members.model_of(member.slot, member.tensor("flat"), buffers)

    def top(self, index: int) -> Iterator[tuple[int, nn.Module]]:
        """The best epochs of a member (counted from 0), the best first, each with its model; none unless kept."""
        member = self.members[index]
        if member.task.keep_top is None:
            return
        scores, epochs, flats = (member.tensor(f"loop.{name}") for name in TOP)
        buffers = {name: member.tensor(f"loop.{TOP_BUFFER}{name}") for name in member.stack.state.buffers}
        for _, epoch, slot in sorted(zip((-scores).tolist(), epochs.tolist(), range(len(flats)), strict=True)):
            if epoch >= 0:
                buffers_of_slot = {name: copies[slot] for name, copies in buffers.items()}
                yield epoch, member.stack.members.model_of(member.slot, flats[slot], buffers_of_slot)

    def gradient_norm(self, index: int) -> float:
        """The norm of a member's gradient in its last step, where its task has callbacks."""
        return float(self.members[index].tensor(f"loop.{GRADIENT_NORM}"))

    def best_kept(self, index: int) -> dict[str, Tensor]:
        """The state of a user's module besides its ``state_dict`` when its best weights were evaluated, for a file."""
        member = self.members[index]
        members = member.stack.members
        if not members.is_users:
            return {}
        parts = members.model.named_modules()
        names = {f"{n}.{key}" if n else key for n, part in parts for key in part._non_persistent_buffers_set}
        left_out = {name: value for name, value in member.best()[1].items() if name in names}
        state = member.stack.best_state or ModuleState()
        unsaved, evaluates = members.findings.unsaved, members.findings.evaluates
        state = replace(with_tensors(state, left_out), unsaved=unsaved, evaluates=evaluates)
        return state.to_tensors() if state.trees or state.unsaved else {}

    def made_dense(self, index: int) -> bool:
        """Whether a member's model receives the graph's sparse features as a dense tensor."""
        stack = self.members[index].stack
        sparse_users = isinstance(stack.graph.x, SparseFeatures) and stack.members.is_users
        return sparse_users and not isinstance(stack.source.example().x, SparseFeatures)

    def weight_digests(self) -> tuple[str, ...]:
        """A digest per stack of the names and shapes of its parameters, padded members at the widest size.

        It tells one model from another without its weights.
        """
        layouts = [stack.members.layout for stack in self.stacks]
        shapes = [[(name, *shape) for name, shape in zip(it.names, it.shapes, strict=True)] for it in layouts]
        return tuple(hashlib.sha256(repr(named).encode()).hexdigest()[:16] for named in shapes)


def _close(stacks: Iterable[Stack]) -> None:
    for stack in stacks:
        if isinstance(stack.source, BeginsAhead):
            stack.source.close()


def clustered(graph: Graph, notes: list[str]) -> Graph:
    """A copy of ``graph`` with its rows ordered by cluster: the user's graph is unchanged.

    Training may fit in memory when finding clusters does not; rows are then ordered by length.
    """
    try:
        rows = ordered_rows(graph.adj)
    except torch.OutOfMemoryError:
        notes.append("rows by length: the memory was not enough to find clusters")
    else:
        ordered = copy(graph)
        ordered.adj = rows
        return ordered
    torch.cuda.empty_cache()  # only now no frame holds the failed attempt's tensors
    return graph
