"""Callback: a user's function that is called after stated epochs and may end a task or change its learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings.field_rule import is_reference


@dataclass(frozen=True)
class Callback:
    """Calls ``call(moment)`` after every ``every``-th epoch, and after the epochs ``at`` (counted from 1).

    ``call``: a function that takes a :class:`Moment`, or ``"file.py:function"``.
    """

    call: Any
    every: int | None = None
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.call) and not is_reference(self.call):
            raise SpecError(f'Callback: call={self.call!r} must be a function of a moment, or "file.py:function"')
        at = (self.at,) if isinstance(self.at, int) else tuple(self.at)
        for name, value in [("every", self.every), *(("at", epoch) for epoch in at)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SpecError(f"Callback: {name}={value!r} must be a number of epochs, at least 1")
        if self.every is None and not at:
            raise SpecError("Callback: say when, with every=10 or at=[5, 20]")
        object.__setattr__(self, "at", at)

    def is_due(self, epoch: int) -> bool:
        """Whether it is called after ``epoch`` (counted from 1)."""
        return epoch in self.at or (self.every is not None and epoch % self.every == 0)

    def next_after(self, epoch: int) -> int | None:
        """The next epoch after which it is called; None if there is none."""
        found = [each for each in self.at if each > epoch]
        found += [] if self.every is None else [(epoch // self.every + 1) * self.every]
        return min(found, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a function becomes a description of it."""
        call = (
            self.call if isinstance(self.call, str) else f"<{getattr(self.call, '__name__', type(self.call).__name__)}>"
        )
        return {"call": call, "every": self.every, "at": list(self.at)}


@dataclass
class Moment:
    """A task after one of its epochs, as a callback sees it.

    ``task``: its name; ``epoch``: counted from 1; ``history``: a list per column, NaN where nothing was measured.
    :meth:`stop` ends the task here, :meth:`scale_lr` changes its rate from the next step on.
    """

    task: str
    epoch: int
    history: Mapping[str, Sequence[float]]
    factor: float = field(default=1.0, init=False)
    reason: str | None = field(default=None, init=False)

    def __getitem__(self, column: str) -> float:
        """What was measured last in a column, such as ``"val_loss"``."""
        if column not in self.history:
            raise SpecError(f"a callback reads {column!r}; the columns are {', '.join(self.history)}")
        return self.history[column][-1]

    def stop(self, reason: str = "") -> None:
        """End the task after this epoch; ``reason`` is shown with it."""
        self.reason = str(reason)

    def scale_lr(self, factor: float) -> None:
        """Multiply the rate of every later step by ``factor``."""
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 <= factor < float("inf"):
            raise SpecError(f"scale_lr({factor!r}): the factor must be a number, at least 0")
        self.factor *= factor


def read_callbacks(label: str, value: Any) -> tuple[Callback, ...]:
    """``callbacks=``: one :class:`Callback` or several, or tables of a spec file that say the same."""
    if value is None:
        return ()
    several = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_read(label, one) for one in several)


def _read(label: str, value: Any) -> Callback:
    if isinstance(value, Callback):
        return value
    if isinstance(value, Mapping) and set(value) <= {"call", "every", "at"} and "call" in value:
        return Callback(**value)
    raise SpecError(
        f"task {label!r}: callbacks has {value!r}; expected weft.Callback(function, every=10), or in a spec file "
        '{ call = "file.py:function", every = 10 }'
    )
