"""GroupRun: train tasks on one graph and one device together, one epoch at a time.

It owns the stacks and advances them; the engine decides when to poll, what to show and when to save.

Shapes: T members of a stack, L epochs, M columns of history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.placement import place_graph
from weft.batches.source import Batch, BeginsAhead, FullGraph, MakeSource, Source
from weft.core.errors import SpecError
from weft.core.models import BUILT_IN
from weft.core.placement import on_device, within_device
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.wording import option
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.sparse.row_clusters import ordered_rows
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.device.process import OwnGenerator, generator_states, restore_generators
from weft.runtime.epoch import (
    GroupStep,
    MergedStep,
    StepMerger,
    SteppedEpoch,
    all_constant,
    stepped_epochs,
    train_epoch,
)
from weft.runtime.modules.convert import BuiltStack
from weft.runtime.modules.state import TEXT, ModuleState, restore_state, with_tensors
from weft.runtime.stack_check import slower_than_alone
from weft.runtime.step.copies import model_of
from weft.runtime.step.evaluation import evaluates_at
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack, MemberSlot
from weft.runtime.step.parameters import Layout
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import buffer_called, is_flat

# ---- The members of a group: where each one's state is, and what a poll reads of it.


@dataclass(frozen=True)
class MemberUpdate:
    """What a poll returns per member: the rows of new epochs, the end, and the best so far."""

    first: int  # epoch (from 0) of rows[0]
    rows: list[list[float]]
    end: int
    best_epoch: int
    best_score: float
    diverged: bool = False  # a loss is NaN or infinite; the member has stopped


@dataclass
class Member:
    """One task of a group: its place among the tasks, its stack, and its row there (None: dropped)."""

    index: int
    task: Task
    stack: Stack
    row: int | None
    slot: MemberSlot
    left: dict[str, Tensor] = field(default_factory=dict)  # its state on the host, once dropped

    def tensor(self, name: str) -> Tensor:
        """This member's part of the state, by the names of :meth:`weft.runtime.step.state.State.tensors`."""
        return self.left[name] if self.row is None else self.stack.state.tensors()[name][self.row]

    def saved(self, name: str) -> Tensor:
        """The same as a checkpoint has it, so that the member may also go on in another group, or alone.

        Weights and buffers at the member's true size, whatever has the parameters' places in the order of their
        elements, and the history of its own epochs.
        """
        tensor, padding = self.tensor(name), self.slot.padding
        if name == "history":
            return tensor[: self.task.epochs]
        if is_flat(name):
            return self._own_layout.in_order(tensor if padding is None else padding.narrow(tensor))
        buffer = buffer_called(name)
        return tensor if padding is None or not buffer else padding.narrow_buffer(buffer, tensor)

    def from_saved(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`saved`; what was written as the stack has it is taken, too."""
        shape, padding = self.stack.state.tensors()[name].shape[1:], self.slot.padding
        if name == "history":
            return _longer(tensor, shape[0])
        if tensor.shape == shape or padding is None:
            return self.stack.members.layout.laid_out(tensor) if is_flat(name) else tensor
        if is_flat(name):
            return padding.widen(self._own_layout.laid_out(tensor))
        return padding.widen_buffer(buffer_called(name), tensor)

    def saved_shapes(self, name: str) -> tuple[torch.Size, ...]:
        """The shapes that :meth:`from_saved` takes."""
        shape = self.stack.state.tensors()[name].shape[1:]
        if name == "history":
            return torch.Size((self.task.epochs, *shape[1:])), shape
        padding, buffer = self.slot.padding, buffer_called(name)
        if padding is None or not (is_flat(name) or buffer):
            return (shape,)
        return torch.Size((padding.parameters,)) if is_flat(name) else padding.own_shape(buffer), shape

    @property
    def _own_layout(self) -> Layout:
        """Of the parameters at their true size."""
        layout, padding = self.stack.members.layout, self.slot.padding
        return layout if padding is None else padding.layout(layout)

    def best(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The best weights and buffers, padded as the stack has them."""
        names = self.stack.state.best_buffers
        return self.tensor("best_flat"), {name: self.tensor(f"best_buffer.{name}") for name in names}


def _longer(history: Tensor, length: int) -> Tensor:
    """``history [L, M]`` in ``length`` rows: nothing was measured in those that it lacks."""
    if history.shape[0] == length:
        return history
    found = history.new_full((length, *history.shape[1:]), torch.nan)
    found[: min(length, history.shape[0])] = history[:length]
    return found


def poll_members(members: Sequence[Member], stacks: Sequence[Stack], first: int, epoch: int) -> list[MemberUpdate]:
    """What the device has recorded of every member from epoch ``first`` up to ``epoch``; one read per stack."""
    histories = {id(stack): _StackHistory.of(stack, first, epoch) for stack in stacks}
    return [
        _StackHistory.of_left(member, first).update(0, first, member.task)
        if member.row is None
        else histories[id(member.stack)].update(member.row, first, member.task)
        for member in members
    ]


@dataclass(frozen=True)
class _StackHistory:
    """A stack's history and best scores on the host, from one poll."""

    rows: list[list[list[float]]]
    ends: list[int]
    best_epochs: list[int]
    best_scores: list[float]
    losses: int

    @classmethod
    def of(cls, stack: Stack, first: int, epoch: int) -> _StackHistory:
        state = stack.state
        rows = state.history[:, first:epoch].tolist()
        losses = sum(name.endswith("loss") for name in stack.columns)
        return cls(rows, state.end.tolist(), state.best_epoch.tolist(), state.best_score.tolist(), losses)

    @classmethod
    def of_left(cls, member: Member, first: int) -> _StackHistory:
        left = member.left
        epoch, losses = int(left["epoch"]), sum(name.endswith("loss") for name in member.stack.columns)
        rows = [left["history"][first:epoch].tolist()]
        return cls(rows, [int(left["end"])], [int(left["best_epoch"])], [float(left["best_score"])], losses)

    def update(self, row: int, first: int, task: Task) -> MemberUpdate:
        """What one member has come to; rows past its end do not count."""
        end = self.ends[row]
        rows = self.rows[row][: max(end - first, 0)]
        evaluated = evaluates_at(end - 1, (0, task.eval_every, task.epochs))  # else only the training loss was recorded
        last = rows[-1] if rows and first + len(rows) == end else []
        diverged = not all(map(isfinite, last[: self.losses if evaluated else 1]))
        return MemberUpdate(first, rows, end, self.best_epochs[row], self.best_scores[row], diverged)


# ---- Put a group together: the graph on its device, its rows in order, and the stacks of its tasks.


class GroupBuild:
    """The stacks and members of ``tasks``; ``notes`` holds remarks for the user.

    ``plan.stack_members`` says which tasks stack; tasks that turn out not to fit into one get stacks of their own.
    ``measure``: so do those of a stack of users' modules whose step takes longer than theirs. ``plan`` is then what was
    built. ``former``: the stacks of the run that is resumed, which are built again as they were; ``built``: those of
    this one.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        graph: Graph,
        plan: Plan,
        device: torch.device,
        make_source: MakeSource,
        measure: bool = False,
        former: Sequence[BuiltStack] = (),
    ) -> None:
        self._tasks, self.plan, self._device = tuple(tasks), plan, device
        self._measure = measure
        self.notes: list[str] = []
        splits = {task.split or 0 for task in tasks}
        graph = graph.split(*splits) if len(splits) == 1 and graph.num_splits > 1 else graph
        placement = plan.places if device.type in (plan.device, "meta") else on_device(device.type)
        self.graph = place_graph(graph, placement, device)
        if plan.row_order == "clustered" and device.type == "cuda":
            self.graph = clustered(self.graph, self.notes)
        place = within_device(placement, plan.device if device.type == "meta" else device.type).features
        self.inputs = Inputs(self.graph, make_source, device, place)
        self.inputs.group_size = len(tasks)
        self._epochs = max(task.epochs for task in tasks)
        self.stacks: list[Stack] = []
        self.built: list[BuiltStack] = []
        self.own_random: dict[int, OwnGenerator] = {}  # by the id of the stack
        places: dict[int, Member] = {}
        for stack, rows in self._make_again(former) if former else self._make_all():
            self.stacks.append(stack)
            self.built.append(BuiltStack(tuple(rows), stack.members.converted))
            for row, index in enumerate(rows):
                places[index] = Member(index, self._tasks[index], stack, row, stack.members.slots[row])
        self.members = [places[index] for index in range(len(self._tasks))]

    def _make_all(self) -> Iterator[tuple[Stack, list[int]]]:
        for slots in self.plan.stack_members:
            yield from self._make_stacks(list(slots))

    def _make_again(self, former: Sequence[BuiltStack]) -> Iterator[tuple[Stack, list[int]]]:
        """The stacks of a former run: what was decided there is not decided anew, which might give other numbers."""
        planned = len(self.plan.stack_members)
        if len(former) != planned:
            self.notes.append(f"{len(self._tasks)} tasks train as {len(former)} stacks, not {planned}, as before")
        for one in former:
            self.inputs.converted, self.inputs.agree = one.converted, True
            try:
                stack = self._make_stack(list(one.members))
            except CannotStack as error:
                raise self._cannot_go_on(one, error) from None
            finally:
                self.inputs.converted, self.inputs.agree = None, False
            yield stack, list(one.members)

    def _cannot_go_on(self, former: BuiltStack, why: CannotStack) -> SpecError:
        names = ", ".join(repr(self._tasks[place].label) for place in former.members)
        return SpecError(
            f"tasks {names}: were trained as one stack, which cannot be done again: {why}; resume with what they were "
            f"trained with, or choose another {option('out')} to start afresh"
        )

    def _make_stacks(self, rows: list[int]) -> list[tuple[Stack, list[int]]]:
        try:
            stack = self._make_stack(rows)
        except CannotStack as error:
            reason = str(error)
        else:
            slower = slower_than_alone(stack, self.plan) if self._measure else None
            stack.members.alone = None  # it holds a module and a state
            if slower is None:
                return [(stack, rows)]
            reason = slower
            self._take_apart(rows, reason)
            self.inputs.converted = stack.members.converted  # tried once: each trains as in the stack
            del stack
        self.notes.append(f"{len(rows)} tasks train side by side, not as one stack: {reason}")
        try:
            return [(self._make_stack([row]), [row]) for row in rows]
        finally:
            self.inputs.converted = None

    def _take_apart(self, rows: list[int], reason: str) -> None:
        """Let the plan say what is built, so that a run that is resumed builds the same."""
        others = [stack for stack in self.plan.stack_members if sorted(stack) != sorted(rows)]
        stacks = tuple(sorted([*others, *((row,) for row in rows)]))
        join = "in turn" if len(self.plan.stack_members) == 1 else self.plan.join
        self.plan = replace(self.plan, join=join, stacks=stacks, why=(*self.plan.why, f"side by side: {reason}"))

    def _make_stack(self, rows: list[int]) -> Stack:
        tasks = [self._tasks[row] for row in rows]
        dropped = any(task.input_dropout for task in tasks)
        once = self.plan.first_layer == "once" and not dropped and not tasks[0].sampled
        draws = tasks[0].traits is None or tasks[0].has_own("objective") or tasks[0].has_own("metric")
        if len(rows) > 1 or len(self._tasks) == 1 or not draws or self._device.type != "cpu":
            return Stack(tasks, self.inputs, first_once=once, length=self._epochs)
        own = OwnGenerator(tasks[0].seed)  # a user's module or function may draw from torch's generator
        with own:
            stack = Stack(tasks, self.inputs, first_once=once, length=self._epochs)
        own.with_python = stack.members.hidden_state is not None or stack.members.branches
        self.own_random[id(stack)] = own
        return stack


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


# ---- The state of a group: what a checkpoint holds, members that stop or are dropped, and their best weights.

BEST = "best."  # before names in a checkpoint: of what a module kept with its best weights


class GroupState:
    """Members in stacks after ``epoch`` epochs and ``step_in_epoch`` steps of the next one."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        stacks: list[Stack],
        members: list[Member],
        own_random: Mapping[int, OwnGenerator],
    ) -> None:
        self.tasks, self.device, self.stacks, self.members = tuple(tasks), device, stacks, members
        self._own_random = own_random
        self.epoch = 0
        self.step_in_epoch = 0  # steps done of the current epoch

    @property
    def present(self) -> list[Member]:
        """The members that have not been dropped."""
        return [member for member in self.members if member.row is not None]

    def poll(self, first: int = 0) -> list[MemberUpdate]:
        """What the device has recorded of every member from epoch ``first`` (counted from 0) on."""
        return poll_members(self.members, self.stacks, first, self.epoch)

    # ---- dropping ------------------------------------------------------------------------------------

    def stop(self, members: Iterable[int]) -> None:
        """End the training of members (places among the tasks): later epochs do not count for them."""
        for index in members:
            member = self.members[index]
            if member.row is not None:
                member.stack.state.end[member.row].clamp_(max=self.epoch)

    def scale_rates(self, factors: Mapping[int, float]) -> None:
        """Multiply the rates of members (places among the tasks) in all later steps."""
        for index, factor in factors.items():
            member = self.members[index]
            if member.row is not None:
                member.stack.scale_rate(member.row, factor)

    def drop(self, members: Iterable[int]) -> list[Stack]:
        """Remove members (places among the tasks) from training: their state moves to the host, the others close up.

        Returns the stacks that changed.
        """
        leaving = {index for index in members if self.members[index].row is not None}
        changed = []
        for stack in list(self.stacks):
            here = [member for member in self.present if member.stack is stack]
            staying = sorted((m for m in here if m.index not in leaving), key=lambda m: m.row)
            if len(staying) == len(here):
                continue
            for member in here:
                if member.index in leaving:
                    member.left, member.row = stack.state.row(member.row), None
            self._repack(stack, staying)
            changed.append(stack)
        return changed

    def _repack(self, stack: Stack, staying: list[Member]) -> None:
        if not staying:
            self.stacks.remove(stack)
            return
        stack.select([member.row for member in staying])
        for row, member in enumerate(staying):
            member.row = row

    # ---- saving --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint: every member's state, which were dropped, and the states of generators."""
        saved: dict[str, Tensor] = {
            "present": torch.tensor([member.row is not None for member in self.members]),
            "epoch": torch.tensor(self.epoch),
            "step": torch.tensor(self.step_in_epoch),
        }
        for member in self.members:
            saved |= {f"{member.index}.{name}": member.saved(name) for name in member.stack.state.tensors()}
            own = self._own_random.get(id(member.stack))
            with nullcontext() if own is None else own:
                more = member.stack.members.saved_state() | member.stack.loop_state()
            saved |= {} if own is None else {f"{member.index}.random": own.state}
            best = {} if member.stack.best_state is None else member.stack.best_state.to_tensors()
            more |= {BEST + name: value for name, value in best.items()}
            saved |= {f"{member.index}.{name}": value for name, value in more.items()}
        return saved | generator_states(self.device)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the ``tensors()`` of a group of equal tasks, dropped members included."""
        saved = _with_epochs(saved)
        present = saved.get("present", torch.zeros(0))
        if present.numel() != len(self.members):
            raise SpecError(
                f"the checkpoint holds {present.numel()} tasks, but this group has {len(self.members)}; "
                "it was written for other tasks"
            )
        for member in self.members:
            _check_shapes(member, saved)
        self.drop(index for index, there in enumerate(present.tolist()) if not there)
        for member in self.members:
            self._restore_member(member, saved)
        restore_generators(saved, self.device)
        self.epoch = int(saved["epoch"])
        self.step_in_epoch = int(saved.get("step", torch.zeros(())))

    def _restore_member(self, member: Member, saved: Mapping[str, Tensor]) -> None:
        names = member.stack.state.tensors()
        own = {name: member.from_saved(name, saved[f"{member.index}.{name}"]) for name in names}
        if member.row is None:
            member.left = {name: tensor.clone() for name, tensor in own.items()}
            return
        for name, tensor in member.stack.state.tensors().items():
            tensor[member.row].copy_(own[name])
        kept, random = _of_member(saved, member.index), self._own_random.get(id(member.stack))
        with nullcontext() if random is None else random:
            member.stack.members.restore_saved_state(kept)
        member.stack.restore_loop_state(kept)
        best = {name.removeprefix(BEST): kept[name] for name in kept if name.startswith(BEST)}
        member.stack.best_state = ModuleState.from_tensors(best) if TEXT in best else None
        if random is not None and f"{member.index}.random" in saved:
            random.state = saved[f"{member.index}.random"].clone()

    def best_model(self, index: int) -> nn.Module:
        """The model of a member with its best weights, at its true size, in evaluation mode."""
        member = self.members[index]
        flat, buffers = member.best()
        model = model_of(member.stack.members, member.slot, flat, buffers, member.stack.state)
        if member.stack.best_state is not None:
            restore_state(model, member.stack.best_state)
        return model

    def best_kept(self, index: int) -> dict[str, Tensor]:
        """A user's module beside its ``state_dict`` when its best weights were evaluated, for a file."""
        member = self.members[index]
        members = member.stack.members
        if not members.is_users:
            return {}
        names = members.left_out_buffers()
        left_out = {name: value for name, value in member.best()[1].items() if name in names}
        state = member.stack.best_state or ModuleState()
        state = replace(with_tensors(state, left_out), unsaved=members.unsaved, evaluates=members.evaluates)
        return state.to_tensors() if state.trees or state.unsaved else {}

    def made_dense(self, index: int) -> bool:
        """Whether the graph's sparse features are dense in what a member's model is given."""
        stack = self.members[index].stack
        if not isinstance(stack.graph.x, SparseFeatures) or self.tasks[index].traits is not None:
            return False
        return not isinstance(stack.source.example().x, SparseFeatures)

    def best_tensors(self, index: int) -> dict[str, Tensor]:
        """The best weights and buffers of a member by the names that its model's ``state_dict`` uses."""
        member = self.members[index]
        return member.stack.members.named(member.slot, *member.best())

    # ---- describing ----------------------------------------------------------------------------------

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


def _of_member(saved: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The part of a checkpoint that is one member's, by names without its place."""
    start = f"{index}."
    return {name.removeprefix(start): tensor for name, tensor in saved.items() if name.startswith(start)}


def _with_epochs(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint from before steps and epochs were two numbers: there every step was an epoch."""
    clocks = {name.removesuffix(".clock"): clock for name, clock in saved.items() if name.endswith(".clock")}
    found = {f"{member}.epoch": clock[1].clone() for member, clock in clocks.items()}
    found |= {f"{member}.epoch_loss": torch.zeros(()) for member in clocks}
    return found | dict(saved)


def _check_shapes(member: Member, saved: Mapping[str, Tensor]) -> None:
    for name, tensor in member.stack.state.tensors().items():
        key, shape = f"{member.index}.{name}", tensor.shape[1:]
        if key not in saved or saved[key].shape not in member.saved_shapes(name):
            found = list(saved[key].shape) if key in saved else "nothing"
            raise SpecError(
                f"task {member.task.label!r}: the checkpoint holds {found} for {name!r}, but this model "
                f"needs {list(shape)}; it was written for another model or graph"
            )


STEP_PARTS = ("objective", "metric", "optimizer")  # of a task, that may be a function of the user's own


class GroupRun(GroupState):
    """Tasks in training on ``device``, with the graph where the plan says; ``notes`` holds remarks for the user.

    ``plan.stack_members`` says which tasks stack; tasks that turn out not to fit into one stack train side by side in
    stacks of their own, with a note. ``epoch``: how many epochs the group has trained. ``make_source`` makes the source
    of batches: the whole graph, unless given. ``measure``: users' modules whose stack turns out slower than each
    alone train side by side as well; ``plan`` then says so. ``former``: the stacks of the run that is resumed;
    ``built``: those of this one, for its checkpoints.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        graph: Graph,
        plan: Plan,
        device: torch.device,
        merger: StepMerger | None = None,
        make_source: MakeSource = FullGraph,
        measure: bool = False,
        former: Sequence[BuiltStack] = (),
    ) -> None:
        built = GroupBuild(tasks, graph, plan, device, make_source, measure, former)
        super().__init__(tasks, device, built.stacks, built.members, built.own_random)
        self.plan, self.graph, self._inputs, self._notes = built.plan, built.graph, built.inputs, built.notes
        self.built, self.epochs = tuple(built.built), max(task.epochs for task in tasks)
        self.group_step = GroupStep(self.stacks, self.plan, device, merger, built.own_random, self._notes)
        self._recordings = Recordings()
        self._with_evaluation: Replay | None = None
        self._without_evaluation: Replay | None = None
        self._stepped: list[SteppedEpoch] | None = None  # if an epoch has several batches

    @property
    def has_steps(self) -> bool:
        """Whether an epoch has several steps."""
        return any(not stack.source.constant for stack in self.stacks)

    @property
    def steps(self) -> int:
        """Steps that the group has trained, the current epoch's included."""
        per_epoch = self.stacks[0].source.steps_per_epoch if self.stacks else 1
        return self.epoch * per_epoch + self.step_in_epoch

    @property
    def notes(self) -> list[str]:
        """Remarks for the user so far."""
        stepped = [note for epoch in self._stepped or () for note in epoch.notes]
        return list(dict.fromkeys(self._notes + stepped + [note for stack in self.stacks for note in stack.notes]))

    def held_inputs(self) -> tuple[Any, ...]:
        """Features and first aggregations that are kept for all steps."""
        return self._inputs.held()

    @property
    def merged(self) -> MergedStep | None:
        """The merged step of several stacks, once it is prepared."""
        return self.group_step.merged

    def reads(self) -> dict[str, float]:
        """What caches of sampled training had of what was read, so far; empty without any."""
        found: dict[str, float] = {}
        for stack in self.stacks:
            found |= stack.source.reads()
        return found

    def step(self) -> None:
        """One epoch of every stack with its evaluation, as it is captured."""
        self.group_step.evaluated()

    def step_without_evaluation(self) -> None:
        """One epoch of every stack that records only the training losses."""
        self.group_step.without_evaluation()

    # ---- advancing -----------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether the step has been prepared (and captured, if the plan says so)."""
        return self._with_evaluation is not None or self._stepped is not None

    @property
    def recorded(self) -> bool:
        """Whether an epoch is the replay of a CUDA graph."""
        if self._stepped is not None:
            return any(epoch.recorded for epoch in self._stepped)
        return any(
            replay is not None and replay.recorded for replay in (self._with_evaluation, self._without_evaluation)
        )

    def prepare(self) -> None:
        """Capture the step as a CUDA graph if the plan says so; the state is unchanged."""
        if not all_constant(self.stacks):
            self._stepped = stepped_epochs(self.stacks, self._may_record(), self.group_step.in_own_random)
            return
        self.group_step.merge()
        self.group_step.compile(self._skips_evaluations())
        too_much = False
        try:
            self._record()
        except torch.OutOfMemoryError:
            too_much = any(stack.is_compiled for stack in self.stacks)
            if not too_much:
                raise
        if too_much:  # the compiled step holds folded constants: without it the run may fit
            self.group_step.as_written("the step is not compiled: memory ran out")
            self._record()

    def _record(self) -> None:
        """The epoch with an evaluation, and if there are others the one without, each captured if it may be."""
        self._recordings = Recordings()
        self._with_evaluation = self._replay(self.group_step.evaluated)
        both = [self._with_evaluation]
        self._without_evaluation = None
        if not self._always_evaluates():
            self._without_evaluation = self._replay(self.group_step.without_evaluation)
            both.append(self._without_evaluation)
        self._capture(both)

    def _may_record(self) -> bool:
        """Whether to capture the step: as planned, unless something is kept in Python between calls."""
        reasons = [why for why in map(_eager, self.stacks) if why is not None]
        if not self.plan.replay or not reasons:
            return self.plan.replay
        note = f"the step runs eagerly: {reasons[0]}"
        self._notes += [note] if note not in self._notes else []
        return False

    def _always_evaluates(self) -> bool:
        return any(member.task.eval_every == 1 for member in self.present)

    def _skips_evaluations(self) -> bool:
        return any(member.task.eval_every < member.task.epochs for member in self.present)

    def _replay(self, step: Callable[[], None]) -> Replay:
        changed = [tensor for stack in self.stacks for tensor in stack.state.tensors().values()]
        return Replay(step, changed, record=False, never_waits=self._never_waits())

    def _never_waits(self) -> bool:
        """Whether the step is all of Weft's own operators, as they are written: none waits for the device."""
        if self.merged is not None or any(stack.is_compiled for stack in self.stacks):
            return False
        built_in = all(task.traits is not None and task.model_name in BUILT_IN for task in self.tasks)
        return built_in and not any(task.has_own(name) for task in self.tasks for name in STEP_PARTS)

    def _capture(self, replays: list[Replay]) -> None:
        if not self._may_record():
            return
        self._recordings.add(*replays)
        for reason in self._recordings.reasons:
            note = f"the step runs eagerly: it could not be captured as a CUDA graph ({reason})"
            self._notes += [note] if note not in self._notes else []

    def advance(self, epochs: int, stop: Callable[[], bool] = bool) -> list[MemberUpdate]:
        """Train up to ``epochs`` more epochs, fewer once ``stop()`` says so, and read what happened."""
        if not self.started and self.stacks:
            self.prepare()
        first = self.epoch
        last = min(first + epochs, self._last_epoch())
        while self.epoch < last and not (self.epoch > first and stop()):
            if not self._one_epoch(stop):
                break
        return self.poll(first)

    def _last_epoch(self) -> int:
        return max((member.task.epochs for member in self.present), default=0)

    def _one_epoch(self, stop: Callable[[], bool] = bool) -> bool:
        """Train one epoch, or the rest of it; returns whether it ended before ``stop()`` was true."""
        rules = [(0, member.task.eval_every, member.task.epochs) for member in self.present]
        evaluated = any(evaluates_at(self.epoch, rule) for rule in rules)
        if self._stepped is None:
            self.epoch += 1
            (self._with_evaluation if evaluated else self._without_evaluation)()
            return True
        for one in self._stepped:
            if isinstance(one.source, BeginsAhead):
                one.source.expect(self.epoch + 1 if self.epoch + 1 < self._last_epoch() else None)
        self.step_in_epoch = train_epoch(self._stepped, self.epoch, self.step_in_epoch, stop)
        if self.step_in_epoch < self._stepped[0].source.steps_per_epoch:
            return False
        for one in self._stepped:
            one.end(evaluated)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return True

    def close(self) -> None:
        """Training has ended: sources that have begun the next epoch give it up."""
        _close(self.stacks)

    def train_epoch(self) -> None:
        """One epoch without an evaluation, as it is captured: for benchmarks."""
        if self._without_evaluation is None:
            self.group_step.merge()
            self.group_step.compile(self._skips_evaluations())
            self._without_evaluation = self._replay(self.group_step.without_evaluation)
            self._capture([self._without_evaluation])
        self.epoch += 1
        self._without_evaluation()

    def one_step(self, source: Source) -> Callable[[Batch], None]:
        """A function that trains the stacks of ``source`` on one of its batches: for profiles."""
        if not self.started:
            self.prepare()
        return next(one.train_on for one in self._stepped or () if one.source is source)

    def drop(self, members: Iterable[int]) -> list[Stack]:
        """As :meth:`GroupState.drop`; the step is captured again before the next epoch."""
        changed = super().drop(members)
        used = {id(stack.source) for stack in self.stacks}
        _close(stack for stack in changed if id(stack.source) not in used)
        if changed:
            self._with_evaluation = self._without_evaluation = self._stepped = None
            self._recordings = Recordings()
            self.group_step.merged = None
        if any(stack in self.stacks for stack in changed):
            self.group_step.rebuild()
        return changed


def _close(stacks: Iterable[Stack]) -> None:
    for stack in stacks:
        if isinstance(stack.source, BeginsAhead):
            stack.source.close()


def _eager(stack: Stack) -> str | None:
    """Why the step of a stack must not be captured; None if it may be."""
    hidden = stack.members.hidden_state
    if hidden is not None:
        return f"model {stack.tasks[0].model_name}: {hidden}, and a CUDA graph would repeat one call"
    if stack.members.branches and not stack.source.constant:  # what it keeps then is followed
        return f"model {stack.tasks[0].model_name} reads numbers into Python, and may do something else in a later step"
    return stack.eager


# ---- Digests of the names and shapes of a group's parameters, which tell one model from another without its weights.


def weight_digests(run: GroupRun) -> tuple[str, ...]:
    """One digest per stack; members that are padded have the shapes of the widest."""
    layouts = [stack.members.layout for stack in run.stacks]
    shapes = [[(name, *shape) for name, shape in zip(one.names, one.shapes, strict=True)] for one in layouts]
    return tuple(hashlib.sha256(repr(one).encode()).hexdigest()[:16] for one in shapes)
