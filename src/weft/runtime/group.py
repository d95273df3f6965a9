"""GroupRun: train tasks on one graph and one device together, one epoch at a time.

It owns the stacks and advances them; the engine decides when to poll, what to show and when to save.

Shapes: T members of a stack, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.core.errors import InputError, SpecError
from weft.core.placement import within_device
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.ops.sparse.row_clusters import ordered_rows
from weft.runtime.batches.placing import place_graph
from weft.runtime.batches.source import FullGraph, MakeSource
from weft.runtime.compile.inductor import compile_stack
from weft.runtime.device.cuda_graph import Replay
from weft.runtime.device.side_streams import ConcurrentSteps, Steps, in_turn
from weft.runtime.device.torch_rng import OwnGenerator, generator_states, restore_generators
from weft.runtime.step.best_and_history import evaluates_at
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack, MemberSlot
from weft.runtime.step.stack import Stack
from weft.runtime.stepped_epoch import SteppedEpoch, all_constant, stepped_epochs, train_epoch


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

    def best(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The best weights and buffers, padded as the stack has them."""
        names = self.stack.state.best_buffers
        return self.tensor("best_flat"), {name: self.tensor(f"best_buffer.{name}") for name in names}


class MergedStep(Protocol):
    """One epoch of several stacks as one merged step."""

    stacks: tuple[Stack, ...]

    def __call__(self) -> None:
        """Train one epoch, evaluate and record the outcome."""

    def without_evaluation(self) -> None:
        """Train one epoch and record only its training losses."""


class StepMerger(Protocol):
    """Merges the steps of stacks; the engine supplies one for plans that need it (``weft.weave``)."""

    def merge(self, stacks: Sequence[Stack]) -> Any:
        """The merged step; raises InputError if the stacks cannot be merged."""

    def observe(self, step: Any, observer: Any, streams: bool) -> None:
        """Report the merged step to a dry run."""


class GroupRun:
    """Tasks in training on ``device``, with the graph where the plan says; ``notes`` holds remarks for the user.

    ``plan.stack_members`` says which tasks stack; tasks that turn out not to fit into one stack train side by side in
    stacks of their own, with a note. ``epoch``: how many epochs the group has trained. ``make_source`` makes the source
    of batches: the whole graph, unless given.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        graph: Graph,
        plan: Plan,
        device: torch.device,
        merger: StepMerger | None = None,
        make_source: MakeSource = FullGraph,
    ) -> None:
        self.merger = merger
        self.tasks, self.plan, self.device = tuple(tasks), plan, device
        self.graph = place_graph(graph, plan.places, device)
        self.epoch = 0
        self._notes: list[str] = []
        if plan.row_order == "clustered" and device.type == "cuda":
            self._order_rows()
        place = within_device(plan.places, plan.device).features
        self._inputs = Inputs(self.graph, make_source, device, place)
        self.epochs = max(task.epochs for task in tasks)
        self.stacks: list[Stack] = []
        self._own_random: dict[int, OwnGenerator] = {}
        self._refused: set[int] = set()  # stacks that failed to compile: not tried again
        places: dict[int, Member] = {}
        for slots in plan.stack_members:
            for stack, rows in self._make_stacks(list(slots)):
                self.stacks.append(stack)
                for row, index in enumerate(rows):
                    places[index] = Member(index, self.tasks[index], stack, row, stack.members.slots[row])
        self.members = [places[index] for index in range(len(self.tasks))]
        self.merged: MergedStep | None = None  # the merged step of several stacks, once it is prepared
        at_once = plan.join == "concurrent" and device.type == "cuda"
        self.run_steps: Callable[[Steps], None] = ConcurrentSteps(device) if at_once else in_turn
        self._built: set[bool] = set()  # kinds of steps, with and without evaluation, that have run before
        self._with_evaluation: Replay | None = None
        self._without_evaluation: Replay | None = None
        self._stepped: list[SteppedEpoch] | None = None  # if an epoch has several batches
        self.step_in_epoch = 0  # steps done of the current epoch

    @property
    def has_steps(self) -> bool:
        """Whether an epoch has several steps."""
        return any(not stack.source.constant for stack in self.stacks)

    @property
    def steps(self) -> int:
        """Steps that the group has trained, the current epoch's included."""
        per_epoch = self.stacks[0].source.steps_per_epoch if self.stacks else 1
        return self.epoch * per_epoch + self.step_in_epoch

    # ---- putting it together -------------------------------------------------------------------------

    def _order_rows(self) -> None:
        """Order the graph's rows by cluster, on a graph of this run's own: the user's is unchanged.

        Training may fit in memory when finding clusters does not; rows are then ordered by length.
        """
        try:
            ordered = ordered_rows(self.graph.adj)
        except torch.OutOfMemoryError:
            self._notes.append("rows by length: the memory was not enough to find clusters")
        else:
            self.graph = copy(self.graph)
            self.graph.adj = ordered
            return
        torch.cuda.empty_cache()  # only now no frame holds the failed attempt's tensors

    def _make_stacks(self, rows: list[int]) -> list[tuple[Stack, list[int]]]:
        try:
            return [(self._make_stack(rows), rows)]
        except CannotStack as reason:
            self._notes.append(f"{len(rows)} tasks train side by side, not as one stack: {reason}")
            return [(self._make_stack([row]), [row]) for row in rows]

    def _make_stack(self, rows: list[int]) -> Stack:
        tasks = [self.tasks[row] for row in rows]
        dropped = any(task.input_dropout for task in tasks)
        once = self.plan.first_layer == "once" and not dropped and not tasks[0].sampled
        if len(rows) > 1 or len(self.tasks) == 1 or tasks[0].traits is not None or self.device.type != "cpu":
            return Stack(tasks, self._inputs, first_once=once, length=self.epochs)
        own = OwnGenerator(tasks[0].seed)  # a user's module may draw from torch's generator
        with own:
            stack = Stack(tasks, self._inputs, first_once=once, length=self.epochs)
        self._own_random[id(stack)] = own
        return stack

    @property
    def notes(self) -> list[str]:
        """Remarks for the user so far."""
        stepped = [note for epoch in self._stepped or () for note in epoch.notes]
        return self._notes + stepped + [note for stack in self.stacks for note in stack.notes]

    def held_inputs(self) -> tuple[Any, ...]:
        """Features and first aggregations that are kept for all steps."""
        return self._inputs.held()

    def reads(self) -> dict[str, float]:
        """What caches of sampled training had of what was read, so far; empty without any."""
        found: dict[str, float] = {}
        for stack in self.stacks:
            found |= stack.source.reads()
        return found

    # ---- one epoch -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One epoch of every stack with its evaluation, as it is captured."""
        if self.merged is not None:
            self.merged()
        self._each([partial(self._of_its_own, stack, stack) for stack in self._apart()], evaluated=True)

    def step_without_evaluation(self) -> None:
        """One epoch of every stack that records only the training losses."""
        if self.merged is not None:
            self.merged.without_evaluation()
        steps = [partial(self._of_its_own, stack, stack.without_evaluation) for stack in self._apart()]
        self._each(steps, evaluated=False)

    def _each(self, steps: Steps, evaluated: bool) -> None:
        """Steps of stacks, concurrent if the plan says so; the first time in turn, since they build shared data."""
        go = self.run_steps if evaluated in self._built and len(steps) > 1 else in_turn
        go(steps)
        self._built.add(evaluated)

    def _apart(self) -> list[Stack]:
        """The stacks whose steps are not merged with others."""
        return [stack for stack in self.stacks if self.merged is None or stack not in self.merged.stacks]

    def merge_steps(self) -> None:
        """Merge the steps of several stacks into one if the plan says so; if that fails, a note says why.

        The merged step is checked against the stacks' own; if it fails, training goes on without it, with a note.
        """
        stacks = [stack for stack in self.stacks if id(stack) not in self._own_random]
        if self.plan.join != "woven" or len(stacks) < 2 or self.merged is not None:
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
        evaluated = any(member.task.eval_every < member.task.epochs for member in self.present)
        for stack in self.stacks:
            if id(stack) in self._refused:
                continue
            try:
                self._of_its_own(stack, partial(compile_stack, stack, evaluated))
            except (InputError, torch.OutOfMemoryError) as reason:
                what = "memory ran out" if isinstance(reason, torch.OutOfMemoryError) else str(reason)
                self._note_once(f"the step is not compiled: {what}")
                self._refused.add(id(stack))

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _of_its_own(self, stack: Stack, step: Callable[[], None]) -> None:
        own = self._own_random.get(id(stack))
        if own is None:
            step()
        else:
            with own:
                step()

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
            self._stepped = stepped_epochs(self.stacks, self.plan.replay, self._of_its_own)
            return
        self.merge_steps()
        self._compile()
        too_much = False
        try:
            self._prepare_with()
        except torch.OutOfMemoryError:
            too_much = any(stack.is_compiled for stack in self.stacks)
            if not too_much:
                raise
        if too_much:  # the compiled step holds folded constants: without it the run may fit
            self._as_written("the step is not compiled: memory ran out")
            self._prepare_with()
        if not self._always_evaluates():
            self._prepare_without()

    def _prepare_with(self) -> None:
        self._with_evaluation = self._replay(self.step, record=self.plan.replay)

    def _as_written(self, note: str) -> None:
        """Continue without the compiled functions."""
        for stack in self.stacks:
            stack.as_written()
        self._note_once(note)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _always_evaluates(self) -> bool:
        return any(member.task.eval_every == 1 for member in self.present)

    def _prepare_without(self) -> None:
        record, pool = self.plan.replay, None
        if self._with_evaluation is not None:
            record, pool = record and self._with_evaluation.recorded, self._with_evaluation.pool
        self._without_evaluation = self._replay(self.step_without_evaluation, record=record, pool=pool)

    def _replay(self, step: Callable[[], None], *, record: bool, pool: Any = None) -> Replay:
        changed = [tensor for stack in self.stacks for tensor in stack.state.tensors().values()]
        replay = Replay(step, changed, record=record, pool=pool)
        if replay.reason:
            self._notes.append(f"the step runs eagerly: it could not be captured as a CUDA graph ({replay.reason})")
        return replay

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
        self.step_in_epoch = train_epoch(self._stepped, self.epoch, self.step_in_epoch, stop)
        if self.step_in_epoch < self._stepped[0].source.steps_per_epoch:
            return False
        for one in self._stepped:
            one.end(evaluated)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return True

    def train_epoch(self) -> None:
        """One epoch without an evaluation, as it is captured: for benchmarks."""
        if self._without_evaluation is None:
            self.merge_steps()
            self._compile()
            self._prepare_without()
        self.epoch += 1
        self._without_evaluation()

    # ---- polling -------------------------------------------------------------------------------------

    @property
    def present(self) -> list[Member]:
        """The members that have not been dropped."""
        return [member for member in self.members if member.row is not None]

    def poll(self, first: int = 0) -> list[MemberUpdate]:
        """What the device has recorded of every member from epoch ``first`` (counted from 0) on."""
        seen = {id(stack): _Seen.of(stack, first, self.epoch) for stack in self.stacks}
        return [
            _Seen.of_left(member, first).progress(0, first, member.task)
            if member.row is None
            else seen[id(member.stack)].progress(member.row, first, member.task)
            for member in self.members
        ]

    # ---- dropping ------------------------------------------------------------------------------------

    def stop(self, members: Iterable[int]) -> None:
        """End the training of members (places among the tasks): later epochs do not count for them."""
        for index in members:
            member = self.members[index]
            if member.row is not None:
                member.stack.state.end[member.row].clamp_(max=self.epoch)

    def drop(self, members: Iterable[int]) -> None:
        """Remove members (places among the tasks) from training: their state moves to the host, the others close up.

        The step is captured again before the next epoch.
        """
        leaving = {index for index in members if self.members[index].row is not None}
        for stack in list(self.stacks):
            here = [member for member in self.present if member.stack is stack]
            staying = sorted((m for m in here if m.index not in leaving), key=lambda m: m.row)
            if len(staying) == len(here):
                continue
            for member in here:
                if member.index in leaving:
                    member.left, member.row = stack.state.row(member.row), None
            self._repack(stack, staying)
        if leaving:
            self._with_evaluation = self._without_evaluation = self.merged = self._stepped = None

    def _repack(self, stack: Stack, staying: list[Member]) -> None:
        if not staying:
            self.stacks.remove(stack)
            return
        stack.select([member.row for member in staying])
        self._built.clear()
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
            saved |= {f"{member.index}.{name}": member.tensor(name) for name in member.stack.state.tensors()}
            own = self._own_random.get(id(member.stack))
            saved |= {} if own is None else {f"{member.index}.random": own.state}
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
        own = {name: saved[f"{member.index}.{name}"] for name in member.stack.state.tensors()}
        if member.row is None:
            member.left = {name: tensor.clone() for name, tensor in own.items()}
            return
        for name, tensor in member.stack.state.tensors().items():
            tensor[member.row].copy_(own[name])
        random = self._own_random.get(id(member.stack))
        if random is not None and f"{member.index}.random" in saved:
            random.state = saved[f"{member.index}.random"].clone()

    def best_model(self, index: int) -> nn.Module:
        """The model of a member with its best weights, at its true size, in evaluation mode."""
        member = self.members[index]
        flat, buffers = member.best()
        return member.stack.members.model_of(member.slot, flat, buffers, member.stack.state)

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


@dataclass(frozen=True)
class _Seen:
    """A stack's history and best scores on the host, from one poll."""

    rows: list[list[list[float]]]
    ends: list[int]
    best_epochs: list[int]
    best_scores: list[float]
    losses: int

    @classmethod
    def of(cls, stack: Stack, first: int, epoch: int) -> _Seen:
        state = stack.state
        rows = state.history[:, first:epoch].tolist()
        losses = sum(name.endswith("loss") for name in stack.columns)
        return cls(rows, state.end.tolist(), state.best_epoch.tolist(), state.best_score.tolist(), losses)

    @classmethod
    def of_left(cls, member: Member, first: int) -> _Seen:
        left = member.left
        epoch, losses = int(left["epoch"]), sum(name.endswith("loss") for name in member.stack.columns)
        rows = [left["history"][first:epoch].tolist()]
        return cls(rows, [int(left["end"])], [int(left["best_epoch"])], [float(left["best_score"])], losses)

    def progress(self, row: int, first: int, task: Task) -> MemberUpdate:
        """What one member has come to; rows past its end do not count."""
        end = self.ends[row]
        rows = self.rows[row][: max(end - first, 0)]
        evaluated = evaluates_at(end - 1, (0, task.eval_every, task.epochs))  # else only the training loss was recorded
        last = rows[-1] if rows and first + len(rows) == end else []
        diverged = not all(map(isfinite, last[: self.losses if evaluated else 1]))
        return MemberUpdate(first, rows, end, self.best_epochs[row], self.best_scores[row], diverged)


def _with_epochs(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint from before steps and epochs were two numbers: there every step was an epoch."""
    clocks = {name.removesuffix(".clock"): clock for name, clock in saved.items() if name.endswith(".clock")}
    found = {f"{member}.epoch": clock[1].clone() for member, clock in clocks.items()}
    found |= {f"{member}.epoch_loss": torch.zeros(()) for member in clocks}
    return found | dict(saved)


def _check_shapes(member: Member, saved: Mapping[str, Tensor]) -> None:
    for name, tensor in member.stack.state.tensors().items():
        key, shape = f"{member.index}.{name}", tensor.shape[1:]
        if key not in saved or saved[key].shape != shape:
            found = list(saved[key].shape) if key in saved else "nothing"
            raise SpecError(
                f"task {member.task.label!r}: the checkpoint holds {found} for {name!r}, but this model "
                f"needs {list(shape)}; it was written for another model or graph"
            )
