"""Phases of a step: which launches of a traced step may run at the same time, and which must come after which.

An operator comes after those whose results it reads or whose memory it writes; the launches of one operator come one
after another. Everything that may run at the same time is one phase. What no kernel of Weft's computes (a look-up of
the learning rate) is run when it is met, before or between the phases. A transposed copy that only the flat gradient
reads is not made: its numbers go to the flat gradient at once, one phase earlier.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft.weave.copies import _fill_kernel
from weft.weave.graph import Node, map_nodes
from weft.weave.launchers import INDEPENDENT, LAUNCHERS
from weft.weave.member import Member, operator_name
from weft.weave.merged_launch import Launch, collected
from weft.weave.persistent.flat_gradient import Direct, direct_parts, side_by_side_direct
from weft.weave.recorder import Captured
from weft.weave.together import completed

Phases = list[list[Launch]]
VIEWS = frozenset(("view", "detach", "alias", "squeeze", "unsqueeze", "transpose", "permute", "select", "slice"))
VIEWS |= frozenset(("expand", "split_with_sizes", "split", "t", "as_strided", "_unsafe_view", "reshape"))
FACTORIES = frozenset(("new_empty", "empty_like", "new_zeros", "zeros_like", "empty", "zeros"))  # read no number


@dataclass
class Walk:
    """One pass over a traced step: launches are put into phases, and ``launch`` is called for those that are due."""

    captured: Captured
    launch: Callable[[Phases], None]
    phases: Phases = field(default_factory=list)
    _values: dict[Node, Any] = field(default_factory=dict)
    _ends: dict[int, int] = field(default_factory=dict)  # by position: the phase after that of the last launch
    _pending: set[int] = field(default_factory=set)  # storages that launches not made yet read or write
    _constant: set[int] = field(default_factory=set)  # storages of inputs that the step does not write to
    _direct: Direct = field(default_factory=Direct)

    def __call__(self) -> Any:
        """Run the step; returns what it returned."""
        graph = self.captured.graph
        member = Member(self.captured, {})
        self._values = dict(zip(graph.inputs, self.captured.inputs, strict=True))
        self._constant = {storage_of(t) for n, t in member.inputs.items() if n.meta["storage"] not in member.written}
        self._direct = direct_parts(member.nodes, member.written)
        for place, node in enumerate(member.nodes):
            before = max((self._ends.get(one, 0) for one in member.before[place]), default=0)
            self._ends[place] = self._run(node, before, member.before[place])
        self._make()
        assert graph.returns is not None
        return self._value(graph.returns.args[0])

    def _value(self, given: Any) -> Any:
        return map_nodes(given, self._values.__getitem__)

    def _run(self, node: Node, before: int, after: tuple[int, ...]) -> int:
        """Put the launches of ``node`` into phases from ``before`` on; returns the phase after them."""
        if node in self._direct.left_out:
            return before
        name = operator_name(node)
        parts = self._collected(node, name) if name in LAUNCHERS else []
        if parts:
            return self._put(parts, before, name in INDEPENDENT)
        if node in self._values:
            return before
        if not _is_view(node.target) and any(self._ends[one] for one in after):
            self._make()  # it reads what is not computed yet
            before = 0
        self._values[node] = node.target(*self._value(node.args), **self._value(node.kwargs))
        return before

    def _collected(self, node: Node, name: str) -> list[Launch]:
        """The launches of ``node``, not made; none if it does more than launch: then it has to run by itself."""
        with collected() as parts, ReadsPending(self._pending, parts) as guard:
            made = self._launched(node, name)
        if guard.seen or callable(made):
            return []
        self._values[node] = made[0] if len(node.target._schema.returns) == 1 else made
        self._pending |= {storage_of(tensor) for tensor in tensors_of([parts])} - self._constant
        return parts

    def _launched(self, node: Node, name: str) -> Any:
        if name != "side_by_side":
            return LAUNCHERS[name](*completed(name, self._value(node.args)))
        shape = node.args[0][0].meta["shape"]
        given = [self._values[self._direct.source.get(part, part)] for part in node.args[0]]
        return (side_by_side_direct(given, shape[0] if len(shape) == 2 else None),)

    def _put(self, parts: list[Launch], before: int, independent: bool) -> int:
        for part in parts:
            fill = part.kernel is _fill_kernel and len(parts) > 1  # of memory that nothing else has used yet
            self._append(0 if fill else before, part)
            before += not (fill or independent)
        return before + independent

    def _append(self, phase: int, part: Launch) -> None:
        self.phases += [[] for _ in range(phase + 1 - len(self.phases))]
        self.phases[phase] += [part] if part.programs else []

    def _make(self) -> None:
        """Make all launches so far."""
        if self.phases:
            self.launch([phase for phase in self.phases if phase])
        self.phases, self._ends, self._pending = [], dict.fromkeys(self._ends, 0), set()


class ReadsPending(TorchDispatchMode):
    """Inside, :attr:`seen` becomes true if an operator takes a tensor that a launch not made yet takes as well."""

    def __init__(self, pending: set[int], parts: list[Launch]) -> None:
        super().__init__()
        self.seen, self._pending, self._parts = False, pending, parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func):
            pending = self._pending | {storage_of(tensor) for tensor in tensors_of([self._parts])}
            given = pytree.tree_leaves((args, kwargs))
            self.seen |= any(isinstance(one, Tensor) and storage_of(one) in pending for one in given)
        return func(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    """A number that tensors with the same memory have in common."""
    return tensor.untyped_storage()._cdata


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return target is operator.getitem or (schema is not None and schema.name.partition("::")[2] in VIEWS | FACTORIES)


def tensors_of(phases: Phases) -> list[Tensor]:
    """Every tensor that a launch is given: they must live until it has run."""
    return [value for phase in phases for part in phase for value in part.arguments if isinstance(value, Tensor)]
