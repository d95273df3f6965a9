"""Match operators of several steps that can be merged, in rounds, and order everything.

A *lane* is one member's step as a sequence of nodes with their dependencies; some nodes have a *key*, and nodes of
equal keys can be merged. A round takes nodes of one key that are ready in their lanes, that is, whose keyed
predecessors have all been taken by earlier rounds. So every path through the merged steps meets rounds in rising
order, and merging the nodes of a round cannot create a cycle.

The choice of the next key decides how many rounds there are. A key that will not become ready in any further lane is
taken at once. If another lane will reach it later, its lanes wait and other keys go first: four models of 2, 2, 3 and
4 layers meet in 4 forward and 4 backward rounds. If every key will still be reached by another lane, the one with the
most work behind it goes. A *lazy* key has no urgent readers, and goes when nothing else is ready. This module does not
depend on tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import argument
from weft.weave.recorder import Captured, Node, is_random, written_arguments

Place = tuple[int, int]  # (lane, node)
Round = tuple[Place, ...]


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
    def needs(self) -> dict[int, int]:
        """For every keyed node, the keyed nodes that come before it on any path, as a set of bits."""
        bit = {node: 1 << place for place, node in enumerate(self.keyed)}
        above: list[int] = []
        for before in self.before:
            mask = 0
            for node in before:
                mask |= above[node] | bit.get(node, 0)
            above.append(mask)
        return {node: above[node] for node in self.keyed}

    @cached_property
    def chain(self) -> dict[int, int]:
        """For every keyed node, how many keyed nodes follow one another from it on, itself included."""
        longest = [0] * len(self.keys)
        for node in reversed(range(len(self.keys))):
            longest[node] += self.keys[node] is not None
            for before in self.before[node]:
                longest[before] = max(longest[before], longest[node])
        return {node: longest[node] for node in self.keyed}


class _Progress:
    """How far the rounds have come in one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.done = 0
        self.left = dict.fromkeys(lane.keyed)  # an ordered set
        self.count = Counter(lane.keys[node] for node in lane.keyed)
        self._bit = {node: 1 << place for place, node in enumerate(lane.keyed)}

    def ready(self) -> dict[Hashable, list[int]]:
        """The nodes whose keyed predecessors are all done, by key."""
        found: dict[Hashable, list[int]] = {}
        needs, keys, missing = self.lane.needs, self.lane.keys, ~self.done
        for node in self.left:
            if not needs[node] & missing:
                found.setdefault(keys[node], []).append(node)
        return found

    def take(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            del self.left[node]
            self.count[self.lane.keys[node]] -= 1
            self.done |= self._bit[node]


def match(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """The rounds, as few as can be found: every keyed node of every lane in exactly one of them."""
    found = [waiting(lanes, lazy), longest_first(lanes, lazy)]
    return min([*found, levels(lanes)] if not lazy else found, key=len)


Rank = Callable[[Hashable, Sequence[_Progress], Sequence[dict[Hashable, list[int]]]], tuple[int, ...]]


def waiting(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """Rounds that wait for lanes that will still reach a key."""
    return _one_by_one(lanes, lazy, _fewest_missed)


def longest_first(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """Rounds by the longest chain of remaining nodes: the lane that has it never waits."""
    return _one_by_one(lanes, lazy, _longest_chain)


def _one_by_one(lanes: Sequence[Lane], lazy: Container[Hashable], rank: Rank) -> list[Round]:
    """Rounds, the key of each the one that ranks highest among those that are ready."""
    progress = [_Progress(lane) for lane in lanes]
    ready = [lane.ready() for lane in progress]
    rounds: list[Round] = []
    while any(ready):
        keys = dict.fromkeys(key for found in ready for key in found)
        hurried = [key for key in keys if key not in lazy]
        key = max(hurried or keys, key=lambda key: rank(key, progress, ready))
        taken = tuple((place, node) for place, found in enumerate(ready) for node in found.get(key, ()))
        for place, found in enumerate(ready):
            if key in found:
                progress[place].take(found[key])
                ready[place] = progress[place].ready()
        rounds.append(taken)
    return rounds


def _fewest_missed(
    key: Hashable, progress: Sequence[_Progress], ready: Sequence[dict[Hashable, list[int]]]
) -> tuple[int, ...]:
    """Highest if no further lane will reach the key; ties by the most work behind it, then by the most nodes."""
    missed = sum(lane.count[key] > 0 and key not in found for lane, found in zip(progress, ready, strict=True))
    behind = sum(len(lane.left) for lane, found in zip(progress, ready, strict=True) if key in found)
    return missed == 0, behind, sum(len(found.get(key, ())) for found in ready)


def _longest_chain(
    key: Hashable, progress: Sequence[_Progress], ready: Sequence[dict[Hashable, list[int]]]
) -> tuple[int, ...]:
    """The most nodes in a row behind the key; the most nodes of it break ties."""
    nodes = [(lane.lane, node) for lane, found in zip(progress, ready, strict=True) for node in found.get(key, ())]
    return max(lane.chain[node] for lane, node in nodes), len(nodes)


def levels(lanes: Sequence[Lane]) -> list[Round]:
    """Rounds by depth: nodes match that have a key and the longest chain of keyed predecessors in common."""
    rounds: dict[tuple[int, Hashable], list[Place]] = {}
    for place, lane in enumerate(lanes):
        depth: dict[int, int] = {}
        for node in lane.keyed:
            above = [depth[other] for k, other in enumerate(lane.keyed) if lane.needs[node] >> k & 1]
            depth[node] = 1 + max(above, default=-1)
            rounds.setdefault((depth[node], lane.keys[node]), []).append((place, node))
    return [tuple(nodes) for _, nodes in sorted(rounds.items(), key=lambda item: item[0][0])]


def in_order(lanes: Sequence[Lane], rounds: Sequence[Round]) -> Iterator[Round]:
    """Every node once, those of a round together, each after all it depends on.

    Before a round each of its lanes runs as far as it would have run alone, and a lane that meets no further round
    runs to its end: so tensors die about as early as they do alone.
    """
    pending = [dict.fromkeys(range(len(lane.keys))) for lane in lanes]
    left = Counter(place for round_ in rounds for place, _ in round_)

    def run(place: int, last: int) -> Iterator[Round]:
        lane, here = lanes[place], pending[place]
        for node in [node for node in here if node < last]:
            if lane.keys[node] is None and not any(before in here for before in lane.before[node]):
                del here[node]
                yield ((place, node),)

    for place in range(len(lanes)):
        if not left[place]:
            yield from run(place, len(lanes[place].keys))
    for round_ in rounds:
        ends = dict(round_)  # the last one of each lane
        for place, node in ends.items():
            yield from run(place, node)
        for place, node in round_:
            del pending[place][node]
        yield round_
        left.subtract(place for place, _ in round_)
        for place in ends:
            if not left[place]:
                yield from run(place, len(lanes[place].keys))


# ---- Member: one traced step as weaving sees it: its nodes, what they depend on, and what they can be matched by.

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


class Member:
    """One member's nodes, what they depend on, and what they can be matched by."""

    def __init__(self, captured: Captured, families: Mapping[str, str]) -> None:
        self.name, self._families = captured.name, families
        self.nodes = captured.graph.calls
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.inputs = dict(zip(captured.graph.inputs, captured.inputs, strict=True))
        assert captured.graph.returns is not None
        self.output = captured.graph.returns.args[0]
        self.written: set[Any] = set()
        self.before = tuple(self._dependencies())
        self.structure_of: dict[int, int] = {}
        self.family_of: dict[int, str] = {}

    def _dependencies(self) -> Iterator[tuple[int, ...]]:
        """For every node, the nodes that it comes after, as sorted positions."""
        writer: dict[Any, int] = {}
        readers: dict[Any, list[int]] = {}
        for place, node in enumerate(self.nodes):
            before, touched = set(), set()
            for source in node.all_input_nodes:
                if source in self.position:
                    before.add(self.position[source])
                touched.add(source.meta.get("storage"))
            touched.discard(None)
            written = {source.meta.get("storage") for source in written_arguments(node)} - {None}
            if is_random(node):
                written.add("generator")
            for storage in touched | written:
                if storage in writer:
                    before.add(writer[storage])
            for storage in written:
                before.update(readers.pop(storage, ()))
                writer[storage] = place
            for storage in touched - written:
                readers.setdefault(storage, []).append(place)
            self.written |= written
            yield tuple(sorted(before))

    def number_structures(self, numbers: dict[Hashable, int]) -> None:
        """Give every matchable node the number of its sparse structure, equal for equal index arrays."""
        self.numbers = numbers
        for place, node in enumerate(self.nodes):
            name = operator_name(node)
            if name in self._families and name not in FAMILY:
                self.family_of[place] = self._families[name]
            if name in FAMILY and all(isinstance(arg, Node) for arg in given(node, "csr")):
                indices = self.inputs.get(given(node, "csr")[1])
                if indices is not None:
                    self.structure_of[place] = numbers.setdefault(_identity(indices), len(numbers))
                    self.family_of[place] = self._families[name]

    def pushable(self, place: int) -> int | None:
        """The structure along which the sum at ``place`` could be pushed instead; None if it cannot."""
        node = self.nodes[place]
        if operator_name(node) != "spmm" or not node.meta.get("backward") or not given(node, "back"):
            return None
        if node.meta["dtype"] not in (torch.float32, torch.float64) or (
            given(node, "weight") is not None and given(node, "weight_back") is None
        ):
            return None  # a push returns the accumulation type, and needs the weights in their own order
        indices = self.inputs.get(given(node, "back")[1])
        return None if indices is None else self.numbers.get(_identity(indices))

    def lane(self, structures: str) -> Lane:
        """The member as matching sees it."""
        keys: list[Hashable | None] = [None] * len(self.nodes)
        for place, family in self.family_of.items():
            keys[place] = (family, self.structure_of.get(place)) if structures == "same" else family
        return Lane(tuple(keys), self.before)


def given(node: Node, name: str) -> Any:
    """The argument of one of Weft's operators that its schema calls ``name``."""
    return argument(f"weft.{operator_name(node)}", node.args, name)


def _identity(tensor: Tensor) -> Hashable:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.device


def operator_name(node: Node) -> str:
    """``"spmm"`` for a call of ``weft::spmm``; empty for other nodes."""
    return _weft_name(node.target)


@cache
def _weft_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if space == "weft" else ""
