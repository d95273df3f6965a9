"""Ranges to draw settings from in a random search; a draw is a pure function of a number in [0, 1)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from weft.core.errors import SpecError


@dataclass(frozen=True)
class Range:
    """A setting drawn between ``low`` and ``high``: evenly, or evenly in the logarithm (``log``).

    A setting that is a whole number is rounded to one, both ends included; ``step`` rounds to its multiples
    counted from ``low`` (``uniform(16, 128, step=16)``).
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        for end in (self.low, self.high):
            if not isinstance(end, Real) or isinstance(end, bool) or not math.isfinite(end):
                raise SpecError(f"{self}: {end!r} must be a finite number")
        if self.low >= self.high:
            raise SpecError(f"{self}: the first number must be below the second")
        if self.log and self.low <= 0:
            raise SpecError(f"{self}: a logarithm needs numbers above 0; use uniform, or a higher first number")
        if self.step is not None and not (isinstance(self.step, Real) and self.step > 0):
            raise SpecError(f"{self}: step={self.step!r} must be a number above 0")
        if self.step is not None and self.step > self.high - self.low:
            raise SpecError(
                f"{self}: step={self.step!r} leads out of the range; only {_plain(self.low)} would be drawn"
            )

    def __str__(self) -> str:
        step = "" if self.step is None else f", step={_plain(self.step)}"
        return f"{'loguniform' if self.log else 'uniform'}({_plain(self.low)}, {_plain(self.high)}{step})"

    def at(self, share: float, whole: bool) -> float | int:
        """The value at ``share`` in [0, 1) of the range; ``whole`` numbers are equally likely, ends included."""
        step = self.step or (1 if whole else None)
        if step is None:
            return float(min(max(self._between(self.low, self.high, share), self.low), self.high))  # rounding
        # Half a step more on either side, so that the first and the last value are as likely as the others.
        low, high = max(self.low - step / 2, self.low / 2 if self.log else -math.inf), self.high + step / 2
        steps = math.floor((self._between(low, high, share) - self.low) / step + 0.5)
        value = self.low + step * min(max(steps, 0), math.floor((self.high - self.low) / step + 1e-9))
        return round(value) if whole else value

    def listed(self, whole: bool, most: int) -> list[float | int]:
        """Every value that :meth:`at` may give, in order; none if they are more than ``most`` or have no step."""
        step = self.step or (1 if whole else None)
        count = most + 1 if step is None else 1 + math.floor((self.high - self.low) / step + 1e-9)
        values = [self.low + step * number for number in range(count)] if step and count <= most else []
        return [round(value) if whole else value for value in values]

    def _between(self, low: float, high: float, share: float) -> float:
        if self.log:
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return low + share * (high - low)

    def to_dict(self) -> dict[str, Any]:
        """``{"uniform": [low, high]}``, the form of a spec file."""
        ends = [self.low, self.high] + ([] if self.step is None else [self.step])
        return {"loguniform" if self.log else "uniform": ends}


@dataclass(frozen=True)
class Choice:
    """A setting drawn from ``values``, all equally likely."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise SpecError("choice([]): at least one value is needed")

    def __str__(self) -> str:
        return f"choice({list(self.values)!r})"

    def at(self, share: float, whole: bool) -> Any:
        """The value at ``share`` in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    def to_dict(self) -> dict[str, Any]:
        """``{"choice": [...]}``, the form of a spec file."""
        return {"choice": list(self.values)}


@dataclass(frozen=True)
class Branch:
    """Settings that belong together: those with one value, and those that are drawn."""

    fixed: Mapping[str, Any]
    varying: Mapping[str, Range | Choice]


@dataclass(frozen=True)
class Space:
    """What the trials of a tuner are drawn from: one of ``branches``, then every setting that varies in it.

    ``whole``: settings that are whole numbers. Arguments of a model are called ``model_args.NAME``.
    """

    branches: tuple[Branch, ...]
    whole: frozenset[str] = frozenset()

    def draw(self, key: str) -> dict[str, Any]:
        """Settings for ``key``: the same for the same key; every setting has a stream of its own."""
        branch = self.branches[0]
        if len(self.branches) > 1:
            branch = self.branches[random.Random(key).randrange(len(self.branches))]
        drawn = {
            name: source.at(random.Random(f"{key}/{name}").random(), name in self.whole)
            for name, source in branch.varying.items()
        }
        return {**branch.fixed, **drawn}

    def ranges(self, settings: Mapping[str, Any]) -> dict[str, Range]:
        """The settings among ``settings`` that are drawn from ranges in their branch."""
        for branch in self.branches:
            names = {*branch.fixed, *branch.varying}
            if names == settings.keys() and all(settings[name] == value for name, value in branch.fixed.items()):
                return {name: source for name, source in branch.varying.items() if isinstance(source, Range)}
        return {}


def uniform(low: float, high: float, *, step: float | None = None) -> Range:
    """A setting of a :class:`Sweep` drawn evenly from ``low`` to ``high``, in multiples of ``step`` if given."""
    return Range(low, high, step=step)


def loguniform(low: float, high: float) -> Range:
    """A setting of a :class:`Sweep` drawn evenly in the logarithm, as suits learning rates and weight decay."""
    return Range(low, high, log=True)


def choice(values: Sequence[Any]) -> Choice:
    """A setting of a :class:`Sweep` drawn from a list, all values equally likely."""
    if isinstance(values, str) or not isinstance(values, (Sequence, range)):
        raise SpecError(f"choice({values!r}): expected a list of values")
    return Choice(tuple(values))


def from_table(name: str, table: Mapping[str, Any]) -> Range | Choice:
    """What ``{ loguniform = [1e-4, 1e-1] }`` of a spec file says about setting ``name``."""
    kinds = ("uniform", "loguniform", "choice")
    if len(table) != 1 or next(iter(table)) not in kinds:
        raise SpecError(
            f"{name} = {dict(table)!r}: expected one of {', '.join(kinds)}, such as {name} = {{ uniform = [0, 1] }}"
        )
    ((kind, values),) = table.items()
    if kind == "choice":
        return choice(values)
    most = 3 if kind == "uniform" else 2
    if not isinstance(values, (list, tuple)) or not 2 <= len(values) <= most:
        extra = " (and a step, if wanted)" if kind == "uniform" else ""
        raise SpecError(f"{name} = {{ {kind} = {values!r} }}: expected the two ends of the range{extra}")
    return Range(values[0], values[1], kind == "loguniform", values[2] if len(values) > 2 else None)


def _plain(number: Any) -> str:
    return f"{number:g}" if isinstance(number, Real) else repr(number)
