"""Convert the layers of PyG in a user's module before training, if the converted module gives the same numbers.

Attention that drops coefficients draws other masks when it is converted, so only who asks for it (``convert=True``)
gets it; it is then compared with its dropout off. Over sampled batches on a GPU nothing is converted either, unless
asked for: a converted layer sorts the edges of every batch, which takes longer than what it gains. Times do not decide:
two runs of one task would differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.nn.pyg.convert import Swaps, drawing, possible_swaps, swap
from weft.nn.pyg.layers import TEMPLATES
from weft.runtime.device.process import step_seconds

# ---- Decide whether converted layers give PyG's numbers: both are compared with the same module in float64.
#
# Two ways to add up the same terms differ, and how much one of them varies from call to call says little of how far
# either is from the truth. So the question is whether Weft's float32 is further from float64 than PyG's float32 is:
#
#     error(Weft) <= max(2 error(PyG), 1e-5)        for the loss, the logits and the gradient of every parameter
#
# The error of a tensor is its largest difference relative to its own largest number. A gradient may be zero but for
# rounding, as that of a bias before a batch norm: its terms are as large as others', so that its error is taken
# relative
# to a tenth of the largest gradient of all if that is more. 1e-6 of the largest gradient is what such sums were off
# by,
# with PyG and with Weft, on graphs of 10^4 to 10^6 edges.
#
# A gradient jumps where a rounding error moves the input of a ReLU across zero. On 10^5 nodes there is a handful of
# those, 1e-4 of the largest each, and PyG has them in other places than Weft. With other weights they are elsewhere,
# whereas a wrong layer stays wrong. So a module that fails is tried again with weights that are 1 % off, and each
# tensor
# counts with Weft's least error and PyG's largest.

Numbers = tuple[Tensor, Tensor, Tensor]  # losses [1], gradients [P], logits [N, C]
T = TypeVar("T")
Step = Callable[[int], Numbers]  # at the weights of the first epoch (0), or at other ones nearby (1, 2, ...)
FACTOR = 2  # up to twice PyG's own error, or its own difference between two calls, counts as equal
FLOOR = 1e-5  # of the largest: errors below count as equal
OF_ALL = 0.1  # a gradient is compared with at least so much of the largest gradient of all
POINTS = 6  # weights to try


@dataclass(frozen=True)
class Measures:
    """How numbers are compared.

    ``errors(mine, true)``: per tensor, see above; ``apart(mine, true)``: the largest difference where there is no
    reference, which may be ``near``, or up to ``most`` if PyG's own sums come out differently in every call.
    ``blind(true)``: whether a gradient is zero as a whole, behind a weight that is: then equal ones say nothing.
    """

    errors: Callable[[Numbers, Numbers], list[float]]
    apart: Callable[[Numbers, Numbers], float]
    near: float
    most: float
    blind: Callable[[Numbers], bool] = lambda true: False


@dataclass(frozen=True)
class Verdict:
    """Whether the numbers are ``equal``, and how far they are ``apart``.

    ``mine`` and ``own``: Weft's and PyG's errors, both None without a reference; ``noise``: how far PyG's layers are
    from themselves, called again; 0 if that does not matter.
    """

    equal: bool
    apart: float
    mine: float | None = None
    own: float | None = None
    noise: float = 0.0

    def words(self) -> str:
        """What the verdict rests on, for a note; empty if the numbers are the same anyway."""
        if self.mine is not None:
            return f" (Weft's differ by {self.mine:.0e} from float64, PyG's own by {self.own:.0e})"
        return f" (PyG's differ by {self.noise:.0e} from call to call)" if self.noise else ""


def judge(pyg: Step, weft: Step, exact: Callable[[int], Numbers | None], measures: Measures) -> Verdict:
    """Compare ``weft`` with ``pyg``; ``exact`` is the latter in float64, None where there is no such thing."""
    true, mine = pyg(0), weft(0)
    if measures.blind(true):
        pyg, weft, exact = _later(pyg), _later(weft), _later(exact)
        true, mine = pyg(0), weft(0)
    apart = max(measures.errors(mine, true))
    if apart <= FLOOR / 2:  # then the condition holds whatever the reference is: error(Weft) <= error(PyG) + FLOOR / 2
        return Verdict(True, apart)
    found = _by_reference(pyg, weft, exact, measures, (true, mine))
    return found if found is not None else _by_noise(pyg, measures, true, mine)


def _later(step: Callable[[int], T]) -> Callable[[int], T]:
    """The same from the second weights on."""
    return lambda point: step(point + 1)


def _by_reference(
    pyg: Step, weft: Step, exact: Callable[[int], Numbers | None], measures: Measures, first: tuple[Numbers, Numbers]
) -> Verdict | None:
    """The verdict by float64; None without it, or where PyG's float32 is not near it at any weights."""
    best: list[float] = []
    worst: list[float] = []
    apart = max(measures.errors(first[1], first[0]))
    for point in range(POINTS):
        reference = exact(point)
        if reference is None:
            return None
        true, mine = first if point == 0 else (pyg(point), weft(point))
        own, errors = measures.errors(true, reference), measures.errors(mine, reference)
        del reference, true, mine
        if not max(own) <= measures.most:  # not the same function in float64, or one that float32 does not compute
            continue
        best = list(map(min, best, errors)) if best else errors
        worst = list(map(max, worst, own)) if worst else own
        if all(one <= max(min(FACTOR * other, measures.most), FLOOR) for one, other in zip(best, worst, strict=True)):
            return Verdict(True, apart, max(best), max(worst))
    return Verdict(False, apart, max(best), max(worst)) if best else None


def _by_noise(pyg: Step, measures: Measures, true: Numbers, mine: Numbers) -> Verdict:
    """The verdict without float64: by how much PyG's numbers differ from call to call."""
    apart, noise = measures.apart(mine, true), 0.0
    if not apart <= measures.near:
        noise = measures.apart(pyg(0), true)
    return Verdict(apart <= max(measures.near, min(FACTOR * noise, measures.most)), apart, noise=noise)


# ---- What was decided of the stacks of a group before its first epoch, as a checkpoint holds it.
#
# Decided anew it might be something else: how much memory is free, and how sums by atomics are rounded, differ from
# process to process. A run that is resumed takes over the decisions of the first one, and so trains the same numbers.

STACKS = "stacks"  # the name in a checkpoint


@dataclass(frozen=True)
class Converted:
    """The ``layers`` of PyG in a module that compute with Weft's operators: names with kinds, none if none do.

    ``sparse``: whether features need not become dense. ``note``: what the user was told.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"layers": dict(self.layers), "sparse": self.sparse, "note": self.note}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Converted:
        """The inverse of :meth:`to_dict`."""
        return cls(dict(data["layers"]), bool(data["sparse"]), data["note"])


@dataclass(frozen=True)
class BuiltStack:
    """Tasks that train in one step: ``members``, their places among the tasks of the group, row by row.

    ``converted``: None if nothing was tried, as for built-in models and over ranks.
    """

    members: tuple[int, ...]
    converted: Converted | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        converted = None if self.converted is None else self.converted.to_dict()
        return {"members": list(self.members), "converted": converted}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuiltStack:
        """The inverse of :meth:`to_dict`."""
        converted = data.get("converted")
        return cls(tuple(data["members"]), None if converted is None else Converted.from_dict(converted))


def stacks_of(about: Mapping[str, Any]) -> tuple[BuiltStack, ...]:
    """Those that a checkpoint holds; none in one that is older than they are."""
    return tuple(BuiltStack.from_dict(one) for one in about.get(STACKS, ()))


def described(stacks: Sequence[BuiltStack]) -> dict[str, Any]:
    """The inverse of :func:`stacks_of`: an entry of what a checkpoint holds."""
    return {STACKS: [one.to_dict() for one in stacks]}


def stack_of_one(about: Mapping[str, Any], member: int) -> dict[str, Any]:
    """The same entry for a member of the group that goes on alone; empty if there is none."""
    found = [BuiltStack((0,), one.converted) for one in stacks_of(about) if member in one.members]
    return described(found) if found else {}


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
