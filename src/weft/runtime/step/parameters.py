"""All trainable parameters of a model as one flat float32 buffer, so that an update is one operation.

Shapes: P parameters in all; a leading ``...`` is for tasks that share a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from weft.ops.dense.split_rows import split_rows


@dataclass(frozen=True)
class Layout:
    """Where each named parameter is in the flat buffer ``[..., P]``, and whether weight decay applies to it."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    decayed: tuple[bool, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def total(self) -> int:
        """P."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of ``flat [..., P]``.

        One split, because its backward is one concatenation; slices would each make a P-long gradient.
        """
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return [part.view((*lead, *shape)) for part, shape in zip(parts, self.shapes, strict=True)]

    def copies(self, flat: Tensor) -> list[Tensor]:
        """Each parameter ``[T, *shape]`` of ``flat [T, P]``, contiguous: all of them copied in one pass."""
        parts = split_rows(flat, self.sizes)
        return [part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat buffer ``[P]`` that holds ``tensors``."""
        if not self.names:
            return torch.zeros(0)
        return torch.cat([tensors[name].detach().reshape(-1).to(torch.float32) for name in self.names])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The views of ``flat [P]`` by name."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def decay_mask(self) -> Tensor | None:
        """``[P]`` 1 where weight decay applies and 0 elsewhere; None if it applies everywhere."""
        if all(self.decayed):
            return None
        parts = [torch.full((n,), float(d)) for n, d in zip(self.sizes, self.decayed, strict=True)]
        return torch.cat(parts)


def layout_of(model: nn.Module, decay: str) -> Layout:
    """The layout of ``model``'s trainable parameters; ``decay`` is ``"all"`` or ``"first"`` (layer)."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    prefix = "" if decay == "all" else first_layer_prefix(model)
    return Layout(
        names=tuple(trained),
        shapes=tuple(p.shape for p in trained.values()),
        decayed=tuple(name.startswith(prefix) for name in trained),
    )


def first_layer_prefix(model: nn.Module) -> str:
    """The name prefix of the first layer: the first child with parameters, or the first of a list of them."""
    prefix, module = "", model
    while True:
        children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
        if not children or (prefix and not isinstance(module, (nn.ModuleList, nn.Sequential))):
            return prefix
        name, module = children[0]
        prefix += name + "."


class Slots:
    """The slots of a model's trained parameters, tied ones included.

    Binding replaces the parameters by any tensors, as ``torch.func.functional_call`` does; writing to the
    modules' own tables costs a microsecond per parameter instead of a traversal of the model per call.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        position = {name: index for index, name in enumerate(names)}
        owner = {id(p): position[n] for n, p in model.named_parameters() if n in position}
        self._places = [
            (module._parameters, key, owner[id(p)])
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in owner
        ]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Bind ``tensors``, in the order of ``names``, in place of the parameters."""
        for table, key, index in self._places:
            table[key] = tensors[index]
