"""Woven: several members' steps as one, and the table of which fused kernel serves which of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from weft.weave.graph import Graph

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
