"""A model's buffers as part of the training state: BatchNorm's statistics, and the clock of dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core.errors import TrainingError

CLOCK, RATE = "clock", "rate"


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, str]]:
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
    found = {name: table[key] for table, key, name in _places(model)}
    return {name: buffer.detach().clone().contiguous() for name, buffer in found.items()}


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
        modules = drawing_modules(model)
        self._clocks = [module._buffers for module in modules]
        self._rates = [module._buffers for module in modules if RATE in module._buffers]

    def bind(self, clock: Tensor, rates: Sequence[Tensor]) -> None:
        """Bind ``clock [2]`` = (seed, step) in all of them, and the ``rates`` (0-d each) in their modules."""
        for table in self._clocks:
            table[CLOCK] = clock
        for table, rate in zip(self._rates, rates, strict=True):
            table[RATE] = rate


class BufferSlots:
    """The slots of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model))

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        """Bind ``buffers`` to the model, which then updates them in place."""
        for table, key, name in self._places:
            if name in buffers:  # else it was None at first, and is no part of the state
                table[key] = buffers[name]

    def replaced(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """Names of buffers that a module replaced instead of updating in place."""
        return [name for table, key, name in self._places if name in buffers and table[key] is not buffers[name]]

    def collect(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy back buffers that a module replaced instead of updating in place."""
        for table, key, name in self._places:
            if name in buffers and table[key] is not buffers[name]:
                _check_alike(name, table[key], buffers[name])
                buffers[name].copy_(table[key])
                table[key] = buffers[name]


def _check_alike(name: str, new: Tensor | None, old: Tensor) -> None:
    """A :class:`TrainingError` for a buffer that cannot take the place of the one that is kept."""
    if new is None:
        raise TrainingError(f"buffer {name!r} became None in a call; the training state keeps its first kind")
    if new.shape != old.shape or _kind(new) != _kind(old):
        was, now = (f"{list(one.shape)} of {str(one.dtype).removeprefix('torch.')}" for one in (old, new))
        raise TrainingError(
            f"buffer {name!r} was {was} and a call replaced it by {now}; give it that shape and type from the start"
        )


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()
