"""Check that a user's module can train with weights that are not its own parameters: cast ones, or those of ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from weft.core.errors import SpecError
from weft.runtime.batches.source import Batch
from weft.runtime.step.backward import backward
from weft.runtime.step.forward import Forward, Loss
from weft.runtime.step.state import State
from weft.runtime.user_modules.kept.shared_memory import followers
from weft.runtime.user_modules.weight_writes import WeightWrites


def check_used_through_modules(forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
    """A :class:`SpecError` if the model reads a parameter other than through the module that it belongs to.

    Where weights are cast (bf16) or gradients are sent to other ranks, the module is given other tensors than its own
    parameters.
    """
    for one in followers(forward.model, dict(forward.model.named_parameters())):
        raise SpecError(
            f"model {type(forward.model).__name__} keeps {one.name}, which is in the memory of {one.owner}; only "
            "precision='fp32' and 'tf32' on one rank can train that"
        )
    own = [p for p in forward.model.parameters() if p.requires_grad and p.is_leaf]
    leaf = state.flat.detach().requires_grad_()
    forward.around = writes = WeightWrites(forward.model)
    try:
        losses = loss(forward(leaf, training=True, batch=batch), batch)
        with writes:
            backward(losses, torch.ones_like(losses), [leaf, *own])
    except RuntimeError:  # autograd may object first, in words about views
        if not writes.seen:
            raise
    finally:
        forward.around = nullcontext()
    if writes.seen:
        raise SpecError(
            f"model {type(forward.model).__name__} changes its own weights when it is called; only precision='fp32' "
            "and 'tf32' on one rank can train that"
        )
    found = [parameter.grad is not None for parameter in own]
    for parameter in own:
        parameter.grad = None
    if any(found):
        raise SpecError(
            f"model {type(forward.model).__name__} reads a parameter other than as an attribute of its module (from a "
            "list or a closure); only precision='fp32' and 'tf32' on one rank can train that"
        )
