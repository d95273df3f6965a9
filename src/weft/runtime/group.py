"""GroupRun: train tasks on one graph and one device together, one epoch at a time.

It owns the stacks and advances them; the engine decides when to poll, what to show and when to save.

Shapes: T members of a stack, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weft.core.models import BUILT_IN
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.batches.source import Batch, BeginsAhead, FullGraph, MakeSource, Source
from weft.runtime.built_stacks import BuiltStack
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.group_build import GroupBuild
from weft.runtime.group_members import MemberUpdate
from weft.runtime.group_state import GroupState
from weft.runtime.group_step import GroupStep, MergedStep, StepMerger
from weft.runtime.step.outcome.best_and_history import evaluates_at
from weft.runtime.step.stack import Stack
from weft.runtime.stepped_epoch import SteppedEpoch, all_constant, stepped_epochs, train_epoch

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
            self._follow(not self._may_record())
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
        self._follow(not any(replay.recorded for replay in both))

    def _follow(self, eager: bool) -> None:
        """Whether modules run Python in every step, so that what they keep may change."""
        for stack in self.stacks:
            stack.members.follows = eager

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
