"""weave: merge the traced steps of several members into one step, whose operators share launches.

Sparse operators (on small graphs: all operators with a Weft kernel) are matched in rounds (``matching.py``), and those
of a round become one ``weft::merged_call`` (:mod:`weft.weave.merged_launch`); everything else is copied as it is. A
:class:`Fused` records which members each fused kernel serves. Members share nothing that any of them writes, so any
order that respects every member's own dependencies is valid, and every member gets the numbers it gets alone (on a GPU
to rounding: see :mod:`weft.weave.merged_launch`).

Dependencies are those of data and those of memory: a node that writes to a storage comes after everything that
touched that storage before it in its own step, and before everything after.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from weft.core.errors import InputError
from weft.weave.matching import (
    FAMILY,
    SMALL_FAMILY,
    SUMS,
    MemberStep,
    Position,
    Round,
    in_order,
    match,
    node_argument,
    operator_name,
)
from weft.weave.merged_launch import OpCall, count_results, flatten
from weft.weave.merged_launch import operator as weft_operator
from weft.weave.recorder import StepGraph, StepNode, TracedStep, map_nodes

OWN_STREAM = 0  # fused nodes run on the stream of the caller


@dataclass(frozen=True)
class FusedEntry:
    """One member's operator in a fused kernel; ``structure``: number of its sparse structure, None if it is dense."""

    member: int
    operator: str
    backward: bool
    structure: int | None


@dataclass(frozen=True)
class Fused:
    """One fused kernel: its node in the woven graph, and the members' operators that it runs."""

    node: StepNode
    family: str
    entries: tuple[FusedEntry, ...]


@dataclass(frozen=True)
class Woven:
    """The merged step: ``graph`` takes ``inputs`` and returns what each member's step returned, in a tuple.

    Every operator has ``meta["stream"]``: 0 for fused ones, a member's own (from 1) for the rest, and one after those
    for fused ones that only the update reads; ``meta["after"]``: the operators that must have run before it;
    ``meta["storage"]``: equal for tensors that share memory. ``single``: operators that could be fused and were not;
    ``structures``: as chosen in :func:`weave`.
    """

    graph: StepGraph
    inputs: tuple[Tensor, ...]
    fused: tuple[Fused, ...]
    single: int
    structures: str

    def initial_values(self) -> dict[StepNode, Any]:
        """The tensor of every input node, for running the graph node by node."""
        return dict(zip(self.graph.inputs, self.inputs, strict=True))

    def returned(self, values: dict[StepNode, Any]) -> tuple[Any, ...]:
        """What the members' steps return, from the results of all nodes."""
        assert self.graph.returns is not None
        return map_nodes(self.graph.returns.args[0], values.__getitem__)

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph as a function, generated on first use: its code takes longer than all the matching."""
        return self.graph.module()

    def __call__(self) -> tuple[Any, ...]:
        """Run one step of every member, in order, on the current stream."""
        return self.graph_module(*self.inputs)


def weave(
    captured: Sequence[TracedStep],
    structures: tuple[str, ...] = ("same", "any"),
    push: bool = False,
    small: bool = False,
) -> Woven:
    """Merge steps that share no tensor that any of them writes.

    ``structures`` says which operators may share a launch: ``"same"``, those over the same structure in the same
    direction; ``"any"``, also others, whose work items then share the grid (a forward pass of one member next to a
    backward pass of another). Of several, the first with the fewest launches is taken.

    ``push`` is TurboMGNN's pull-and-push: a backward sum that meets forward sums over its own structure pushes its rows
    along that structure instead of pulling over the transpose. Pushed rows are added atomically, in another order on
    every run, so the members' numbers agree with separate runs to rounding only.

    ``small`` is for small graphs, and steps traced with ``split``: dense operators are matched too, and ``structures``
    is ignored.
    """
    numbers: dict[Hashable, int] = {}
    members = [MemberStep(step, SMALL_FAMILY if small else FAMILY, numbers) for step in captured]
    _check_disjoint(members)
    kinds = ("any",) if small else structures
    lanes = {kind: [member.lane(kind) for member in members] for kind in kinds}
    rounds = {kind: match(lanes[kind], (SUMS,)) for kind in kinds}
    chosen = min(kinds, key=lambda kind: len(rounds[kind]))
    merge = _Merge(members, push)
    for positions in in_order(lanes[chosen], rounds[chosen]):
        if len(positions) > 1:
            merge.fuse(positions)
        else:
            merge.copy(*positions[0])
    outputs = (map_nodes(m.output, values.__getitem__) for m, values in zip(members, merge.values, strict=True))
    merge.graph.output(tuple(outputs))
    single = sum(len(round_) == 1 for round_ in rounds[chosen])
    return Woven(merge.graph, tuple(merge.inputs), tuple(merge.fused), single, chosen)


def _check_disjoint(members: Sequence[MemberStep]) -> None:
    """Raise an InputError if a member writes to memory that another one reads or writes."""
    users: dict[int, set[int]] = {}
    writers: dict[int, int] = {}
    for number, member in enumerate(members):
        for node, tensor in member.inputs.items():
            address = tensor.untyped_storage()._cdata  # also distinct for meta tensors
            users.setdefault(address, set()).add(number)
            if node.meta["storage"] in member.written and tensor.numel():
                writers[address] = number
    for address, writer in writers.items():
        readers = users[address] - {writer}
        if readers:
            names = members[writer].name, members[min(readers)].name
            raise InputError(f"weave: {names[0]!r} writes to a tensor of {names[1]!r}; members must not share state")


class _Merge:
    """The merged graph while it is built."""

    def __init__(self, members: Sequence[MemberStep], push: bool) -> None:
        self.members, self.push = members, push
        self.graph = StepGraph()
        self.inputs: list[Tensor] = []
        self.values: list[dict[StepNode, Any]] = [{} for _ in members]
        self.placed: list[dict[int, StepNode]] = [{} for _ in members]  # by position in the member
        self.fused: list[Fused] = []
        shared: dict[int, StepNode] = {}  # one placeholder per tensor, for all members that read it
        for member, values in zip(members, self.values, strict=True):
            for node, tensor in member.inputs.items():
                if id(tensor) not in shared:
                    shared[id(tensor)] = self.graph.placeholder(f"input_{len(self.inputs)}")
                    self.inputs.append(tensor)
                values[node] = shared[id(tensor)]

    def copy(self, member: int, position: int) -> None:
        """Add a member's operator as it is."""
        node, values = self.members[member].nodes[position], self.values[member]
        if node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]  # a part of what a fused kernel returned
        else:
            args, kwargs = map_nodes(node.args, values.__getitem__), map_nodes(node.kwargs, values.__getitem__)
            values[node] = self.graph.call_function(node.target, args, kwargs)
            values[node].meta = node.meta | {"stream": 1 + member, "after": self._after([(member, position)])}
        if "storage" in node.meta:
            values[node].meta["storage"] = (member, node.meta["storage"])
        self.placed[member][position] = values[node]

    def _after(self, positions: Sequence[Position]) -> tuple[StepNode, ...]:
        """The nodes of the merged graph that those at ``positions`` come after."""
        return tuple(
            dict.fromkeys(
                self.placed[m][before] for m, position in positions for before in self.members[m].before[position]
            )
        )

    def fuse(self, positions: Round) -> None:
        """Add one node for the operators at ``positions``, and one for each of their results."""
        nodes = [self.members[member].nodes[position] for member, position in positions]
        calls = self._calls(positions, nodes)
        in_place = weft_operator(calls[0].name)._schema.is_mutable
        target = torch.ops.weft.merged_call_ if in_place else torch.ops.weft.merged_call
        fused = self.graph.call_function(target.default, tuple(flatten(calls)))
        family = self.members[positions[0][0]].family_of[positions[0][1]]
        stream = 1 + len(self.members) if family == SUMS else OWN_STREAM
        backward = sum(bool(node.meta.get("backward")) for node in nodes)
        fused.meta |= {"stream": stream, "after": self._after(positions), "backward": 2 * backward > len(nodes)}
        entries, first = [], 0
        for (member, position), node, call in zip(positions, nodes, calls, strict=True):
            results = range(first, first + count_results(call.name))
            first += len(results)
            parts = tuple(self.graph.call_function(operator.getitem, (fused, result)) for result in results)
            for part in parts:
                part.meta |= {"stream": stream, "after": (fused,)}
            self.values[member][node] = parts[0] if len(parts) == 1 else parts
            self.placed[member][position] = fused
            if "storage" in node.meta:
                parts[0].meta["storage"] = (member, node.meta["storage"])
            structure = self.members[member].structure_of.get(position)
            entries.append(FusedEntry(member, call.name, bool(node.meta.get("backward")), structure))
        self.fused.append(Fused(fused, family, tuple(entries)))

    def _calls(self, positions: Round, nodes: Sequence[StepNode]) -> list[OpCall]:
        """The calls at ``positions``; with ``push``, sums over a transpose whose original structure forward sums there
        use are pushed along that structure."""
        structures = [self.members[member].structure_of.get(position) for member, position in positions]
        calls = []
        for (member, position), node, structure in zip(positions, nodes, structures, strict=True):
            arguments = map_nodes(node.args, self.values[member].__getitem__)
            if self.push and self.members[member].pushable(position) in set(structures) - {None, structure}:
                grad, _, col_scale, row_scale, _, csr, weight = arguments
                rows = self.members[member].inputs[node_argument(node, "csr")[0]].numel() - 1
                calls.append(OpCall("spmm_push", (grad, weight, row_scale, col_scale, csr, rows)))
            else:
                calls.append(OpCall(operator_name(node.target), arguments))
        return calls
