"""Members of a stack on different splits of one graph: which rows each of them trains and is evaluated on.

One forward and one backward pass over the graph serve all of them; only loss and metrics are over rows of their own.

Shapes: T members, K members of one split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.graph.data.splits import Split
from weft.ops.reduce import Reduce
from weft.runtime.batches.source import Source


@dataclass(frozen=True)
class MembersOfSplit:
    """The members that have one split: their places in the stack, also as a tensor ``[K]``."""

    places: tuple[int, ...]
    index: Tensor
    split: Split


class StackSplits:
    """The members of a stack, split by split; no parts if the graph has but one split.

    Tensors are made here, not in a step, which may be captured as a CUDA graph.
    """

    def __init__(self, tasks: Sequence[Task], graph: Graph, device: torch.device) -> None:
        places: dict[int, list[int]] = {}
        for place, task in enumerate(tasks if graph.num_splits > 1 else ()):
            places.setdefault(task.split if isinstance(task.split, int) else 0, []).append(place)
        self.parts = [
            MembersOfSplit(tuple(own), torch.tensor(own, device=device), graph.split_rows(number))
            for number, own in places.items()
        ]
        order = [member for part in self.parts for member in part.places]
        self._back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device, dtype=torch.int64)

    def compute(self, logits: Any, of_part: Callable[[int, Any], Tensor]) -> Tensor:
        """``of_part(number, logits [K, N, C])`` of every part, in the order of the members ``[T, ...]``.

        ``logits`` may be whatever a user's model returns: every tensor of it has a row per member.
        """
        if len(self.parts) == 1:
            return of_part(0, logits)
        found = [of_part(number, _rows(logits, part.index)) for number, part in enumerate(self.parts)]
        return torch.cat(found).index_select(0, self._back)


def _rows(output: Any, index: Tensor) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.index_select(0, index), output)


class OnSplit:
    """A source whose splits are those of one :class:`Split`."""

    def __init__(self, source: Source, split: Split) -> None:
        self._source, self._split = source, split

    @property
    def reduce(self) -> Reduce:
        """As the source has it."""
        return self._source.reduce

    def rows(self, split: str) -> Tensor:
        """The nodes of ``"train"``, ``"val"`` or ``"test"``."""
        found: Tensor = getattr(self._split, split)
        return found

    def labels(self) -> Tensor:
        """Of all nodes."""
        return self._source.labels()
