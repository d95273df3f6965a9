"""Differentiate losses with given slopes, without what ``torch.autograd.grad`` imports on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient(losses: Tensor, leaf: Tensor, slopes: Tensor) -> Tensor:
    """The gradient of ``losses [T]`` in ``leaf``, each loss with its slope.

    ``torch.autograd.grad`` compares the shapes of losses and slopes with torch's symbolic shapes, which imports sympy:
    half a second. They are equal here, and the engine is called as it calls it.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # another version of torch
        return torch.autograd.grad(losses, leaf, slopes)[0]
    if losses.shape != slopes.shape:
        raise RuntimeError(f"losses of shape {list(losses.shape)} need slopes of that shape, not {list(slopes.shape)}")
    found: Tensor = run((losses,), (slopes,), False, False, (leaf,), False, accumulate_grad=False)[0]
    return found


def backward(losses: Tensor, slopes: Tensor, inputs: Sequence[Tensor] = ()) -> None:
    """``losses.backward(slopes)`` into all leaves, or into ``inputs``.

    Torch's own functions leave modes (:class:`torch.overrides.TorchFunctionMode`) on the way, so that these do not see
    what hooks do; the engine does not.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # another version of torch
        torch.autograd.backward(losses, slopes, inputs=list(inputs) or None)
        return
    run((losses,), (slopes,), False, False, tuple(inputs), True, accumulate_grad=True)
