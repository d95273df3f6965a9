"""Pad narrow models with zeros: where the weights of a narrow model are in those of a wide one.

Padded weights start at 0 and stay there: what they multiply or add to is 0, and so is their gradient, as long as
the activation keeps 0 at 0 and nothing takes a mean over the width. So a padded member trains as it would alone.

Shapes: P parameters of the wide model, Q of the narrow one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.core.task import Task
from weft.runtime.step.parameters import Layout


@dataclass(frozen=True)
class Widths:
    """A hidden width inside a wider one, both of them ``heads`` parts side by side."""

    narrow: int
    wide: int
    heads: int = 1

    def along(self, narrow: int, wide: int) -> Tensor:
        """Where the ``narrow`` indices of one dimension lie among its ``wide`` ones."""
        if narrow == wide:
            return torch.arange(narrow)
        if (narrow, wide) == (self.narrow // self.heads, self.wide // self.heads):
            return torch.arange(narrow)
        if (narrow, wide) != (self.narrow, self.wide):
            raise ValueError(
                f"a dimension of {narrow} does not become {wide} when {self.narrow} is padded to {self.wide}"
            )
        head = torch.arange(self.heads)[:, None] * (self.wide // self.heads)
        return (head + torch.arange(self.narrow // self.heads)).flatten()

    def inside(self, narrow: Sequence[int], wide: Sequence[int]) -> Tensor:
        """Flat places of the elements of a tensor of shape ``narrow`` in one of shape ``wide``."""
        place = torch.zeros((), dtype=torch.int64)
        for small, large in zip(narrow, wide, strict=True):
            place = place[..., None] * large + self.along(small, large)
        return place.flatten()


def widths_of(task: Task, wide: int) -> Widths:
    """How the width of ``task`` is padded to ``wide``."""
    return Widths(task.hidden, wide, task.heads if task.traits is not None and task.traits.has_heads else 1)


class Padding:
    """One member's tensors in the layout of the wide model: by name for buffers, flat for parameters.

    ``turned``: parameters that lie transposed in both (:class:`weft.runtime.step.parameters.Layout`).
    """

    def __init__(
        self, widths: Widths, narrow: Mapping[str, Sequence[int]], wide: Mapping[str, Sequence[int]],
        buffers: Mapping[str, tuple[Sequence[int], Sequence[int]]], device: torch.device,
        turned: Collection[str] = (),
    ) -> None:  # fmt: skip
        parts, start = [], 0
        for name, shape in wide.items():
            order = -1 if name in turned else 1
            parts.append(widths.inside(narrow[name][::order], shape[::order]) + start)
            start += torch.Size(shape).numel()
        self._total, self._shapes = start, {name: tuple(shape) for name, shape in narrow.items()}
        self._flat = torch.cat(parts).to(device)
        self._buffers = {
            name: (widths.inside(*shapes).to(device), tuple(shapes[0]), tuple(shapes[1]))
            for name, shapes in buffers.items()
        }

    @property
    def parameters(self) -> int:
        """Q."""
        return self._flat.numel()

    def layout(self, wide: Layout) -> Layout:
        """The layout of the narrow model, from that of the wide one."""
        return replace(wide, shapes=tuple(torch.Size(self._shapes[name]) for name in wide.names))

    def widen(self, flat: Tensor) -> Tensor:
        """``flat [Q]`` in ``[P]``, zeros elsewhere."""
        return flat.new_zeros(self._total).index_copy(0, self._flat.to(flat.device), flat)

    def narrow(self, flat: Tensor) -> Tensor:
        """The inverse: ``[P]`` to ``[Q]``."""
        return flat.index_select(0, self._flat.to(flat.device))

    def widen_buffer(self, name: str, value: Tensor) -> Tensor:
        """A buffer of the narrow model in the shape of the wide one's, zeros elsewhere."""
        place, _, wide = self._buffers[name]
        zeros = value.new_zeros(torch.Size(wide).numel())
        return zeros.index_copy(0, place.to(value.device), value.flatten()).reshape(wide)

    def own_shape(self, name: str) -> torch.Size:
        """The shape of a buffer of the narrow model."""
        return torch.Size(self._buffers[name][1])

    def narrow_buffer(self, name: str, value: Tensor) -> Tensor:
        """The inverse."""
        place, narrow, _ = self._buffers[name]
        return value.flatten().index_select(0, place.to(value.device)).reshape(narrow)
