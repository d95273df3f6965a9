"""Refuse modules whose calls read what earlier calls made of other weights, and left outside of the module.

A global table, or a cache of ``functools``, may hold what depends on the graph alone: then it does no harm. What was
made of the weights is shared with copies that have others, and is neither resumed nor given back with the best ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.step.members.calls import Calls
from weft.runtime.step.members.comparing import differ
from weft.runtime.step.members.outside import cache_of, caches, uncached
from weft.runtime.step.members.watching import Watch

Forgetting = Callable[[nn.Module], AbstractContextManager[None]]


def check_earlier_results(watch: Watch, calls_of: Callable[[], Calls]) -> None:
    """A :class:`SpecError` if calls read from outside what earlier ones left.

    ``calls_of`` makes calls of a module as it was, each time one that keeps the same.
    """
    changed = watch.outside.changed()
    cached = [one.name for one in caches(watch.model) if cache_of(one.value).cache_info().currsize]
    if not changed and not cached:
        return
    expected = _later(calls_of(), lambda model: nullcontext())
    name = type(watch.model).__name__
    if changed and _differ(expected, _later(calls_of(), lambda model: watch.outside.for_a_while())):
        raise SpecError(
            f"model {name} keeps in {changed[0]} what a call made of its weights, and reads it in later ones; that is "
            "shared by all copies of it, and comes back with no result: keep it in self"
        )
    if cached and _differ(expected, _later(calls_of(), uncached)):
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


def _differ(expected: list[Tensor], found: list[Tensor]) -> bool:
    return differ(list(zip(expected, found, strict=True)))
