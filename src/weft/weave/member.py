"""Member: one traced step as weaving sees it: its nodes, what they depend on, and what they can be matched by."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.capture.schemas import argument
from weft.weave.graph import Node
from weft.weave.matching import Lane
from weft.weave.recorder import Captured, is_random, written_arguments

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
