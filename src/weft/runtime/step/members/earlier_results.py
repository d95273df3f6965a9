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
from weft.runtime.step.members.comparing import REPEATED, apart
from weft.runtime.step.members.outside import cache_of, caches, uncached
from weft.runtime.step.members.watching import Watch

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
