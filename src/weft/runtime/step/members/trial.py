"""Trial: call a user's module before the first epoch as a plain loop of torch would, and see how it behaves.

The calls go to a copy, so that the first epoch finds the module and all generators as they were. What a stack, a
CUDA graph or a compiled step gives is then compared with it: users' modules train as written, or not that way.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.batches.source import Batch
from weft.runtime.device.threads import step_seconds
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.loop.outputs import as_one, of_member
from weft.runtime.step.forward import Forward, LeafForward, Loss
from weft.runtime.step.members.comparing import apart, differ
from weft.runtime.step.members.kept_elsewhere import differing, frozen_state, shifted_frozen
from weft.runtime.step.members.watching import Watch
from weft.runtime.step.parameters import Layout
from weft.runtime.step.state import State
from weft.runtime.user_modules.attributes import changed
from weft.runtime.user_modules.kept.state import KeptState, alike

OTHERS = "it gives other numbers when it is called again"


@dataclass(frozen=True)
class Trial:
    """One member alone: its loss, gradients ``[P]`` and logits ``[N, C]``, and how its module behaves.

    ``hidden_state``: why a second call differs from the first, or None; ``without_gradient``: names of parameters that
    the loss does not depend on; ``writes``: whether a call, or a hook in its backward pass, writes to the module's own
    weights; ``seconds``: of a training call and one in evaluation mode, if they were timed; ``unread``: places with
    tensors that calls leave and none reads; ``caches``: those that the first call fills and that depend on the graph
    alone; ``lost``: places that cannot be written down.
    """

    loss: Tensor
    grad: Tensor
    logits: Tensor
    hidden_state: str | None
    without_gradient: tuple[str, ...] = ()
    writes: bool = False
    seconds: float | None = None
    unread: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Calls:
    """Calls of one member by itself, each from the same ``state`` and with the same draws."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self.forward, self.state, self.batch, self._loss = forward, state, batch, loss
        self._before, self._slopes = state.snapshot(), torch.ones(1, device=state.flat.device)

    def step(self) -> tuple[Tensor, Tensor]:
        """Losses ``[1]`` and gradients ``[1, P]`` from where the state and the generators are."""
        return self.forward.gradients(self.state.flat, self.batch, self._loss, self._slopes)

    def train(self) -> tuple[Tensor, Tensor]:
        """The same from the beginning."""
        self.state.restore(self._before)
        with same_draws(self.state.flat.device):
            return self.step()

    def train_elsewhere(self) -> None:
        """A training call with other weights and other draws."""
        self.state.restore(self._before)
        self.state.flat.mul_(1.5).add_(0.01)
        with same_draws(self.state.flat.device):
            torch.manual_seed(torch.initial_seed() + 1)
            random.seed(random.random())
            np.random.seed(np.random.randint(1 << 31))
            self.step()

    def evaluate(self) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode."""
        self.state.restore(self._before)
        with torch.no_grad(), same_draws(self.state.flat.device):
            return as_one(of_member(self.forward(self.state.flat, training=False, batch=self.batch), 0))


class AloneStep:
    """A training call and one in evaluation mode of one member by itself, with a ``state`` of its own: to be timed."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self._forward, self.state, self._batch, self._loss = forward, state, batch, loss
        self._slopes = torch.ones(1, device=state.flat.device)

    def __call__(self) -> None:
        self._forward.gradients(self.state.flat, self._batch, self._loss, self._slopes)
        with torch.no_grad():
            self._forward(self.state.flat, training=False, batch=self._batch)


def try_again(calls: Calls) -> Trial:
    """One training call and one in evaluation mode of another member, timed; its module behaves as the first one's."""
    begin = step_seconds()
    losses, grad = calls.train()
    logits = calls.evaluate()
    return Trial(losses, grad[0], logits, None, seconds=step_seconds() - begin)


def try_alone(calls: Calls, untouched: nn.Module, elsewhere: Callable[[], Calls], of_object: bool = False) -> Trial:
    """Two training calls and one in evaluation mode of a copy of ``untouched``, all of them watched.

    A third training call follows if the one in evaluation mode kept tensors, which training might read. ``elsewhere``
    makes calls of another copy; ``of_object``: the model is a copy of a user's object.
    """
    forward, model = calls.forward, calls.forward.model
    held = {*forward.layout.names, *calls.state.buffers}
    keeping, watch = KeptState(model, held, untouched), Watch(forward, calls.batch, held)
    with same_draws(calls.state.flat.device) as moved:
        with watch.call(training=True):
            first, grad = calls.step()
        drawn = moved()
    logits, twice = _called_again(calls, watch, first, grad)
    other, of_functions = differ(twice), watch.functions_changed()
    if other:
        watch.check_outside(of_functions * of_object)
    own = [*changed(untouched, model), *_frozen_changed(calls, watch), *of_functions]
    caches = _caches(watch, model, elsewhere, held)
    read = [name for name in watch.read if name in watch.rewritten or (name in watch.made and name not in caches)]
    hidden = _hidden(own, read, drawn, other)
    without = (forward.without_gradient or ()) if isinstance(forward, LeafForward) else ()
    unread = () if hidden or watch.branches else [name for name in watch.rewritten if name not in watch.read]
    lost = keeping.lost(untouched, own) if hidden else ()
    return Trial(
        *(first, grad[0], logits, hidden, without, watch.writes.seen), None, tuple(unread), tuple(caches), tuple(lost)
    )


def _called_again(
    calls: Calls, watch: Watch, first: Tensor, grad: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits of an evaluation, and what training calls before and after it gave, beside the first one."""
    with watch.call(training=True):
        second, again = calls.train()
    twice, before = [(first, second), (grad, again)], watch.kept()
    with watch.call(training=False):
        logits = calls.evaluate()
    if watch.keeps_others_than(before):
        with watch.call(training=True):
            third, once_more = calls.train()
        twice += [(first, third), (grad, once_more)]
    return logits, twice


def _frozen_changed(calls: Calls, watch: Watch) -> list[str]:
    """Parameters that do not train and that calls change; those of a teacher may not move in a first step."""
    found = watch.frozen_changed()
    if watch.writes.seen:
        with shifted_frozen(watch.model) as shifted:
            calls.train()
            found += differing(shifted, frozen_state(watch.model))
    return found


def _caches(watch: Watch, model: nn.Module, elsewhere: Callable[[], Calls], held: set[str]) -> list[str]:
    """Places that the first call fills alike whatever the weights and the draws are."""
    if not watch.made:
        return []
    calls = elsewhere()
    calls.train_elsewhere()
    return alike(model, calls.forward.model, held, watch.made)


def _hidden(changing: Sequence[str], read: Sequence[str], drawn: bool, other_numbers: bool) -> str | None:
    if changing:
        return f"it changes {changing[0]!r} from call to call, which is no buffer"
    if read:
        return f"it reads {read[0]!r} of an earlier call, which is no buffer"
    if drawn:
        return "it draws from Python's or NumPy's generator"
    return OTHERS if other_numbers else None


def compare(trial: Trial, losses: Tensor, grad: Tensor, logits: Tensor, layout: Layout, near: float) -> bool:
    """Whether one member of a stack has the loss, the gradient of every parameter and the logits of its trial."""
    pairs = zip(layout.views(grad), layout.views(trial.grad), strict=True)
    parts = [apart(mine, true, trial.grad) for mine, true in pairs]
    worst = [apart(losses, trial.loss), apart(logits.float(), trial.logits.float()), *parts]
    return max(worst) <= near
