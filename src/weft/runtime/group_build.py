"""Put a group together: the graph on its device, its rows in order, and the stacks of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch

from weft.core.errors import SpecError
from weft.core.placement import on_device, within_device
from weft.core.plan import Plan
from weft.core.task import Task
from weft.core.wording import option
from weft.graph.data.graph import Graph
from weft.ops.sparse.row_clusters import ordered_rows
from weft.runtime.batches.placing import place_graph
from weft.runtime.batches.source import MakeSource
from weft.runtime.built_stacks import BuiltStack
from weft.runtime.device.torch_rng import OwnGenerator
from weft.runtime.group_members import Member
from weft.runtime.stack_check import slower_than_alone
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members.slot import CannotStack
from weft.runtime.step.stack import Stack


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
