"""Initial values: which distribution every parameter starts from, and filling a model from one seed.

The distributions are those of PyG's layers, so that training starts as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from weft.ops import random_bits as random


@dataclass(frozen=True)
class Initial:
    """Uniform in ``[low, high)``; a constant if both are equal."""

    low: float
    high: float

    @torch.no_grad()
    def fill_(self, parameter: Tensor, draw: Callable[[], Tensor]) -> None:
        """Write initial values into ``parameter``; ``draw`` gives floats in [0, 1) in its shape."""
        if parameter.is_meta:
            return  # nothing to write into
        if self.low == self.high:
            parameter.fill_(self.low)
        else:
            parameter.copy_(draw() * (self.high - self.low) + self.low)


ZEROS = Initial(0.0, 0.0)
ONES = Initial(1.0, 1.0)


def glorot(fan_in: int, fan_out: int) -> Initial:
    """Glorot's uniform distribution: ``sqrt(6 / (fan_in + fan_out))`` to both sides."""
    bound = sqrt(6.0 / (fan_in + fan_out))
    return Initial(-bound, bound)


def kaiming(fan_in: int) -> Initial:
    """What ``torch.nn.Linear`` starts from (Kaiming's with a = sqrt 5): ``1 / sqrt(fan_in)`` to both sides."""
    bound = 1.0 / sqrt(max(fan_in, 1))
    return Initial(-bound, bound)


class Parametrised(nn.Module):
    """A module that declares each of its parameters together with its initial distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.initials: dict[str, Initial] = {}

    def declare(self, name: str, shape: Sequence[int], initial: Initial | None) -> None:
        """Register the parameter ``name`` with fresh values, or None in its place without an ``initial``."""
        if initial is None:
            self.register_parameter(name, None)
            return
        parameter = nn.Parameter(torch.empty(*shape))
        self.initials[name] = initial
        self.register_parameter(name, parameter)
        initial.fill_(parameter, lambda: torch.rand(*shape))


def reset_parameters(model: nn.Module, seed: int) -> None:
    """Give every parameter of ``model`` fresh initial values, the same on every device for one ``seed``.

    Parameter number i draws from stream i of the seed. Modules of other libraries that know how to reset
    themselves do so under a generator with the same seed; parameters without a known distribution stay as they
    are. Running statistics start afresh.
    """
    strangers: dict[nn.Module, int] = {}
    for stream, (module, name, parameter) in enumerate(_owned_parameters(model)):
        initial = _initial_of(module, name)
        if initial is not None:
            initial.fill_(parameter, partial(random.uniform, seed, stream, parameter.shape, parameter.device))
        elif hasattr(module, "reset_parameters"):
            strangers.setdefault(module, stream)
    for module, stream in strangers.items():
        devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed + stream)
            module.reset_parameters()
    for module in model.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()


def parameters_without_initial(model: nn.Module) -> list[str]:
    """Names of the parameters that :func:`reset_parameters` would leave as they are."""
    names = [name for name, _ in model.named_parameters()]
    return [
        full
        for full, (module, name, _) in zip(names, _owned_parameters(model), strict=True)
        if _initial_of(module, name) is None and not hasattr(module, "reset_parameters")
    ]


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter once, with the module that owns it, in the order of ``model.parameters()``."""
    for path, parameter in model.named_parameters():
        prefix, _, name = path.rpartition(".")
        yield model.get_submodule(prefix), name, parameter


def _initial_of(module: nn.Module, name: str) -> Initial | None:
    if isinstance(module, Parametrised):
        return module.initials.get(name)
    return kaiming(module.in_features) if type(module) is nn.Linear else None
