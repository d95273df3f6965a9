"""Match operators of several steps that can be merged, in rounds, and order everything.

A *lane* is one member's step as a sequence of nodes with their dependencies; some nodes have a *key*, and nodes of
equal keys can be merged. A round takes nodes of one key that are ready in their lanes, that is, whose keyed
predecessors have all been taken by earlier rounds. So every path through the merged steps meets rounds in rising
order, and merging the nodes of a round cannot create a cycle.

The choice of the next key decides how many rounds there are. A key that will not become ready in any further lane is
taken at once. If another lane will reach it later, its lanes wait and other keys go first: four models of 2, 2, 3 and
4 layers meet in 4 forward and 4 backward rounds. Ties go to the key with the longest chain of keyed nodes behind it. A
*lazy* key has no urgent readers, and is taken when nothing else is ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import argument
from weft.weave.recorder import StepNode, TracedStep, is_random, written_arguments

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


# ---- Members

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
        assert captured.graph.returns is not None
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
