"""Convert the layers of PyG in a user's module before training, if the converted module gives the same numbers.

Attention that drops coefficients draws other masks when it is converted, so only who asks for it (``convert=True``)
gets it; it is then compared with its dropout off. Over sampled batches on a GPU nothing is converted either, unless
asked for: a converted layer sorts the edges of every batch, which takes longer than what it gains. Times do not decide:
two runs of one task would differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.nn.pyg.swap import Swaps, drawing, possible_swaps, swap
from weft.nn.pyg.templates import TEMPLATES
from weft.runtime.built_stacks import Converted
from weft.runtime.device.threads import step_seconds
from weft.runtime.user_modules.same_numbers import FLOOR, Measures, Numbers, Verdict, judge

OTHER_MASKS = " without dropout of attention, whose masks are not those of convert=False"
NONE = "it has no layers of PyG"
LONG = 0.2  # seconds: a first step that takes longer is not repeated for its time alone


@dataclass(frozen=True)
class Conversion:
    """Layers of a module that compute with Weft's operators, and what that gives.

    ``verdict``: how their numbers compare; ``before`` and ``after``: seconds of a training step and an evaluation;
    ``sparse``: whether features need not become dense; ``drawing``: whether layers among them drop coefficients of
    attention, which was off meanwhile. ``gpu``: whether these were times of a GPU, before anything is captured.
    """

    swaps: Swaps
    verdict: Verdict
    before: float
    after: float
    sparse: bool = False
    drawing: bool = False
    gpu: bool = False

    @property
    def decided(self) -> Converted:
        """What there is to do."""
        return Converted(self.swaps.layers, self.sparse, self.note())

    def note(self) -> str:
        """One sentence for the user."""
        masks = OTHER_MASKS if self.drawing else ""
        others = f"; kept: {_reasons(self.swaps.kept)}" if self.swaps.kept else ""
        when = ", neither captured," if self.gpu else ""
        sparse = ", features stay sparse" if self.sparse else ""
        return (
            f"converted: {self.swaps.counted()} of PyG compute with Weft's operators (convert=False keeps them): equal "
            f"to {self.verdict.apart:.0e} forward and gradient{masks}{self.verdict.words()}, {_ms(self.after)} per "
            f"step and evaluation{when} instead of {_ms(self.before)}{sparse}{others}"
        )


@dataclass(frozen=True)
class Trials:
    """How to try a module: ``copy`` it, and take a ``step`` with it at one of the weights nearby (0: its own).

    ``exact``: the same step in float64, which raises if there is none; ``measures``: how steps are compared.
    """

    copy: Callable[[nn.Module], nn.Module]
    step: Callable[[nn.Module, int], Numbers]
    measures: Measures
    exact: Callable[[nn.Module, int], Numbers] | None = None


def convertible(model: nn.Module, asked: bool = False) -> Swaps:
    """The layers of ``model`` that a run may convert; ``asked``: also those whose masks are then others."""
    return possible_swaps(model, draws=asked)


def kept_over_batches(model: nn.Module) -> str | None:
    """The note on layers that a run over sampled batches on a GPU leaves to PyG; None if there are none."""
    swaps = convertible(model)
    if not swaps.layers:
        return None
    # An H200, the arxiv shape, batches of 1,024: 0.71 to 0.93 times as fast (benchmarks/results/converted.json).
    return f"not converted: over sampled batches PyG's layers are faster (convert=True converts {swaps.counted()})"


def try_conversion(model: nn.Module, given: Trials, asked: bool = False) -> Conversion | str | None:
    """What to convert in ``model``, which is unchanged; or why nothing is, if that may surprise; or None.

    ``asked``: the user wants it, and hears of every layer that is kept.
    """
    swaps = convertible(model, asked)
    if not swaps.layers:
        if asked:
            return _why_not(swaps.kept) or f"not converted: {NONE}"
        return _why_not(_surprising(swaps.kept))
    drops = drawing(model, swaps.layers)
    trials = replace(given, copy=lambda one: _still(given.copy(one), drops))
    measured = _as_written(model, trials)
    if measured is None:
        return "not converted: the memory was not enough to compare with PyG's layers"
    before, true = measured
    try:
        swaps = _really_used(model, swaps, trials)
        if not swaps.layers:
            return _why_not(swaps.kept)
        after, mine = _timed(trials, _swapped(model, swaps, trials), warm=True)
        if drops:
            given.step(_swapped(model, swaps, given), 0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"not converted: with Weft's operators it fails ({type(error).__name__}: {error})"
    pyg, weft = _AtWeights(model, trials, None, true), _AtWeights(model, trials, swaps, mine)
    verdict = judge(pyg, weft, lambda point: _exact(model, trials, point), trials.measures)
    if not verdict.equal:
        off = f"by {verdict.apart:.0e} of the largest"
        return (
            f"not converted: {swaps.counted()} of PyG give other numbers with Weft's operators ({off}){verdict.words()}"
        )
    about: dict[str, Any] = {"drawing": any(name in swaps.layers for name in drops), "gpu": mine[0].is_cuda}
    return Conversion(swaps, verdict, before, after, **about)


class _AtWeights:
    """The numbers of a module at weights nearby, with PyG's layers or with ``swaps``; the ``first`` may be known."""

    def __init__(self, model: nn.Module, trials: Trials, swaps: Swaps | None, first: Numbers | None) -> None:
        self._model, self._trials, self._swaps, self._first = model, trials, swaps, first

    def __call__(self, point: int) -> Numbers:
        if point == 0 and self._first is not None:
            first, self._first = self._first, None  # asked for once more, it is computed again
            return first
        if self._swaps is not None:
            return self._trials.step(_swapped(self._model, self._swaps, self._trials), point)
        return self._trials.step(self._trials.copy(self._model), point)


def _exact(model: nn.Module, trials: Trials, point: int) -> Numbers | None:
    """The numbers in float64; None if the module does not compute in it, or if that does not fit into memory."""
    if trials.exact is None:
        return None
    try:
        found = trials.exact(trials.copy(model), point)
    except Exception:  # types that its author wrote down, operators without float64, memory
        found = None
    _empty_cache()
    return found


def _still(model: nn.Module, drops: Collection[str]) -> nn.Module:
    """``model``, whose layers ``drops`` drop nothing."""
    for name in drops:
        model.get_submodule(name).dropout = 0.0
    return model


def _surprising(kept: dict[str, str]) -> dict[str, str]:
    """Layers of kinds that Weft does have operators for."""
    return {name: why for name, why in kept.items() if why.split(":")[0] in TEMPLATES}


def _as_written(model: nn.Module, trials: Trials) -> tuple[float, Numbers] | None:
    """Seconds and numbers with PyG's layers; None if these do not fit into memory, where Weft's still may."""
    try:
        measured = _timed(trials, trials.copy(model))
    except torch.OutOfMemoryError:
        measured = None
    _empty_cache()
    return measured


def _empty_cache() -> None:
    """Give back what PyG's layers took, or float64: it is not needed again, and only now no frame holds it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def try_sparse(model: nn.Module, found: Conversion, dense: Trials, sparse: Trials) -> Conversion:
    """``found``, with sparse features if the converted module takes them and gives the same numbers."""
    drops = drawing(model, found.swaps.layers)
    dense, sparse = (
        replace(one, copy=lambda model, copied=one.copy: _still(copied(model), drops)) for one in (dense, sparse)
    )
    try:
        after, mine = _timed(sparse, _swapped(model, found.swaps, sparse), warm=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it computes with the features itself: they become dense, as before
        return found
    apart = max(dense.measures.errors(mine, dense.step(_swapped(model, found.swaps, dense), 0)))
    if apart > FLOOR:
        pyg, weft = _AtWeights(model, dense, None, None), _AtWeights(model, sparse, found.swaps, mine)
        verdict = judge(pyg, weft, lambda point: _exact(model, dense, point), dense.measures)
        if not verdict.equal:
            return found
        found = replace(found, verdict=verdict)
    return replace(found, after=after, sparse=True)


def convert(model: nn.Module, layers: Collection[str]) -> None:
    """Convert those layers of ``model`` in place."""
    if layers:
        swap(model, layers, builds=False)


def _swapped(model: nn.Module, swaps: Swaps, trials: Trials) -> nn.Module:
    copied = trials.copy(model)
    convert(copied, swaps.layers)
    return copied


def _really_used(model: nn.Module, swaps: Swaps, trials: Trials) -> Swaps:
    """Those layers all of whose calls Weft's operators cover: the arguments of a call decide that."""
    from weft.nn.pyg.swapped_layers import recorded_calls

    copied = _swapped(model, swaps, trials)
    with recorded_calls() as calls:
        trials.step(copied, 0)
    layers: dict[str, str] = {}
    kept = dict(swaps.kept)
    for name, kind in swaps.layers.items():
        covered = calls.get(id(copied.get_submodule(name)))
        if covered:
            layers[name] = kind
        elif covered is not None:
            kept[name] = f"{kind}: it is called with other edges than the graph's, or with more than x and edges"
    return Swaps(layers, kept)


def _timed(trials: Trials, model: nn.Module, warm: bool = False) -> tuple[float, Numbers]:
    """Seconds of one step, and its numbers; the second step of two, if they are short or ``warm``."""
    seconds, numbers = _one(trials, model)
    if warm or seconds < LONG:
        seconds, _ = _one(trials, model)
    return seconds, numbers


def _one(trials: Trials, model: nn.Module) -> tuple[float, Numbers]:
    """Seconds of a step, and its numbers."""
    begin = step_seconds()
    numbers = trials.step(model, 0)
    if numbers[0].is_cuda:
        torch.cuda.synchronize(numbers[0].device)
    return step_seconds() - begin, numbers


def _why_not(kept: dict[str, Any]) -> str | None:
    return f"not converted: {_reasons(kept)}" if kept else None


def _reasons(kept: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(kept.values()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
