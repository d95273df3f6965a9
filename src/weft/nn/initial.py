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

from weft.core.startup import PrefetchCache
from weft.ops import random_bits as random

Key = tuple[int, int, tuple[int, ...]]  # seed, stream, shape

# Random numbers in [0, 1) of initial weights that were drawn before their model is built, while another one trains. A
# number depends on the seed, the index of the parameter in its model, and its index there alone, so that it is the same
# whenever it is drawn, and every model of this process may use it.
DRAWN_BYTES = 128 << 20
DRAWN_AHEAD: PrefetchCache[Key, Tensor] = PrefetchCache(DRAWN_BYTES, lambda numbers: numbers.nbytes)


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
            initial.fill_(parameter, partial(_drawn, seed, stream, parameter.shape, parameter.device))
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


def _drawn(seed: int, stream: int, shape: Sequence[int], device: torch.device) -> Tensor:
    before = DRAWN_AHEAD.find((seed, stream, tuple(shape)))
    return random.uniform(seed, stream, shape, device) if before is None else before.to(device)


def draw_ahead(model: nn.Module, seed: int) -> list[Key]:
    """Draw what :func:`reset_parameters` of a model like ``model`` will need; returns the keys.

    ``model`` may be on the meta device: its shapes alone count.
    """
    keys: list[Key] = []
    for stream, (module, name, parameter) in enumerate(_owned_parameters(model)):
        initial = _initial_of(module, name)
        if initial is not None and initial.low != initial.high:
            keys.append((seed, stream, tuple(parameter.shape)))
            if not DRAWN_AHEAD.has(keys[-1]):
                DRAWN_AHEAD.put(keys[-1], random.uniform(*keys[-1], torch.device("cpu")))
    return keys


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
