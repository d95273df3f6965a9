"""Tell the modules of a model how they run: for several members or one, over several ranks or one, counted or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.nn.dropout import Dropout
from weft.nn.norm import BatchNorm, LayerNorm
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.step.buffers import RATE, detach_clock, drawing_modules


def set_stacked(model: nn.Module, stacked: bool) -> None:
    """Whether batch norms see the members of a stack."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.stacked = stacked


def set_reduce(model: nn.Module, reduce: Reduce) -> None:
    """How norms and dropout join the rows of several ranks; a :class:`SpecError` for norms that cannot."""
    for name, module in model.named_modules():
        if isinstance(module, (BatchNorm, LayerNorm, Dropout)):
            module.reduce = reduce
        elif reduce.ranks > 1 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise SpecError(
                f"model {type(model).__name__}: {name} is torch's {type(module).__name__}, which knows the rows of one "
                f"rank only; use weft.nn.BatchNorm to train over {reduce.ranks} ranks"
            )


def rated_modules(model: nn.Module) -> list[nn.Module]:
    """The random modules that have a rate of their own."""
    return [module for module in drawing_modules(model) if RATE in module._buffers]


def as_the_user_made_it(model: nn.Module, rates: Sequence[Tensor]) -> nn.Module:
    """``model`` outside of any stack: drawing from torch's generator, with rates that are plain numbers."""
    detach_clock(model)
    set_stacked(model, False)
    set_reduce(model, ONE_RANK)
    for module, rate in zip(rated_modules(model), rates, strict=True):
        if hasattr(module, "p") and float(rate) == 0.0:
            module.p = 0.0
    return model
