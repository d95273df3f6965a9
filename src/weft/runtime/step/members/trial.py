"""Trial: call a user's module before the first epoch as a plain loop of torch would, and see how it behaves.

The calls go to a copy, so that the first epoch finds the module and all generators as they were. What a stack, a
CUDA graph or a compiled step gives is then compared with it: users' modules train as written, or not that way.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.batches.source import Batch
from weft.runtime.device.threads import step_seconds
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.loop.outputs import as_one, of_member
from weft.runtime.step.backward import backward
from weft.runtime.step.forward import Forward, LeafForward, Loss
from weft.runtime.step.inputs import given_tensors
from weft.runtime.step.members.kept_elsewhere import (
    closure_state,
    differing,
    frozen_state,
    outside_state,
    shifted_frozen,
)
from weft.runtime.step.parameters import Layout
from weft.runtime.step.state import State
from weft.runtime.user_modules.attributes import Kept, changed, keeping_others, kept_tensors
from weft.runtime.user_modules.input_writes import InputWrites
from weft.runtime.user_modules.python_state import cannot_keep
from weft.runtime.user_modules.weight_writes import WeightWrites

NEAR = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: a stack adds up in another order
EQUAL = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: the same layer by other operators
REPEATED = 1e-5  # of the largest: sums on a GPU may be added up in another order each time
LEAST, TINY = 1e-3, 1e-30
OTHERS = "it gives other numbers when it is called again"


@dataclass(frozen=True)
class Trial:
    """One member alone: its loss, gradients ``[P]`` and logits ``[N, C]``, and how its module behaves.

    ``hidden_state``: why a second call differs from the first, or None; ``attributes``: what a call changes in Python;
    ``without_gradient``: names of parameters that the loss does not depend on; ``writes``: whether a call, or a hook in
    its backward pass, writes to the module's own weights; ``seconds``: of the last training call and the one in
    evaluation mode; ``rewritten``: attributes with a tensor that every call makes anew; ``lost``: those of
    ``attributes`` that cannot be written down.
    """

    loss: Tensor
    grad: Tensor
    logits: Tensor
    hidden_state: str | None
    attributes: tuple[str, ...]
    without_gradient: tuple[str, ...]
    writes: bool = False
    seconds: float = 0.0
    rewritten: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class AloneStep:
    """A training call and one in evaluation mode of one member by itself, with a ``state`` of its own: to be timed."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self._forward, self.state, self._batch, self._loss = forward, state, batch, loss
        self._slopes = torch.ones(1, device=state.flat.device)

    def __call__(self) -> None:
        self._forward.gradients(self.state.flat, self._batch, self._loss, self._slopes)
        with torch.no_grad():
            self._forward(self.state.flat, training=False, batch=self._batch)


def try_again(forward: Forward, state: State, batch: Batch, loss: Loss) -> Trial:
    """One training call and one in evaluation mode of another member, whose module behaves as the first one's."""
    before = state.snapshot()
    with same_draws(state.flat.device):
        begin = step_seconds()
        losses, grad = forward.gradients(state.flat, batch, loss, torch.ones(1, device=state.flat.device))
        seconds = step_seconds() - begin
    state.restore(before)
    logits, more = _evaluated(forward, state, batch)
    return Trial(losses, grad[0], logits, None, (), (), seconds=seconds + more)


def _evaluated(forward: Forward, state: State, batch: Batch) -> tuple[Tensor, float]:
    """Logits ``[N, C]`` in evaluation mode, and the seconds that they took."""
    with torch.no_grad(), same_draws(state.flat.device):
        begin = step_seconds()
        found = forward(state.flat, training=False, batch=batch)
        seconds = step_seconds() - begin
    return as_one(of_member(found, 0)), seconds


def try_alone(
    forward: Forward, state: State, batch: Batch, loss: Loss, untouched: nn.Module, of_object: bool = False
) -> Trial:
    """Two training calls and one in evaluation mode of ``forward``, whose model is a copy of ``untouched``.

    A third training call follows if the one in evaluation mode kept tensors, which training might read. ``state``: of
    this member alone, attached to ``forward``; it is used up. ``of_object``: the model is a copy of a user's object.
    """
    model, before = forward.model, state.snapshot()
    outside, closures, frozen = outside_state(model), closure_state(model), frozen_state(model)
    slopes, writes = torch.ones(1, device=state.flat.device), WeightWrites(model)
    inputs = InputWrites(given_tensors(model, batch))

    def train() -> tuple[Tensor, Tensor]:
        state.restore(before)
        return forward.gradients(state.flat, batch, loss, slopes)

    with same_draws(state.flat.device) as moved:
        forward.around = _Both(writes, inputs)
        first, grad = train()
        forward.around, drawn = nullcontext(), moved()
    _check_inputs(model, inputs.changed())
    kept = kept_tensors(model)
    with same_draws(state.flat.device):
        begin = step_seconds()
        second, again = train()
        seconds = step_seconds() - begin
    state.restore(before)
    forward.around, kept_in_training = _Both(writes, inputs), kept_tensors(model)
    writes.reads_gradient = False  # a hook in the backward pass may
    logits, more = _evaluated(forward, state, batch)
    forward.around = nullcontext()
    _check_inputs(model, inputs.changed())
    _check_gradients(model, writes.reads_gradient)
    twice = [(first, second), (grad, again)]
    if keeping_others(kept_in_training, kept_tensors(model)):
        with same_draws(state.flat.device):
            third, once_more = train()
        twice += [(first, third), (grad, once_more)]
    other = _differ(twice)
    of_functions = differing(closures, closure_state(model))
    if other:
        _check_outside(model, differing(outside, outside_state(model)) + of_functions * of_object)
    rewritten = tuple(keeping_others(kept, kept_tensors(model)))
    reads = bool(rewritten) and not other and _reads(forward, state, batch, logits, kept)
    frozen_changed = differing(frozen, frozen_state(model))
    if writes.seen:
        with same_draws(state.flat.device), shifted_frozen(model) as shifted:
            train()
            frozen_changed += differing(shifted, frozen_state(model))
    own = [*changed(untouched, model), *frozen_changed, *of_functions]
    without = (forward.without_gradient or ()) if isinstance(forward, LeafForward) else ()
    attributes = tuple(dict.fromkeys([*own, *(rewritten if other or reads else ())]))
    hidden = _hidden(own, drawn, other)
    if hidden is None and reads:
        hidden = f"its evaluation reads {rewritten[0]!r}, which is no buffer"
    lost = tuple(cannot_keep(model, attributes))
    return Trial(first, grad[0], logits, hidden, attributes, without, writes.seen, seconds + more, rewritten, lost)


class _Both(AbstractContextManager[None]):
    """Two that watch, one inside of the other; may be entered again."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def _reads(forward: Forward, state: State, batch: Batch, logits: Tensor, before: Kept) -> bool:
    """Whether an evaluation that gave ``logits`` reads tensors that calls have left in attributes since ``before``.

    The weights of the best epoch are then given back with what was kept in that epoch, not at the end.
    """
    old = {id(tensor) for _, tensor, _ in before} | {id(one) for one in given_tensors(forward.model, batch).values()}
    for _, tensor, _ in kept_tensors(forward.model):
        if id(tensor) not in old and tensor.is_floating_point():
            tensor.data = tensor.data * 1.5 + 1.0  # other memory: it may be a view of something else
    return not apart(_evaluated(forward, state, batch)[0], logits) <= REPEATED


def _check_inputs(model: nn.Module, changed: Sequence[str]) -> None:
    if changed:
        name = changed[0]
        raise SpecError(
            f"model {type(model).__name__} changes {name} in place, which every call is given again; let it change a "
            f"copy: {name} = {name}.clone()"
        )


def _check_gradients(model: nn.Module, read: bool) -> None:
    if read:
        raise SpecError(
            f"model {type(model).__name__} reads the .grad of its weights in evaluation, where Weft has none: keep "
            "what it needs of them in a buffer, by a hook on the weight"
        )


def _check_outside(model: nn.Module, changed: Sequence[str]) -> None:
    if changed:
        raise SpecError(
            f"model {type(model).__name__} changes {changed[0]} when it is called, and gives other numbers when it is "
            "called again; that is shared by all copies of it, so their calls would change it too: keep it in self"
        )


def _differ(twice: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return any(not apart(again, first) <= REPEATED for first, again in twice)


def _hidden(attributes: Sequence[str], drawn: bool, other_numbers: bool) -> str | None:
    if attributes:
        return f"it changes {attributes[0]!r} from call to call, which is no buffer"
    if drawn:
        return "it draws from Python's or NumPy's generator"
    return OTHERS if other_numbers else None


def check_used_through_modules(forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
    """A :class:`SpecError` if the model reads a parameter other than through the module that it belongs to.

    Where weights are cast (bf16) or gradients are sent to other ranks, the module is given other tensors than its own
    parameters.
    """
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


def compare(trial: Trial, losses: Tensor, grad: Tensor, logits: Tensor, layout: Layout, near: float) -> bool:
    """Whether one member of a stack has the loss, the gradient of every parameter and the logits of its trial."""
    pairs = zip(layout.views(grad), layout.views(trial.grad), strict=True)
    parts = [apart(mine, true, trial.grad) for mine, true in pairs]
    worst = [apart(losses, trial.loss), apart(logits.float(), trial.logits.float()), *parts]
    return max(worst) <= near


def apart(mine: Tensor, true: Tensor, whole: Tensor | None = None, least: float = LEAST) -> float:
    """The largest difference relative to the largest of ``true``, or to ``least`` of the ``whole`` it is part of.

    It is infinite unless the same numbers are finite.
    """
    finite = true.isfinite()
    if not bool((mine.isfinite() == finite).all()):
        return inf
    largest = max(_largest(true), least * _largest(true if whole is None else whole), TINY)
    return _largest((mine - true).where(finite, torch.zeros((), dtype=true.dtype, device=true.device))) / largest


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0
