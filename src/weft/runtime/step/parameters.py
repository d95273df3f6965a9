"""All trainable parameters of a model as one flat float32 buffer, so that an update is one operation.

Shapes: P parameters in all; a leading ``...`` is for tasks that share a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, TrainingError
from weft.ops.dense.linear import split_rows


@dataclass(frozen=True)
class Layout:
    """Where each named parameter is in the flat buffer ``[..., P]``, and whether weight decay applies to it.

    A ``turned`` parameter ``[O, I]`` lies there transposed, for kernels that read it so: its view is transposed back,
    and neither its use nor its gradient needs a copy. Checkpoints have all in their own order (:meth:`in_order`).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    decayed: tuple[bool, ...]

    kinds: tuple[torch.dtype, ...] = ()  # of each; all float32 unless given
    turned: tuple[bool, ...] = ()  # of each; none unless given

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of each parameter: a complex one has two per element."""
        kinds = self.kinds or (torch.float32,) * len(self.shapes)
        return [prod(shape) * (2 if kind.is_complex else 1) for shape, kind in zip(self.shapes, kinds, strict=True)]

    @property
    def turned_names(self) -> tuple[str, ...]:
        """The parameters that lie transposed."""
        return tuple(name for name, turned in zip(self.names, self.turned, strict=False) if turned)

    @property
    def total(self) -> int:
        """P."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of ``flat [..., P]``.

        One split, because its backward is one concatenation; slices would each make a P-long gradient.
        """
        return self._shaped(flat.split(self.sizes, dim=-1), flat.shape[:-1])

    def copies(self, flat: Tensor) -> list[Tensor]:
        """Each parameter ``[T, *shape]`` of ``flat [T, P]``, contiguous: all of them copied in one pass."""
        return self._shaped(split_rows(flat, self.sizes), (flat.shape[0],))

    def _shaped(self, parts: Sequence[Tensor], lead: Sequence[int]) -> list[Tensor]:
        tensors = []
        for index, (part, own_shape) in enumerate(zip(parts, self.shapes, strict=True)):
            shape = (*lead, *own_shape)
            if self.kinds and self.kinds[index].is_complex:
                pairs = part.view((*shape, 2))
                # A complex view needs an even offset, which the second row of an odd length does not have.
                odd = pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1])
                tensors.append(torch.view_as_complex(pairs.clone() if odd else pairs))
            elif self.turned and self.turned[index]:
                tensors.append(part.view((*shape[:-2], shape[-1], shape[-2])).mT)
            else:
                tensors.append(part.view(shape))
        return tensors

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat buffer ``[P]`` that holds ``tensors``."""
        return self.flat_of([tensors[name].detach() for name in self.names]) if self.names else torch.zeros(0)

    def flat_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat buffer ``[P]`` of ``tensors`` in the order of ``names``."""
        parts = []
        for index, tensor in enumerate(tensors):
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            real = real.mT if self.turned and self.turned[index] else real
            parts.append(real.reshape(-1).to(torch.float32))
        return torch.cat(parts)

    def in_order(self, flat: Tensor) -> Tensor:
        """``flat [P]`` with turned parameters in the order of their own elements, as checkpoints have them."""
        return replace(self, turned=()).flat_of(self.views(flat)) if any(self.turned) else flat

    def laid_out(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`in_order`."""
        return self.flat_of(replace(self, turned=()).views(flat)) if any(self.turned) else flat

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The views of ``flat [P]`` by name."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def turning(self, names: Collection[str]) -> Layout:
        """The same with ``names`` transposed."""
        return replace(self, turned=tuple(name in names for name in self.names))

    def without_decay(self, names: Collection[str]) -> Layout:
        """The same without weight decay of ``names``."""
        decayed = (old and name not in names for name, old in zip(self.names, self.decayed, strict=True))
        return replace(self, decayed=tuple(decayed))

    def decay_mask(self) -> Tensor | None:
        """``[P]`` 1 where weight decay applies and 0 elsewhere; None if it applies everywhere."""
        if all(self.decayed):
            return None
        parts = [torch.full((n,), float(d)) for n, d in zip(self.sizes, self.decayed, strict=True)]
        return torch.cat(parts)


def layout_of(model: nn.Module, decay: str) -> Layout:
    """The layout of ``model``'s trainable parameters; ``decay`` is ``"all"`` or ``"first"`` (layer).

    Complex ones come first: two numbers each, they are views of a row only where an even number is before them.
    """
    named = [(name, p) for name, p in nn.Module.named_parameters(model) if p.requires_grad]
    if (
        type(model).parameters is not nn.Module.parameters
        or type(model).named_parameters is not nn.Module.named_parameters
    ):
        listed = {id(p) for p in model.parameters()}  # what a plain loop gives to its optimizer
        unknown = listed - {id(p) for _, p in nn.Module.named_parameters(model)}
        if unknown:
            raise SpecError(
                f"parameters() of model {type(model).__name__} returns {len(unknown)} tensors that are no registered "
                "parameters of it: register them (self.name = nn.Parameter(...))"
            )
        named = [(name, p) for name, p in named if id(p) in listed]
    trained = dict(sorted(named, key=lambda pair: not pair[1].is_complex()))
    prefix = "" if decay == "all" else first_layer_prefix(model)
    return Layout(
        names=tuple(trained),
        shapes=tuple(p.shape for p in trained.values()),
        decayed=tuple(name.startswith(prefix) for name in trained),
        kinds=tuple(p.dtype for p in trained.values()) if any(p.is_complex() for p in trained.values()) else (),
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
        owner = {id(p): position[n] for n, p in nn.Module.named_parameters(model) if n in position}
        self._slots = [
            (module._parameters, key, owner[id(p)])
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in owner
        ]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Bind ``tensors``, in the order of ``names``, in place of the parameters."""
        for table, key, index in self._slots:
            table[key] = tensors[index]


# ---- A model's buffers as part of the training state: BatchNorm's statistics, and the clock of dropout.

CLOCK, RATE = "clock", "rate"


def _buffer_slots(model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Table, key and full name of every buffer that training may change; one that has several names goes by the first.

    A module with a clock has no other buffers than those that a runner binds (its dropout rate).
    """
    first: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and CLOCK not in module._buffers:
                name = f"{prefix}.{key}" if prefix else key
                yield module._buffers, key, first.setdefault(id(buffer), name)


def take_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's buffers by name, in a layout of their own; clocks are not among them."""
    buffers = {name: table[key] for table, key, name in _buffer_slots(model)}
    return {name: buffer.detach().clone().contiguous() for name, buffer in buffers.items()}


def drawing_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that read a clock (and a ``rate``, where they have one), in the order of ``model.modules()``."""
    return [module for module in model.modules() if CLOCK in module._buffers]


def detach_clock(model: nn.Module) -> None:
    """Let the modules draw from torch's own generator again."""
    for module in drawing_modules(model):
        module._buffers[CLOCK] = torch.empty(0, dtype=torch.int64)


class ClockSlots:
    """The slots of a model's random modules for the clock and, if they have one, their rate."""

    def __init__(self, model: nn.Module) -> None:
        self._clocks = [module._buffers for module in drawing_modules(model)]
        self._rates = [table for table in self._clocks if RATE in table]

    def bind(self, clock: Tensor, rates: Sequence[Tensor]) -> None:
        """Bind ``clock [2]`` = (seed, step) in all of them, and the ``rates`` (0-d each) in their modules."""
        for table in self._clocks:
            table[CLOCK] = clock
        for table, rate in zip(self._rates, rates, strict=True):
            table[RATE] = rate


class BufferSlots:
    """The slots of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = list(_buffer_slots(model))

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        """Bind ``buffers`` to the model, which then updates them in place."""
        for table, key, name in self._slots:
            if name in buffers:  # else it was None at first, and is no part of the state
                table[key] = buffers[name]

    def replaced(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """Names of buffers that a module replaced instead of updating in place."""
        return [name for table, key, name in self._slots if name in buffers and table[key] is not buffers[name]]

    def collect(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy back buffers that a module replaced instead of updating in place.

        Raises :class:`TrainingError` if the new one cannot be copied into the one of the training state.
        """
        for table, key, name in self._slots:
            if name not in buffers or table[key] is buffers[name]:
                continue
            new, old = table[key], buffers[name]
            if new is None:
                raise TrainingError(f"buffer {name!r} became None in a call; the training state keeps its first kind")
            kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (old, new)]
            if new.shape != old.shape or kinds[0] != kinds[1]:
                was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
                raise TrainingError(
                    f"buffer {name!r} was {was} and a call replaced it by {now}; give it that shape and type from the "
                    "start"
                )
            old.copy_(new)
            table[key] = old
