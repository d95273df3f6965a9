"""Find stacks of users' modules that train slower than their members one after another, by timing their steps.

Torch runs some operators far slower for several tasks at once (``vmap``) than for each: no prediction knows them all.
"""

from __future__ import annotations

import math

import torch

from weft.runtime.device.threads import step_seconds
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.step.stack import Stack

SLOWER = 0.97  # times what the members take, from which on a stack is not worth it: less is within the noise of steps
WORTH_SECONDS = 0.1  # of the whole training: what takes less is not worth a note
ATTEMPTS = 3  # to see a step take no longer: a busy machine makes single ones slower


def slower_than_alone(stack: Stack) -> str | None:
    """Why ``stack`` should be taken apart, in words; None if it should not, or nothing is known."""
    one = stack.members.alone_seconds
    if one is None or len(stack.tasks) < 2:
        return None
    alone, epochs = len(stack.tasks) * one, max(task.epochs for task in stack.tasks)
    short = (1 - SLOWER) * alone * epochs < WORTH_SECONDS
    most, together = alone + WORTH_SECONDS / epochs if short else SLOWER * alone, math.inf
    for _ in range(ATTEMPTS):
        together = min(together, _step_seconds(stack))
        if together <= most:
            return None
    return f"a step of the stack takes {together * 1e3:.3g} ms, the steps of its members {alone * 1e3:.3g} ms"


def _step_seconds(stack: Stack) -> float:
    """Seconds of the gradients of all members and of their logits in evaluation mode; the state is as it was."""
    before, batch = stack.state.snapshot(), stack.source.example()
    with same_draws(stack.device):
        begin = step_seconds()
        stack.gradients(stack.state.flat, batch)
        with torch.no_grad():
            stack.logits(stack.state.flat, batch)
        taken = step_seconds() - begin
    stack.state.restore(before)
    return taken
