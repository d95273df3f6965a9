"""Decide whether converted layers give PyG's numbers: both are compared with the same module in float64.

Two ways to add up the same terms differ, and how much one of them varies from call to call says little of how far
either is from the truth. So the question is whether Weft's float32 is further from float64 than PyG's float32 is:

    error(Weft) <= max(2 error(PyG), 1e-5)        for the loss, the logits and the gradient of every parameter

The error of a tensor is its largest difference relative to its own largest number. A gradient may be zero but for
rounding, as that of a bias before a batch norm: its terms are as large as others', so that its error is taken relative
to a tenth of the largest gradient of all if that is more. 1e-6 of the largest gradient is what such sums were off by,
with PyG and with Weft, on graphs of 10^4 to 10^6 edges.

A gradient jumps where a rounding error moves the input of a ReLU across zero. On 10^5 nodes there is a handful of
those, 1e-4 of the largest each, and PyG has them in other places than Weft. With other weights they are elsewhere,
whereas a wrong layer stays wrong. So a module that fails is tried again with weights that are 1 % off, and each tensor
counts with Weft's least error and PyG's largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

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
