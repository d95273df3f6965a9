"""weave: merge the traced steps of several members into one step, whose operators share launches.

Sparse operators (on small graphs: all operators with a Weft kernel) are matched in rounds, and those of a round become
one ``weft::merged_call`` (:mod:`weft.weave.merged_launch`); everything else is copied as it is. A :class:`Fused`
records which members each fused kernel serves. Members share nothing that any of them writes, so any order that
respects every member's own dependencies is valid, and every member gets the numbers it gets alone (on a GPU to
rounding: see :mod:`weft.weave.merged_launch`).

Dependencies are those of data and those of memory: a node that writes to a storage comes after everything that
touched that storage before it in its own step, and before everything after.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx

from weft.capture.observer import argument
from weft.core.errors import InputError
from weft.weave.merged_launch import OpCall, count_results, flatten
from weft.weave.merged_launch import operator as weft_operator
from weft.weave.recorder import StepGraph, StepNode, TracedStep, is_random, map_nodes, written_arguments

# ---- Match operators of several steps that can be merged, in rounds, and order everything.
#
# A *lane* is one member's step as a sequence of nodes with their dependencies; some nodes have a *key*, and nodes of
# equal keys can be merged. A round takes nodes of one key that are ready in their lanes, that is, whose keyed
# predecessors have all been taken by earlier rounds. So every path through the merged steps meets rounds in rising
# order, and merging the nodes of a round cannot create a cycle.
#
# The choice of the next key decides how many rounds there are. A key that will not become ready in any further lane is
# taken at once. If another lane will reach it later, its lanes wait and other keys go first: four models of 2, 2, 3 and
# 4 layers meet in 4 forward and 4 backward rounds. Ties go to the key with the longest chain of keyed nodes behind it.
# A *lazy* key has no urgent readers, and is taken when nothing else is ready.


Position = tuple[int, int]  # (lane, node)
Round = tuple[Position, ...]


@dataclass(frozen=True)
class Lane:
    """``keys[n]``: what node n is matched by (None: by nothing); ``before[n]``: the nodes it comes after, all < n."""

    keys: tuple[Hashable | None, ...]
    before: tuple[tuple[int, ...], ...]

    @cached_property
    def keyed(self) -> tuple[int, ...]:
        """The nodes that have a key, in order."""
        return tuple(node for node, key in enumerate(self.keys) if key is not None)

    @cached_property
    def bits(self) -> dict[int, int]:
        """One bit per keyed node."""
        return {node: 1 << number for number, node in enumerate(self.keyed)}

    @cached_property
    def needs(self) -> dict[int, int]:
        """For every keyed node, the keyed nodes that come before it on any path, as a set of bits."""
        above: list[int] = []
        for before in self.before:
            mask = 0
            for node in before:
                mask |= above[node] | self.bits.get(node, 0)
            above.append(mask)
        return {node: above[node] for node in self.keyed}

    @cached_property
    def chain(self) -> dict[int, int]:
        """For every keyed node, the length of the longest chain of keyed nodes from it on, itself included."""
        longest = [0] * len(self.keys)
        for node in reversed(range(len(self.keys))):
            longest[node] += self.keys[node] is not None
            for before in self.before[node]:
                longest[before] = max(longest[before], longest[node])
        return {node: longest[node] for node in self.keyed}


def match(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """Few rounds, so that every keyed node of every lane is in exactly one of them."""
    pending = [dict.fromkeys(lane.keyed) for lane in lanes]  # ordered sets
    pending_keys = [Counter(lane.keys[node] for node in lane.keyed) for lane in lanes]
    taken = [0] * len(lanes)  # sets of bits

    def ready_nodes(number: int) -> dict[Hashable, list[int]]:
        """The nodes of a lane whose keyed predecessors are all taken, by key."""
        lane, nodes = lanes[number], {}
        for node in pending[number]:
            if not lane.needs[node] & ~taken[number]:
                nodes.setdefault(lane.keys[node], []).append(node)
        return nodes

    def rank(key: Hashable) -> tuple[int, ...]:
        nodes = [(lane, node) for lane, by_key in zip(lanes, ready, strict=True) for node in by_key.get(key, ())]
        waits = any(keys[key] > 0 and key not in by_key for keys, by_key in zip(pending_keys, ready, strict=True))
        return not waits, max(lane.chain[node] for lane, node in nodes), len(nodes)

    ready = [ready_nodes(number) for number in range(len(lanes))]
    rounds: list[Round] = []
    while any(ready):
        keys = dict.fromkeys(key for by_key in ready for key in by_key)
        chosen = max([key for key in keys if key not in lazy] or keys, key=rank)
        rounds.append(tuple((number, node) for number, by_key in enumerate(ready) for node in by_key.get(chosen, ())))
        for number, node in rounds[-1]:
            del pending[number][node]
            pending_keys[number][chosen] -= 1
            taken[number] |= lanes[number].bits[node]
        for number in dict(rounds[-1]):
            ready[number] = ready_nodes(number)
    return rounds


def in_order(lanes: Sequence[Lane], rounds: Sequence[Round]) -> Iterator[Round]:
    """Every node once, those of a round together, each after all it depends on.

    Before a round each of its lanes runs as far as it would have run alone, and a lane that meets no further round
    runs to its end: so tensors die about as early as they do alone.
    """
    pending = [dict.fromkeys(range(len(lane.keys))) for lane in lanes]
    remaining = Counter(number for round_ in rounds for number, _ in round_)

    def run(number: int, last: int) -> Iterator[Round]:
        lane, nodes = lanes[number], pending[number]
        for node in [node for node in nodes if node < last]:
            if lane.keys[node] is None and not any(before in nodes for before in lane.before[node]):
                del nodes[node]
                yield ((number, node),)

    for number in range(len(lanes)):
        if not remaining[number]:
            yield from run(number, len(lanes[number].keys))
    for round_ in rounds:
        ends = dict(round_)  # the last node of each lane
        for number, node in ends.items():
            yield from run(number, node)
        for number, node in round_:
            del pending[number][node]
        yield round_
        remaining.subtract(number for number, _ in round_)
        for number in ends:
            if not remaining[number]:
                yield from run(number, len(lanes[number].keys))


# ---- Members, and the merged step

# Sparse operators, by which may share a launch: their kernels need about as many registers.
FAMILY = {
    "spmm": "spmm",
    "spmm_max": "spmm",
    "spmm_max_backward": "spmm",
    "sddmm": "sddmm",
    "edge_softmax": "softmax",
    "edge_softmax_backward": "softmax",
    "graph_attention_packed": "attention",
    "graph_attention_packed_backward": "attention backward",
    "graph_attention_v2": "attention v2",
    "graph_attention_v2_backward": "attention v2 backward",
}
# On small graphs all launches are merged: the time is the number of consecutive launches. GEMMs merge only with GEMMs,
# because every program of a merged launch would get the shared memory of their tiles, and sums over edges only with
# such sums, because they would be slower with the registers or warps that other kernels need.
SUMS = "sums"  # only the update reads it: split-K reductions
SMALL_FAMILY = (
    FAMILY
    | dict.fromkeys(("linear", "product", "weight_grad_parts", "linear_backward_parts"), "products")
    | dict.fromkeys(("bias_act_dropout", "bias_act_dropout_backward", "copied", "side_by_side"), "passes")
    | dict.fromkeys(("bias_act_dropout_backward_bias_parts", "cross_entropy_rows_backward", "mean_heads"), "passes")
    | dict.fromkeys(("cross_entropy_rows_parts", "column_sum_parts", "add_parts"), SUMS)
    | {"adam_": "update"}
)


class MemberStep:
    """One traced step: its nodes, what they depend on, and what they can be matched by.

    ``numbers`` counts the sparse structures of all members: equal for equal index arrays.
    """

    def __init__(self, captured: TracedStep, families: Mapping[str, str], numbers: dict[Hashable, int]) -> None:
        self.name, self._numbers = captured.name, numbers
        self.nodes = captured.graph.calls
        self.inputs = dict(zip(captured.graph.inputs, captured.inputs, strict=True))
        self.output = captured.graph.returns.args[0]
        self.written: set[Any] = set()
        self.before = tuple(self._dependencies())
        self.structure_of: dict[int, int] = {}
        self.family_of: dict[int, str] = {}
        for position, node in enumerate(self.nodes):
            name = operator_name(node.target)
            if name in families and name not in FAMILY:
                self.family_of[position] = families[name]
            if name in FAMILY and all(isinstance(value, StepNode) for value in node_argument(node, "csr")):
                indices = self.inputs.get(node_argument(node, "csr")[1])
                if indices is not None:
                    self.structure_of[position] = numbers.setdefault(_identity(indices), len(numbers))
                    self.family_of[position] = families[name]

    def _dependencies(self) -> Iterator[tuple[int, ...]]:
        """For every node, the nodes that it comes after, as sorted positions."""
        positions = {node: position for position, node in enumerate(self.nodes)}
        writer: dict[Any, int] = {}
        readers: dict[Any, list[int]] = {}
        for position, node in enumerate(self.nodes):
            before, touched = set(), set()
            for source in node.all_input_nodes:
                if source in positions:
                    before.add(positions[source])
                touched.add(source.meta.get("storage"))
            touched.discard(None)
            written = {source.meta.get("storage") for source in written_arguments(node)} - {None}
            if is_random(node.target):
                written.add("generator")
            for storage in touched | written:
                if storage in writer:
                    before.add(writer[storage])
            for storage in written:
                before.update(readers.pop(storage, ()))
                writer[storage] = position
            for storage in touched - written:
                readers.setdefault(storage, []).append(position)
            self.written |= written
            yield tuple(sorted(before))

    def pushable(self, position: int) -> int | None:
        """The structure along which the sum at ``position`` could be pushed instead; None if it cannot."""
        node = self.nodes[position]
        if operator_name(node.target) != "spmm" or not node.meta.get("backward") or not node_argument(node, "back"):
            return None
        # A push returns the accumulation type, and needs the weights in their own order.
        has_weight = node_argument(node, "weight") is not None
        if node.meta["dtype"] not in (torch.float32, torch.float64) or (
            has_weight and node_argument(node, "weight_back") is None
        ):
            return None
        indices = self.inputs.get(node_argument(node, "back")[1])
        return None if indices is None else self._numbers.get(_identity(indices))

    def lane(self, structures: str) -> Lane:
        """The member as matching sees it."""
        keys: list[Hashable | None] = [None] * len(self.nodes)
        for position, family in self.family_of.items():
            keys[position] = (family, self.structure_of.get(position)) if structures == "same" else family
        return Lane(tuple(keys), self.before)


def node_argument(node: StepNode, name: str) -> Any:
    """The argument of one of Weft's operators that its schema calls ``name``."""
    return argument(f"weft.{operator_name(node.target)}", node.args, name)


def _identity(tensor: Tensor) -> Hashable:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.device


@cache
def operator_name(target: Any) -> str:
    """``"spmm"`` for ``torch.ops.weft.spmm.default``; empty for other functions."""
    schema = getattr(target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if space == "weft" else ""


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
