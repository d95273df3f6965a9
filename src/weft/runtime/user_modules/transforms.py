"""Detect functorch transforms, forward-mode AD and saved-tensor hooks.

In these contexts, replacing torch's operators by Weft's inside a user's module would be observable.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = (Tensor, nn.Parameter)  # a subclass of Tensor may override operators


def saved_tensors_are_hooked() -> bool:
    """Whether saved-tensor hooks are active, such as those of ``torch.utils.checkpoint``, which recomputes a layer."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def has_forward_derivatives() -> bool:
    """Whether forward-mode AD is active (``torch.func.jvp``)."""
    return forward_ad._current_level >= 0


def vmap_sizes(tensor: Tensor) -> dict[int, int] | None:
    """Size of the batch at every level of ``vmap``; None inside other transforms (``torch.func.grad``)."""
    functorch, sizes = torch._C._functorch, {}
    while functorch.is_functorch_wrapped_tensor(tensor):
        if not functorch.is_batchedtensor(tensor):
            return None
        level, place = functorch.maybe_get_level(tensor), functorch.maybe_get_bdim(tensor)
        tensor = functorch.get_unwrapped(tensor)
        sizes[level] = tensor.shape[place]
    return sizes
