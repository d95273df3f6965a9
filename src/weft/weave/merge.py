"""weave: merge the traced steps of several members into one step, whose operators share launches.

Sparse operators (on small graphs: all operators with a Weft kernel) are matched in rounds (``matching.py``), and those
of a round become one :func:`weft.weave.merged_launch.together`; everything else is copied as it is. A :class:`Table`
records which member's tensors each fused kernel serves. Members share nothing that any of them writes, so any order
that respects every member's own dependencies is valid, and every member gets the numbers it gets alone (on a GPU to
rounding: see :mod:`weft.weave.merged_launch`).

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
    Lane,
    Member,
    Place,
    Round,
    given,
    in_order,
    match,
    operator_name,
)
from weft.weave.merged_launch import OpCall, flatten, is_mutable, results
from weft.weave.recorder import Captured, Graph, Node, map_nodes

# ---- Woven: several members' steps as one, and the table of which fused kernel serves which of them.

OWN_STREAM = 0  # fused nodes run on the stream of the caller


@dataclass(frozen=True)
class Entry:
    """One member's operator in a fused kernel: where it came from, and which of the kernel's results are its own."""

    member: int
    node: str
    operator: str
    direction: str  # "forward" or "backward"
    structure: int | None  # number of its sparse structure; None: it is dense
    shape: tuple[int, ...]  # of its result
    results: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """One fused kernel: its node in the woven graph, its round, and the members' operators it runs."""

    node: str
    round: int
    family: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """Which fused kernel serves which members."""

    members: tuple[str, ...]
    fused: tuple[Fused, ...]
    single: int  # matchable operators that were not merged
    rounds: int
    kind: str = "sparse"  # which operators were considered: "sparse" or "launched" ones

    @property
    def matched(self) -> int:
        """Operators that run inside of a fused kernel."""
        return sum(len(fused.entries) for fused in self.fused)

    def __str__(self) -> str:
        count = self.matched + self.single
        head = f"{count} {self.kind} operators of {len(self.members)} members in {self.rounds} launches"
        lines = [f"{head}; {self.matched} of them in {len(self.fused)} fused ones"]
        for fused in self.fused:
            lines.append(f"{fused.node}  round {fused.round}, {fused.family}, {len(fused.entries)} sources")
            lines += [
                f"  {self.members[e.member]}: {e.operator} ({e.direction}{_structure_text(e.structure)}) -> "
                f"{' x '.join(map(str, e.shape))} as result {', '.join(map(str, e.results))} [{e.node}]"
                for e in fused.entries
            ]
        return "\n".join(lines)


def _structure_text(structure: int | None) -> str:
    return "" if structure is None else f", structure {structure}"


@dataclass(frozen=True)
class Woven:
    """The merged step: ``graph`` takes ``inputs`` and returns what each member's step returned, in a tuple.

    Every operator has ``meta["stream"]``: 0 for fused ones, a member's own (from 1) for the rest, and one after those
    for fused ones that only the update reads; ``meta["after"]``: the operators that must have run before it;
    ``meta["storage"]``: equal for tensors that share memory.
    """

    graph: Graph
    inputs: tuple[Tensor, ...]
    table: Table
    structures: str

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph as a function, generated on first use: its code takes longer than all the matching."""
        return self.graph.module()

    def __call__(self) -> tuple[Any, ...]:
        """Run one step of every member, in order, on the current stream."""
        return self.graph_module(*self.inputs)


STRUCTURES = ("same", "any", "best")


def weave(captured: Sequence[Captured], structures: str = "best", push: bool = False, small: bool = False) -> Woven:
    """Merge steps that share no tensor that any of them writes.

    ``structures`` says which operators may share a launch: ``"same"``, those over the same structure in the same
    direction; ``"any"``, also others, whose work items then share the grid (a forward pass of one member beside a
    backward pass of another); ``"best"``, ``"same"`` unless ``"any"`` needs fewer launches.

    ``push`` lets a backward sum that meets forward sums over its own structure push its rows along that structure
    instead of pulling over the transpose. Such sums are added atomically, in another order on every run: the members'
    numbers then agree with separate runs to rounding only.

    ``small`` is for small graphs, and steps traced with ``apart``: dense operators are matched too, and ``structures``
    is ignored.
    """
    if structures not in STRUCTURES:
        raise InputError(f"weave: structures={structures!r} must be one of {', '.join(map(repr, STRUCTURES))}")
    members = [Member(one, SMALL_FAMILY if small else FAMILY) for one in captured]
    _check_apart(captured, members)
    numbers: dict[Hashable, int] = {}
    for member in members:
        member.number_structures(numbers)
    kinds = ("any",) if small else ("same", "any") if structures == "best" else (structures,)
    plans = {kind: _matched(members, kind) for kind in kinds}
    chosen = min(kinds, key=lambda kind: len(plans[kind][1]))
    lanes, rounds = plans[chosen]
    return _Merge(captured, members, lanes, rounds, chosen, push, small).done()


def _matched(members: Sequence[Member], structures: str) -> tuple[list[Lane], list[Round]]:
    lanes = [member.lane(structures) for member in members]
    return lanes, match(lanes, (SUMS,))


def _check_apart(captured: Sequence[Captured], members: Sequence[Member]) -> None:
    """Raise an InputError if a member writes to memory that another one reads or writes."""
    users: dict[int, set[int]] = {}
    writers: dict[int, int] = {}
    for place, member in enumerate(members):
        for node, tensor in member.inputs.items():
            address = tensor.untyped_storage()._cdata  # also distinct for meta tensors
            users.setdefault(address, set()).add(place)
            if node.meta["storage"] in member.written and tensor.numel():
                writers[address] = place
    for address, writer in writers.items():
        others = users[address] - {writer}
        if others:
            names = captured[writer].name, captured[min(others)].name
            raise InputError(f"weave: {names[0]!r} writes to a tensor of {names[1]!r}; members must not share state")


class _Merge:
    """Builds the merged graph."""

    def __init__(
        self,
        captured: Sequence[Captured],
        members: Sequence[Member],
        lanes: Sequence[Lane],
        rounds: Sequence[Round],
        structures: str,
        push: bool,
        small: bool,
    ) -> None:
        self.captured, self.members, self.structures, self.push, self.small = captured, members, structures, push, small
        self.lanes, self.rounds = lanes, rounds
        self.graph = Graph()
        self.inputs: list[Tensor] = []
        self.values: list[dict[Node, Any]] = [{} for _ in members]
        self.placed: list[dict[int, Node]] = [{} for _ in members]  # by position in the member
        self.fused: list[Fused] = []

    def done(self) -> Woven:
        """The merged step."""
        self._share_inputs()
        number = {round_: place for place, round_ in enumerate(self.rounds)}
        for places in in_order(self.lanes, self.rounds):
            if len(places) > 1:
                self._fuse(places, number[places])
            else:
                self._copy(*places[0])
        self.graph.output(tuple(self._map(place, member.output) for place, member in enumerate(self.members)))
        names = tuple(captured.name for captured in self.captured)
        single = sum(len(round_) == 1 for round_ in self.rounds)
        kind = "launched" if self.small else "sparse"
        table = Table(names, tuple(self.fused), single, len(self.rounds), kind)
        return Woven(self.graph, tuple(self.inputs), table, self.structures)

    def _share_inputs(self) -> None:
        """One placeholder per tensor, for all members that read it."""
        known: dict[int, Node] = {}
        for place, member in enumerate(self.members):
            for node, tensor in member.inputs.items():
                if id(tensor) not in known:
                    known[id(tensor)] = self.graph.placeholder(f"input_{len(self.inputs)}")
                    self.inputs.append(tensor)
                self.values[place][node] = known[id(tensor)]

    def _map(self, member: int, value: Any) -> Any:
        return map_nodes(value, self.values[member].__getitem__)

    def _copy(self, member: int, place: int) -> None:
        node, values = self.members[member].nodes[place], self.values[member]
        if node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]  # a part of what a fused kernel returned
        else:
            args, kwargs = map_nodes(node.args, values.__getitem__), map_nodes(node.kwargs, values.__getitem__)
            values[node] = self.graph.call_function(node.target, args, kwargs)
            values[node].meta = node.meta | {"stream": 1 + member, "after": self._after([(member, place)])}
        if "storage" in node.meta:
            values[node].meta["storage"] = (member, node.meta["storage"])
        self.placed[member][place] = values[node]

    def _after(self, places: Sequence[Place]) -> tuple[Node, ...]:
        """The nodes of the merged graph that those at ``places`` come after."""
        found = {self.placed[m][before]: None for m, place in places for before in self.members[m].before[place]}
        return tuple(found)

    def _fuse(self, places: Round, number: int) -> None:
        """One node for the operators at ``places``, and one for each of their results."""
        nodes = [self.members[member].nodes[place] for member, place in places]
        pushed = self._pushed(places) if self.push else ()
        calls = [
            self._call(member, node, (member, place) in pushed)
            for (member, place), node in zip(places, nodes, strict=True)
        ]
        flat = flatten(calls)
        in_place = is_mutable(calls[0].name)
        fused = self.graph.call_function(
            torch.ops.weft.together_.default if in_place else torch.ops.weft.together.default,
            (flat.names, flat.tensors, flat.counts, flat.numbers, flat.words),
        )
        family = self.members[places[0][0]].family_of[places[0][1]]
        stream = 1 + len(self.members) if family == SUMS else OWN_STREAM
        backward = sum(bool(node.meta.get("backward")) for node in nodes)
        fused.meta |= {"stream": stream, "after": self._after(places), "backward": 2 * backward > len(nodes)}
        entries, first = [], 0
        for place, node, call in zip(places, nodes, calls, strict=True):
            mine = tuple(range(first, first + results(call.name)))
            first += len(mine)
            parts = tuple(self._part(fused, result) for result in mine)
            self.values[place[0]][node] = parts[0] if len(parts) == 1 else parts
            self.placed[place[0]][place[1]] = fused
            if "storage" in node.meta:
                parts[0].meta["storage"] = (place[0], node.meta["storage"])
            entries.append(self._entry(place, node, call.name, mine))
        self.fused.append(Fused(fused.name, number, family, tuple(entries)))

    def _pushed(self, places: Round) -> set[Place]:
        """The sums over a transpose among ``places`` whose original structure forward sums there use."""
        visited = {self.members[member].structure_of.get(place) for member, place in places} - {None}
        return {
            (member, place)
            for member, place in places
            if self.members[member].pushable(place) in visited - {self.members[member].structure_of.get(place)}
        }

    def _call(self, member: int, node: Node, push: bool) -> OpCall:
        arguments = self._map(member, node.args)
        if not push:
            return OpCall(operator_name(node), arguments)
        grad, _, col_scale, row_scale, _, csr, weight = arguments
        rows = self.members[member].inputs[given(node, "csr")[0]].numel() - 1
        return OpCall("spmm_push", (grad, weight, row_scale, col_scale, csr, rows))

    def _part(self, fused: Node, result: int) -> Node:
        part = self.graph.call_function(operator.getitem, (fused, result))
        part.meta |= {"stream": fused.meta["stream"], "after": (fused,)}
        return part

    def _entry(self, place: Place, node: Node, name: str, mine: tuple[int, ...]) -> Entry:
        member = self.members[place[0]]
        described = (given.meta["shape"] for given in (node, *node.users) if "shape" in given.meta)
        shape = next(described, ())
        direction = "backward" if node.meta.get("backward") else "forward"
        return Entry(place[0], node.name, name, direction, member.structure_of.get(place[1]), shape, mine)
