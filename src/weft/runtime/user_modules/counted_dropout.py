"""CountedDropout: ``nn.Dropout`` and ``F.dropout`` of a user's module draw their masks as Weft's own layers do.

Torch's generator has no notion of members or steps: a stack could not share its draws, and a resumed, stacked or
compiled run would get other masks. Here a mask is a function of (seed, step, site, element); the site counts the
calls of one pass through the model, after the sites of its own random modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout
from torch.overrides import TorchFunctionMode

from weft.nn.pyg.call_mask import next_mask
from weft.nn.pyg.edges import forget, is_bypass
from weft.ops.dense.bias_act_dropout import dropout
from weft.ops.dense.dropout_rows import dropout_rows
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.user_modules.transforms import PLAIN, has_forward_derivatives, saved_tensors_are_hooked, vmap_sizes


class CountedDropout(TorchFunctionMode):
    """Inside, dropout takes its masks from ``clock [2]`` = (seed, step), the first call at ``site``.

    Where nodes are spread over ranks (``reduce``), a tensor with a row per node has the mask of its rows.
    """

    def __init__(self, clock: Tensor, site: int, reduce: Reduce = ONE_RANK) -> None:
        super().__init__()
        self._clock, self._site, self._with_grad = clock, site, torch.is_grad_enabled()
        self._reduce = reduce

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_dropout and not torch.compiler.is_compiling():
            x, p, training, inplace = _arguments(*args, **(kwargs or {}))
            if training and not inplace and isinstance(p, (int, float)) and 0.0 < p < 1.0 and self._serves(x):
                return self._drop(x, p)
        if func is next_mask and self._serves(args[0]):
            return args[1], self._clock, self._next_site()
        if is_bypass(func):
            forget(args[0])  # its edges may change unseen
        return func(*args, **(kwargs or {}))

    def _serves(self, x: Any) -> bool:
        """Whether ``x`` is on the clock's device, and no derivative is taken that only torch's dropout supports."""
        if type(x) not in PLAIN or not x.is_floating_point() or x.device != self._clock.device:
            return False
        return not self._is_repeated() and not has_forward_derivatives() and vmap_sizes(x) is not None

    def _is_repeated(self) -> bool:
        """Whether the backward pass will run this again, outside of here: its masks would be others.

        ``torch.utils.checkpoint`` hooks what is saved; it may, and functions that recompute do, run without gradients.
        """
        return saved_tensors_are_hooked() or (self._with_grad and not torch.is_grad_enabled())

    def _drop(self, x: Tensor, p: float) -> Tensor:
        site = self._next_site()
        if x.numel() == 0:
            return x
        if self._reduce.ranks > 1 and x.dim() > 1 and x.shape[0] == self._reduce.rows:
            return dropout_rows(x, p, self._clock, site, self._reduce.first_row)
        rows = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x.reshape(1, 1) if x.dim() == 0 else x
        return dropout(rows.contiguous(), p, self._clock, site).view(x.shape)

    def _next_site(self) -> int:
        self._site += 1
        return self._site - 1


def _arguments(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Any, float, bool, bool]:
    return input, p, training, inplace
