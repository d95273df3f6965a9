"""Tuners: choose the trials of a search, and which of them end early.

A run with a tuner trains ``width`` trials at once, each in a row of a stack, and starts another in a row that becomes
free. It calls ``ask`` for the settings of new trials, ``report`` for every evaluated epoch of every trial, ``stop`` for
the trials to end now, and ``tell`` when a trial has ended. Tuners read no clock and draw from generators of their own,
so that a run can be repeated, and resumed by calling a new tuner in the same way again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from weft.core.compatibility import MEMBER_NUMBERS
from weft.core.errors import SpecError
from weft.core.plugins import blame_plugin, load_plugin, plugin_names
from weft.core.run_options import TUNERS
from weft.core.search_space import Space
from weft.core.settings import Rule, identity
from weft.core.wording import did_you_mean

SCORE = "score"  # in what is reported: the validation metric, of an error its negative
PARENT = "parent"  # in settings: the running trial whose weights, moments and buffers the new one continues with
REDRAWS = 50  # attempts at settings that were not tried before
RUNG_SHARE = 27  # of the epochs: the first rung, if no grace period is given


@dataclass(frozen=True)
class Search:
    """What a tuner chooses in: the ``space``, how many ``trials``, their ``epochs`` at most, ``width`` at once.

    ``metric``: the column that the score is of. ``need``: the predicted bytes of a trial with some settings by itself,
    of ``budget``; None for settings that no model takes together. ``run``: names a run that can be resumed, whose
    trials a tuner with a storage finds there again.
    """

    space: Space
    trials: int
    epochs: int
    width: int
    metric: str = "val_accuracy"
    need: Callable[[Mapping[str, Any]], int | None] = lambda settings: 0
    budget: int = 1
    run: str = ""


class Tuner:
    """Random search, and the protocol of all tuners: a tuner of your own has these four methods, or inherits them.

    Trials are called ``trial-000``, ``trial-001``, ... in the order in which ``ask`` returns their settings. ``every``:
    epochs between two calls of ``stop`` and ``ask`` (1 for a tuner without it). ``begin`` is called once, before the
    first ``ask``, and ``end(resumable)`` once when the run ends, if there are such methods. ``seed``: of the draws.
    ``copies``: whether it asks for trials that continue with the weights of others; they do not count as trials, so
    that ``n`` is then the number of free rows.
    """

    every: int = 10
    copies: bool = False

    def __init__(self, seed: int = 0) -> None:
        self.seed, self._draws, self._names = _checked("seed", seed, int, low=0), 0, 0
        self._settings: dict[str, dict[str, Any]] = {}
        self._tried: set[Any] = set()

    @classmethod
    def of(cls, name: str, **settings: Any) -> Tuner:
        """The tuner called ``name``, built in or a plug-in: ``Tuner.of("asha", eta=4)``.

        An unknown name or setting is refused.
        """
        make: Callable[..., Tuner] | None = BUILT_IN.get(name) or load_plugin("tuners", name)
        if make is None:
            names = (*TUNERS, *plugin_names("tuners"))
            hint = did_you_mean(str(name), names) or f"it must be one of {', '.join(names)}"
            raise SpecError(f"tuner={name!r} is not known; {hint}")
        allowed = list(signature(make).parameters)
        for key in settings:
            if key not in allowed:
                raise SpecError(f"tuner {name!r} has no setting {key!r}; it has {', '.join(allowed)}")
        if name in BUILT_IN:
            return make(**settings)
        with blame_plugin("tuners", name):
            return make(**settings)

    def begin(self, search: Search) -> None:
        """Learn what to choose in."""
        self.search = search
        if type(self) is Tuner:  # nothing is decided on the way, but a row should be free when its trial ends
            self.every = next((step for step in range(10, 4, -1) if search.epochs % step == 0), self.every)

    def ask(self, n: int) -> list[dict[str, Any]]:
        """The settings of up to ``n`` new trials. None while none runs ends the search.

        Settings with a ``"parent"``, the name of a trial that runs, continue with a copy of its weights, moments and
        buffers at its epoch.
        """
        drawn = (self.draw() for _ in range(n))
        return [self.named(settings) for settings in drawn if settings is not None]

    def report(self, name: str, epoch: int, row: Mapping[str, float]) -> None:
        """What trial ``name`` measured at ``epoch`` (from 1), by column, with its ``"score"``: more is better."""

    def stop(self) -> Iterable[str]:
        """The names of running trials to end now."""
        return []

    def tell(self, name: str, summary: Mapping[str, Any]) -> None:
        """A trial has ended: its ``status``, ``epochs``, best ``score`` (None: none) and ``metrics``."""

    def draw(self) -> dict[str, Any] | None:
        """Settings that were not drawn before; None if there are no others, or none were found."""
        for _ in range(REDRAWS):
            self._draws += 1
            settings = self.search.space.draw(f"{self.seed}/{self._draws}")
            key = identity(tuple(settings.items()))
            need = None if key in self._tried else self.search.need(settings)
            if need is not None and need <= self.search.budget:
                self._tried.add(key)
                return settings
        return None

    def named(self, settings: dict[str, Any]) -> dict[str, Any]:
        """``settings``, remembered under the name that their trial gets."""
        self._settings[trial_name(self._names)] = settings
        self._names += 1
        return settings


def trial_name(number: int) -> str:
    """What the trial asked for as number ``number``, from 0, is called."""
    return f"trial-{number:03d}"


def _checked(name: str, value: Any, kind: type = float, **limits: Any) -> Any:
    return Rule(kind, **limits).check("tuner: ", name, value)


class ASHA(Tuner):
    """Asynchronous successive halving, which stops: rungs are at ``grace``, ``grace * eta``, ... epochs.

    A trial that comes to a rung ends unless its best score so far is among the best ``1 / eta`` of all that have come
    there before or with it. ``grace``: epochs before the first decision (None: 1/27 of all).
    """

    def __init__(self, eta: float = 3, grace: int | None = None, seed: int = 0) -> None:
        super().__init__(seed)
        self.eta, self.grace = _checked("eta", eta, above=1), _checked("grace", grace, int, low=1, optional=True)
        self._best: dict[str, float] = {}  # scores so far, by trial
        self._ended: set[str] = set()
        self._arrived: list[tuple[str, int]] = []  # trials at rungs, since the last decision

    def begin(self, search: Search) -> None:
        """Learn what to choose in, and place the rungs."""
        super().begin(search)
        rung = float(self.grace or max(1, round(search.epochs / RUNG_SHARE)))
        self.rungs: list[int] = []
        while round(rung) < search.epochs:
            self.rungs.append(round(rung))
            rung *= self.eta
        self.every = self.rungs[0] if self.rungs else search.epochs
        self._scores: list[dict[str, float]] = [{} for _ in self.rungs]

    def named(self, settings: dict[str, Any]) -> dict[str, Any]:
        """As of random search; the trial begins below the first rung."""
        self._best[trial_name(self._names)] = -math.inf
        return super().named(settings)

    def report(self, name: str, epoch: int, row: Mapping[str, float]) -> None:
        """Note the score; a trial that is evaluated at or past its next rung has come there."""
        self._best[name] = max(self._best[name], row[SCORE])
        for rung, scores in enumerate(self._scores):
            if epoch >= self.rungs[rung] and name not in scores:
                scores[name] = self._best[name]
                self._arrived.append((name, rung))

    def stop(self) -> list[str]:
        """Those that came to a rung and are not among the best there."""
        losers = {name: None for name, rung in self._arrived if not self._stays(name, self._scores[rung])}
        self._arrived = []
        return [name for name in losers if name not in self._ended]

    def _stays(self, name: str, scores: Mapping[str, float]) -> bool:
        best = sorted(scores.values(), reverse=True)
        return scores[name] >= best[max(1, int(len(best) / self.eta)) - 1]

    def tell(self, name: str, summary: Mapping[str, Any]) -> None:
        """A trial that has ended is not stopped again."""
        self._ended.add(name)


class Halving(ASHA):
    """Successive halving: trials that begin together are a cohort, and are compared with each other alone.

    When all of a cohort have come to a rung or have ended, its best ``1 / eta`` continue. A cohort begins once
    ``cohort`` rows are free (None: as many as the first rung frees).
    """

    def __init__(self, eta: float = 3, grace: int | None = None, cohort: int | None = None, seed: int = 0) -> None:
        super().__init__(eta, grace, seed)
        self.cohort = _checked("cohort", cohort, int, low=2, optional=True)
        self._cohorts: list[tuple[list[str], list[int]]] = []  # names, and the rungs that are not decided yet

    def next_cohort(self, size: int) -> tuple[int, list[int]]:
        """How many trials the next cohort has, and its rungs; ``size``: of a cohort that uses all rungs."""
        return size, list(range(len(self.rungs)))

    def ask(self, n: int) -> list[dict[str, Any]]:
        """A whole cohort, or nothing until so many rows are free; the last one is what remains."""
        search, first = self.search, self._names
        most = self.cohort or max(2, int(search.width * (1 - 1 / self.eta)))
        size, rungs = self.next_cohort(min(most, search.width))
        size = min(size, search.trials - first)
        if n < size or size < 1:
            return []
        asked = super().ask(size)
        self._cohorts.append(([trial_name(first + number) for number in range(len(asked))], rungs))
        return asked

    def stop(self) -> list[str]:
        """Of cohorts that are complete at a rung, all but the best."""
        losers: list[str] = []
        self._arrived = []
        for names, rungs in self._cohorts:
            while rungs and all(name in self._ended or name in self._scores[rungs[0]] for name in names):
                scores = self._scores[rungs.pop(0)]
                there = {name: scores.get(name, self._best[name]) for name in names}
                out = [name for name in names if name not in self._ended and not self._stays(name, there)]
                names[:] = [name for name in names if name not in out]
                losers += out
        return losers


class Hyperband(Halving):
    """Hyperband: cohorts of successive halving in turn, each smaller and with its first rung later than the one before.

    Sizes are in the proportions of the paper, so that every cohort trains about as many epochs.
    """

    def next_cohort(self, size: int) -> tuple[int, list[int]]:
        """As the paper has it: the last kind of cohort stops no trial."""
        most = len(self.rungs)
        skipped = len(self._cohorts) % (most + 1)
        share = (most + 1) / (most + 1 - skipped) / self.eta**skipped
        return max(1, round(size * share)), list(range(skipped, most))


class PBT(Tuner):
    """Population-based training: every ``interval`` epochs the worst continue as copies of the best.

    A copy has the weights, moments and buffers of its parent, and its settings, of which those that are drawn from a
    range and are no part of the model's structure are multiplied or divided by ``factor``. ``share``: of the population
    that is replaced. ``interval``: in epochs (None: a tenth of all). The population is ``width`` trials that begin
    together; copies do not count as trials.
    """

    copies = True

    def __init__(self, interval: int | None = None, share: float = 0.25, factor: float = 1.2, seed: int = 0) -> None:
        super().__init__(seed)
        self.interval = _checked("interval", interval, int, low=1, optional=True)
        self.share = _checked("share", share, above=0, high=0.5)  # as many are copied as are replaced
        self.factor = _checked("factor", factor, above=1)
        self._running: dict[str, tuple[int, float]] = {}  # the epoch of its latest score, and that score
        self._children: list[dict[str, Any]] = []
        self._begun = 0  # trials that are no copies

    def begin(self, search: Search) -> None:
        """Learn what to choose in."""
        super().begin(search)
        self.every = self.interval or max(1, search.epochs // 10)

    def ask(self, n: int) -> list[dict[str, Any]]:
        """Copies that wait for a row, else a new population once the last one has ended."""
        children, self._children = self._children[:n], self._children[n:]
        if children or self._running:
            return [self.named(child) for child in children]
        asked = super().ask(min(n, self.search.trials - self._begun))
        self._begun += len(asked)
        return asked

    def named(self, settings: dict[str, Any]) -> dict[str, Any]:
        """As of random search; the trial is part of the population."""
        parent = self._running.get(settings.get(PARENT, ""), (0, -math.inf))
        self._running[trial_name(self._names)] = parent
        return super().named(settings)

    def report(self, name: str, epoch: int, row: Mapping[str, float]) -> None:
        """Note the latest score."""
        self._running[name] = (epoch, row[SCORE])

    def stop(self) -> list[str]:
        """The worst, if the population has come to the end of an interval; their copies of the best are asked next."""
        epochs = [epoch for epoch, _ in self._running.values()]
        count = int(self.share * len(epochs))
        if not count or min(epochs) < self.every or max(epochs) >= self.search.epochs or self._children:
            return []
        ranked = sorted(self._running, key=lambda name: (-self._running[name][1], name))
        losers = ranked[-count:]
        for loser, parent in zip(losers, ranked, strict=False):
            self._children.append({**self._perturbed(self._settings[parent], loser), PARENT: parent})
        return losers

    def tell(self, name: str, summary: Mapping[str, Any]) -> None:
        """A trial that has ended is no longer part of the population."""
        self._running.pop(name, None)

    def _perturbed(self, settings: Mapping[str, Any], loser: str) -> dict[str, Any]:
        """The settings of a parent with the numbers that come from ranges moved up or down, inside their ranges."""
        stream, changed = random.Random(f"{self.seed}/{self._names}/{loser}"), dict(settings)
        changed.pop(PARENT, None)
        for name, source in self.search.space.ranges(changed).items():
            if name not in MEMBER_NUMBERS:
                continue
            value = changed[name] * (self.factor if stream.random() < 0.5 else 1 / self.factor)
            value = min(max(value, source.low), source.high)
            changed[name] = round(value) if isinstance(changed[name], int) else value
        return changed


BUILT_IN: dict[str, type[Tuner]] = dict(zip(TUNERS, (Tuner, ASHA, Hyperband, Halving, PBT), strict=True))
