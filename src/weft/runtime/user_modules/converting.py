"""Convert the layers of PyG in a user's module before training, if the converted module gives the same numbers.

Attention that drops coefficients draws other masks when it is converted, so only who asks for it (``convert=True``)
gets it; it is then compared with its dropout off. The decision rests on the numbers alone and never on the measured
times: the same run converts the same layers again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.pyg.swap import Swaps, drawing, possible_swaps, swap
from weft.nn.pyg.templates import TEMPLATES

Numbers = tuple[Tensor, Tensor, Tensor]  # losses [1], gradients [P], logits [N, C]
OTHER_MASKS = " without dropout of attention, whose masks are not those of convert=False"
NONE = "it has no layers of PyG"
NOISE_FACTOR = 2  # up to twice PyG's own difference between two calls counts as equal
LONG = 0.2  # seconds: a first step that takes longer is not repeated for its time alone


@dataclass(frozen=True)
class Conversion:
    """Layers of a module that compute with Weft's operators, and what that gives.

    ``apart``: the largest difference of loss, gradients and logits, relative to the largest of each; ``before`` and
    ``after``: seconds of a training step and an evaluation; ``sparse``: whether features need not become dense;
    ``drawing``: whether layers among them drop coefficients of attention, which was off meanwhile. ``noise``: how far
    PyG's layers are apart from themselves, called again; 0 where that does not matter. ``gpu``: whether these were
    times of a GPU, before anything is captured.
    """

    swaps: Swaps
    apart: float
    before: float
    after: float
    sparse: bool = False
    drawing: bool = False
    noise: float = 0.0
    gpu: bool = False

    def note(self) -> str:
        """One sentence for the user."""
        masks = OTHER_MASKS if self.drawing else ""
        others = f"; kept: {_reasons(self.swaps.kept)}" if self.swaps.kept else ""
        again = f" (PyG's differ by {self.noise:.0e} from call to call)" if self.noise else ""
        when = ", neither captured," if self.gpu else ""
        return (
            f"converted: {self.swaps.counted()} of PyG compute with Weft's operators (convert=False keeps them): equal "
            f"to {self.apart:.0e} forward and gradient{masks}{again}, {_ms(self.after)} per step and evaluation{when} "
            f"instead of {_ms(self.before)}{', features stay sparse' if self.sparse else ''}{others}"
        )


@dataclass(frozen=True)
class Trials:
    """How to try a module: ``copy`` it, take a ``step`` with it, tell how far ``apart`` two steps are.

    ``near``: how far they may be; ``most``: if PyG's own sums come out differently in every call, as by atomics.
    """

    copy: Callable[[nn.Module], nn.Module]
    step: Callable[[nn.Module], Numbers]
    apart: Callable[[Numbers, Numbers], float]
    near: float
    most: float


def convertible(model: nn.Module, asked: bool = False) -> Swaps:
    """The layers of ``model`` that a run may convert; ``asked``: also those whose masks are then others."""
    return possible_swaps(model, draws=asked)


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
            given.step(_swapped(model, swaps, given))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"not converted: with Weft's operators it fails ({type(error).__name__}: {error})"
    apart, noise = trials.apart(mine, true), 0.0
    if not apart <= trials.near:
        again = _as_written(model, trials)
        noise = 0.0 if again is None else trials.apart(again[1], true)
    if not apart <= max(trials.near, min(NOISE_FACTOR * noise, trials.most)):
        off = f"by {apart:.0e} of the largest"
        return f"not converted: {swaps.counted()} of PyG give other numbers with Weft's operators ({off})"
    about: dict[str, Any] = {"drawing": any(name in swaps.layers for name in drops), "gpu": mine[0].is_cuda}
    return Conversion(swaps, apart, before, after, noise=noise, **about)


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
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what PyG's layers took is not needed again; only now no frame holds it
    return measured


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
    apart = max(found.apart, dense.apart(mine, dense.step(_swapped(model, found.swaps, dense))))
    near = max(dense.near, min(NOISE_FACTOR * found.noise, dense.most))
    return replace(found, apart=apart, after=after, sparse=True) if apart <= near else found


def convert(model: nn.Module, swaps: Swaps) -> None:
    """Convert those layers of ``model`` in place."""
    swap(model, swaps.layers, builds=False)


def _swapped(model: nn.Module, swaps: Swaps, trials: Trials) -> nn.Module:
    copied = trials.copy(model)
    convert(copied, swaps)
    return copied


def _really_used(model: nn.Module, swaps: Swaps, trials: Trials) -> Swaps:
    """Those layers all of whose calls Weft's operators cover: the arguments of a call decide that."""
    from weft.nn.pyg.swapped_layers import recorded_calls

    copied = _swapped(model, swaps, trials)
    with recorded_calls() as calls:
        trials.step(copied)
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
    begin = perf_counter()
    numbers = _waited(trials.step(model))
    seconds = perf_counter() - begin
    if warm or seconds < LONG:
        begin = perf_counter()
        _waited(trials.step(model))
        seconds = perf_counter() - begin
    return seconds, numbers


def _waited(numbers: Numbers) -> Numbers:
    if numbers[0].is_cuda:
        torch.cuda.synchronize(numbers[0].device)
    return numbers


def _why_not(kept: dict[str, Any]) -> str | None:
    return f"not converted: {_reasons(kept)}" if kept else None


def _reasons(kept: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(kept.values()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"
