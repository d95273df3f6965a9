"""Trial: call a user's module before the first epoch as a plain loop of torch would, and see how it behaves.

The calls go to a copy, so that the first epoch finds the module and all generators as they were. What a stack, a
CUDA graph or a compiled step gives is then compared with it: users' modules train as written, or not that way.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.runtime.device.torch_rng import same_draws
from weft.runtime.step.members.calls import Calls
from weft.runtime.step.members.comparing import apart, differ
from weft.runtime.step.members.earlier_results import check_earlier_results
from weft.runtime.step.members.kept_elsewhere import BeforeCalls, differing, frozen_state, shifted_frozen
from weft.runtime.step.members.watching import Watch
from weft.runtime.step.parameters import Layout
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
