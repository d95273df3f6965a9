"""CountedDropout: ``nn.Dropout`` and ``F.dropout`` of a user's module draw their masks as Weft's own layers do.

Torch's generator knows neither members nor steps: a stack could not share its draws, and a training that is resumed,
stacked or compiled would see other masks. Here a mask is a function of (seed, step, site, element); the site counts the
calls of one pass through the model, after the sites of its own random modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as torch_dropout
from torch.overrides import TorchFunctionMode

from weft.ops.dropout import dropout

PLAIN = (Tensor, nn.Parameter)  # a subclass of Tensor has meanings of its own


class CountedDropout(TorchFunctionMode):
    """Inside, dropout takes its masks from ``clock [2]`` = (seed, step), the first call at ``site``."""

    def __init__(self, clock: Tensor, site: int) -> None:
        super().__init__()
        self._clock, self._site = clock, site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_dropout and not torch.compiler.is_compiling():
            x, p, training, inplace = _arguments(*args, **(kwargs or {}))
            ours = type(x) in PLAIN and x.is_floating_point() and not inplace and not _is_repeated()
            if training and 0.0 < p < 1.0 and ours:
                return self._drop(x, p)
        return func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, p: float) -> Tensor:
        site, self._site = self._site, self._site + 1
        if x.numel() == 0:
            return x
        rows = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x.reshape(1, 1) if x.dim() == 0 else x
        return dropout(rows.contiguous(), p, self._clock, site).view(x.shape)


def _is_repeated() -> bool:
    """Whether ``torch.utils.checkpoint`` will run this again in the backward pass, outside of here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _arguments(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Any, float, bool, bool]:
    return input, p, training, inplace
