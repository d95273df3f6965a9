"""Trial: call a user's module before the first epoch as a plain loop of torch would, and see how it behaves.

The calls go to a copy, so that the first epoch finds the module and all generators as they were. What a stack, a
CUDA graph or a compiled step gives is then compared with it: users' modules train as written, or not that way.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.core.errors import SpecError
from weft.runtime.device.process import same_draws, step_seconds
from weft.runtime.modules.state import KeptState, alike
from weft.runtime.modules.walking import changed
from weft.runtime.modules.writes import same_numbers
from weft.runtime.step.forward import Forward, Loss
from weft.runtime.step.losses import as_one, of_member
from weft.runtime.step.outside import (
    BeforeCalls,
    Watch,
    cache_of,
    caches,
    differing,
    frozen_state,
    shifted_frozen,
    uncached,
)
from weft.runtime.step.parameters import Layout
from weft.runtime.step.state import State

# ---- Calls: call one member's module by itself, again and again from the same weights and with the same draws.
#
# Shapes: P parameters, N nodes, C classes.


class Calls:
    """Calls of one member by itself, each from the same ``state`` and with the same draws."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self.forward, self.state, self.batch, self._loss = forward, state, batch, loss
        self._before, self._slopes = state.snapshot(), torch.ones(1, device=state.flat.device)
        self.seconds = 0.0  # of all calls so far, without what is around them

    def step(self) -> tuple[Tensor, Tensor]:
        """Losses ``[1]`` and gradients ``[1, P]`` from where the state and the generators are."""
        begin = step_seconds()
        found = self.forward.gradients(self.state.flat, self.batch, self._loss, self._slopes)
        self.seconds += step_seconds() - begin
        return found

    def train(self) -> tuple[Tensor, Tensor]:
        """The same from the beginning."""
        self.state.restore(self._before)
        with same_draws(self.state.flat.device):
            return self.step()

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Inside, the weights and the draws are others."""
        self.state.restore(self._before)
        self.state.flat.mul_(1.5).add_(0.01)
        with same_draws(self.state.flat.device):
            torch.manual_seed(torch.initial_seed() + 1)
            random.seed(random.random())
            np.random.seed(np.random.randint(1 << 31))
            yield

    def train_elsewhere(self) -> tuple[Tensor, Tensor]:
        """A training call with other weights and other draws."""
        with self._elsewhere():
            return self.step()

    def evaluate_elsewhere(self) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode with other weights and other draws."""
        with torch.no_grad(), self._elsewhere():
            return self._logits()

    def evaluate(self) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode."""
        self.state.restore(self._before)
        with torch.no_grad(), same_draws(self.state.flat.device):
            return self._logits()

    def _logits(self) -> Tensor:
        begin = step_seconds()
        found = self.forward(self.state.flat, training=False, batch=self.batch)
        self.seconds += step_seconds() - begin
        return as_one(of_member(found, 0))

    def changed_buffers(self) -> set[str]:
        """Names of the buffers that the last call has changed."""
        before = {name: self._before[f"buffer.{name}"] for name in self.state.buffers}
        return {name for name, one in self.state.buffers.items() if not same_numbers(one, before[name])}


class AloneStep:
    """A training call and one in evaluation mode of one member by itself, with a ``state`` of its own: to be timed."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self._forward, self.state, self._batch, self._loss = forward, state, batch, loss
        self._slopes = torch.ones(1, device=state.flat.device)

    def __call__(self) -> None:
        self._forward.gradients(self.state.flat, self._batch, self._loss, self._slopes)
        with torch.no_grad():
            self._forward(self.state.flat, training=False, batch=self._batch)


# ---- How far numbers are apart that should be equal, and how far they may be.

NEAR = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: a stack adds up in another order
EQUAL = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: the same layer by other operators
REPEATED = 1e-5  # of the largest: sums on a GPU may be added up in another order each time
LEAST, TINY = 1e-3, 1e-30


def differ(twice: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether pairs of numbers that were computed alike are not the same."""
    return any(not apart(again, first) <= REPEATED for first, again in twice)


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


# ---- Refuse modules whose calls read what earlier calls made of other weights, and left outside of the module.
#
# A global table, or a cache of ``functools``, may hold what depends on the graph alone: then it does no harm. What was
# made of the weights is shared with copies that have others, and is neither resumed nor given back with the best ones.

NOISE = 10.0  # times what the same calls are apart, on a GPU whose sums have no fixed order
Forgetting = Callable[[nn.Module], AbstractContextManager[None]]


def check_earlier_results(watch: Watch, calls_of: Callable[[], Calls]) -> None:
    """A :class:`SpecError` if calls read from outside what earlier ones left.

    ``calls_of`` makes calls of a module as it was, each time one that keeps the same.
    """
    changed = watch.outside.changed()
    cached = [one.name for one in caches(watch.model) if cache_of(one.value).cache_info().currsize]
    if not changed and not cached:
        return
    name, reads = type(watch.model).__name__, _Reads(calls_of)
    if changed and reads(lambda model: watch.outside.for_a_while()):
        raise SpecError(
            f"model {name} keeps in {changed[0]} what a call made of its weights, and reads it in later ones; that is "
            "shared by all copies of it, and comes back with no result: keep it in self"
        )
    if cached and reads(uncached):
        raise SpecError(
            f"model {name} reads {cached[0]} from a cache of functools, with what an earlier call made of other "
            "weights or draws; that is shared by all copies of it, and comes back with no result: keep it in self, or "
            "compute it without the cache"
        )


def _later(calls: Calls, forgetting: Forgetting) -> list[Tensor]:
    """Losses, gradients and logits at other weights, after calls at the first ones of which something is forgotten."""
    calls.train()
    calls.evaluate()
    with forgetting(calls.forward.model):
        return [*calls.train_elsewhere(), calls.evaluate_elsewhere()]


class _Reads:
    """Whether later calls give other numbers if something is forgotten; more than by adding up in another order."""

    def __init__(self, calls_of: Callable[[], Calls]) -> None:
        self._calls_of = calls_of
        self._expected = _later(calls_of(), _nothing)

    def __call__(self, forgetting: Forgetting) -> bool:
        off = self._off(forgetting)
        return not off <= REPEATED and not off <= NOISE * self._off(_nothing)

    def _off(self, forgetting: Forgetting) -> float:
        found = _later(self._calls_of(), forgetting)
        return max(apart(mine, true) for mine, true in zip(found, self._expected, strict=True))


def _nothing(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


OTHERS = "it gives other numbers when it is called again"


@dataclass(frozen=True)
class Trial:
    """One member alone: its loss, gradients ``[P]`` and logits ``[N, C]``, and how its module behaves.

    ``hidden_state``: why a second call differs from the first, or None; ``without_gradient``: names of parameters that
    the loss does not depend on; ``writes``: whether a call, or a hook in its backward pass, writes to the module's own
    weights; ``seconds``: of a training call and one in evaluation mode, if they were timed; ``unread``: places with
    tensors that calls leave and none reads; ``caches``: those that the first call fills and that depend on the graph
    alone; ``lost``: places that cannot be written down, which evaluations read if ``needs_lost``; ``branches``: whether
    calls read numbers into Python; ``changed_buffers``: names of those that calls change, in evaluation mode as well if
    ``changed_in_evaluation``.
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
    needs_lost: bool = False
    branches: bool = False
    changed_buffers: frozenset[str] = frozenset()
    changed_in_evaluation: bool = False


def try_again(calls: Calls) -> Trial:
    """One training call and one in evaluation mode of another member, timed; its module behaves as the first one's."""
    losses, grad = calls.train()
    logits = calls.evaluate()
    return Trial(losses, grad[0], logits, None, seconds=calls.seconds)


def try_alone(
    calls: Calls, untouched: nn.Module, elsewhere: Callable[[], Calls], outside: BeforeCalls, of_object: bool = False
) -> Trial:
    """Two training calls and one in evaluation mode of a copy of ``untouched``, all of them watched.

    A third training call follows if the one in evaluation mode kept tensors, which training might read. ``elsewhere``
    makes calls of another copy; ``outside``: what was outside of the model before any call; ``of_object``: the model
    is a copy of a user's object.
    """
    calls.forward.look_at_gradients()
    held = {*calls.forward.layout.names, *calls.state.buffers}
    keeping, watch = KeptState(calls.forward.model, held, untouched), Watch(calls.forward, calls.batch, held, outside)
    seen = _watched_calls(calls, watch)
    of_functions = watch.functions_changed()
    if seen.other:
        watch.check_shared([*outside.changed(), *(of_functions * of_object)])
    changing = [*changed(untouched, watch.model), *_frozen_changed(calls, watch), *of_functions]
    caches = [] if seen.other else _caches(watch, elsewhere, held)
    hidden = _hidden(watch, seen, changing, caches)
    _check_evaluation(calls, watch, seen, hidden)
    check_earlier_results(watch, elsewhere if hidden else lambda: calls)
    unread = [] if hidden or watch.branches else [name for name in watch.rewritten if name not in watch.read]
    lost = keeping.lost(untouched, changing) if hidden else []
    needs = bool(lost) and _differs_without(calls, elsewhere)
    kept = {"unread": tuple(unread), "caches": tuple(caches), "lost": tuple(lost)}
    return _trial(calls, watch, seen, hidden, kept, needs)


def _differs_without(calls: Calls, given_back: Callable[[], Calls]) -> bool:
    """Whether a module that is given back what can be written down evaluates to something else."""
    try:
        return differ([(calls.evaluate(), given_back().evaluate())])
    except Exception:  # a module may do anything without what it keeps
        return True


@dataclass(frozen=True)
class _Seen:
    """What watched calls gave; ``drawn``: from Python's or NumPy's generator, ``other``: not the same every time."""

    loss: Tensor
    grad: Tensor
    logits: Tensor
    drawn: bool
    other: bool


def _watched_calls(calls: Calls, watch: Watch) -> _Seen:
    with same_draws(calls.state.flat.device) as moved:
        with watch.call(training=True):
            first, grad = calls.step()
        drawn = moved()
    logits, twice = _called_again(calls, watch, first, grad)
    return _Seen(first, grad, logits, drawn, differ(twice))


def _trial(
    calls: Calls, watch: Watch, seen: _Seen, hidden: str | None, kept: Mapping[str, tuple[str, ...]], needs_lost: bool
) -> Trial:
    forward = calls.forward
    return Trial(
        *(seen.loss, seen.grad[0], seen.logits, hidden, forward.without_gradient or (), watch.writes.seen),
        **kept,
        needs_lost=needs_lost,
        branches=watch.branches,
        changed_buffers=frozenset(watch.changed_buffers | watch.changed_in_evaluation),
        changed_in_evaluation=bool(watch.changed_in_evaluation),
    )


def _called_again(
    calls: Calls, watch: Watch, first: Tensor, grad: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits of an evaluation, and what training calls before and after it gave, beside the first one."""
    with watch.call(training=True):
        second, again = calls.train()
    watch.changed_buffers |= calls.changed_buffers()
    twice, before = [(first, second), (grad, again)], watch.kept()
    with watch.call(training=False):
        logits = calls.evaluate()
    watch.changed_in_evaluation |= calls.changed_buffers()
    if watch.keeps_others_than(before):
        with watch.call(training=True):
            third, once_more = calls.train()
        twice += [(first, third), (grad, once_more)]
    return logits, twice


def _check_evaluation(calls: Calls, watch: Watch, seen: _Seen, hidden: str | None) -> None:
    """Refuse what is changed outside of the module if an evaluation gives other logits after a training elsewhere."""
    outside = watch.outside.changed()
    if hidden is None and outside:
        calls.train_elsewhere()
        if differ([(seen.logits, calls.evaluate())]):
            watch.check_shared(outside)


def _frozen_changed(calls: Calls, watch: Watch) -> list[str]:
    """Parameters that do not train and that calls change; those of a teacher may not move in a first step."""
    found = watch.frozen_changed()
    if watch.writes.seen:
        with shifted_frozen(watch.model) as shifted:
            calls.train()
            found += differing(shifted, frozen_state(watch.model))
    return found


def _caches(watch: Watch, elsewhere: Callable[[], Calls], held: set[str]) -> list[str]:
    """Places that the first call fills alike whatever the weights and the draws are."""
    if not watch.made:
        return []
    calls = elsewhere()
    calls.train_elsewhere()
    return alike(watch.model, calls.forward.model, held, watch.made)


def _hidden(watch: Watch, seen: _Seen, changing: Sequence[str], caches: Sequence[str]) -> str | None:
    """Why a call depends on earlier ones, in words; None if it does not."""
    registered = watch.registered()
    if registered:
        return f"it makes {registered[0]!r} when it is called, and not in its constructor"
    if changing:
        return f"it changes {changing[0]!r} from call to call, which is no buffer"
    read = [name for name in watch.read if name in watch.rewritten or (name in watch.made and name not in caches)]
    if not read and seen.other:  # torch does not say who reads the state of a generator
        read = watch.rewritten
    if read:
        return f"it reads {read[0]!r} of an earlier call, which is no buffer"
    if seen.drawn:
        return "it draws from Python's or NumPy's generator"
    return OTHERS if seen.other else None


def compare(trial: Trial, losses: Tensor, grad: Tensor, logits: Tensor, layout: Layout, near: float) -> bool:
    """Whether one member of a stack has the loss, the gradient of every parameter and the logits of its trial."""
    pairs = zip(layout.views(grad), layout.views(trial.grad), strict=True)
    parts = [apart(mine, true, trial.grad) for mine, true in pairs]
    worst = [apart(losses, trial.loss), apart(logits.float(), trial.logits.float()), *parts]
    return max(worst) <= near
