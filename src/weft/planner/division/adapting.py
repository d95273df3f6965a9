"""Adapter: divide batches anew when measured phases drift from what the division was chosen by.

After every epoch the measured seconds of each phase are compared with those of the simulated epoch. A phase that is off
by more than noise explains is taken over into the phase times, the partitioner divides anew, and the new division is
used if it is predicted to gain enough. A phase that is faster than predicted is first taken to be slowed down less by
others: divisions in which those have no part do not get faster by that. While phases are as expected, whole epochs are
compared (:class:`Trials`). Reads no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.core.division import EPOCH, Division, PhaseTimes, Registry
from weft.core.units import show_seconds
from weft.planner.division.partitioner import Limits, Partition, partition
from weft.planner.division.simulator import Simulation, simulate

# ---- Trials: measure whole epochs of divisions that are predicted to take about as long, then keep the fastest.
#
# Batches are trained in their order whoever prepares them, so an epoch under another division is an epoch like others.
# A division that takes longer than one side alone is predicted to take, or was measured to, is left. Reads no clock.

NEAR = 0.10  # of an epoch that a division may be predicted to take longer and is tried: an error of the simulator's
KEEP = 0.03  # of an epoch that another division must save
SLOW = 1.10  # times as long as predicted from which on a first epoch is not believed: steps may be captured in it
LOST = 1.25  # times as long as the fastest from which on it is, unless steps may be captured or buffers pinned in it
MOST_TRIALS = 3  # of divisions that are not predicted to be faster
RIVALS = 2  # divisions that are compared with the present one, beside each side alone
APART = 0.1  # difference of shares from which on a division is another one
RECENT = 2  # epochs of a division of which the fastest counts


def contenders(found: Partition, present: Division, seconds: float, batches: int) -> dict[Division, float]:
    """Seconds of an epoch of ``present``, of each side alone, and of the fastest divisions of other shares or ways."""
    tried = [(one, each * batches) for one, each in found.tried]
    inside = any(one.in_step for one, _ in tried)  # beside training is simulated too fast
    known, rivals = [present], dict[Division, float]()
    for one, each in [(found.division, found.simulation.seconds), *tried]:
        if not one.divided:
            rivals[one] = each
        elif not (inside and one.beside) and len(known) <= RIVALS and all(_differ(one, other) for other in known):
            known.append(one)
            rivals[one] = each
    return {**rivals, present: seconds}


def _differ(one: Division, other: Division) -> bool:
    if one.elastic and other.elastic:  # their shares are where they begin
        return False
    return one.in_step != other.in_step or abs(one.device_share - other.device_share) >= APART


def _needs_more(division: Division, before: Sequence[Division]) -> bool:
    """Whether it has steps or buffers that none of those ``before`` had: capturing and pinning them takes long."""
    steps = set[str]().union(*map(_steps, before))
    return not _steps(division) <= steps or division.host_buffer > max(one.host_buffer for one in before)


def _steps(division: Division) -> set[str]:
    """Kinds of captured steps: on a batch that is there, and those that prepare their own."""
    own = {"own"} if division.in_step or division.kind == "sequential" else set()
    return own | ({"given"} if division.host_batches else set())


@dataclass
class Trials:
    """``predicted``: seconds of an epoch by division; ``left``: how many are tried that may well be slower."""

    predicted: Mapping[Division, float]
    left: int = MOST_TRIALS
    _took: dict[Division, list[float]] = field(default_factory=dict)
    trained: tuple[Division, ...] = ()  # all divisions that epochs were compared under, also before these trials

    def after(self, present: Division, seconds: float) -> tuple[Division, str] | None:
        """What to use next, and why, after an epoch under ``present``; None: the same."""
        believed = self._took.get(present) or self._believed(present, seconds)
        self._took.setdefault(present, []).append(seconds)
        self.trained = (*dict.fromkeys((*self.trained, present)),)
        if not believed:
            return None
        fastest = min(self._took, key=self.expected)
        new = min((one for one in self.predicted if one not in self._took), key=self.expected, default=None)
        if new is not None and (why := self._worth_trying(new, self.expected(fastest))):
            return new, why
        if self.expected(fastest) < (1.0 - KEEP) * self.expected(present):
            return fastest, f"an epoch took {self._words(fastest)} so and {self._words(present)} as now"
        return None

    def _believed(self, present: Division, seconds: float) -> bool:
        """Whether a first epoch under ``present`` says what others are going to take."""
        fastest = min(map(self.expected, self._took), default=float("inf"))
        lost = seconds > LOST * fastest and not _needs_more(present, self.trained)
        return lost or seconds <= SLOW * self.expected(present, seconds)

    def of(self, division: Division) -> dict[Division, list[float]]:
        """The epochs that were measured under ``division``, for trials with other predictions."""
        return {division: self._took[division]} if division in self._took else {}

    def expected(self, division: Division, unknown: float = float("inf")) -> float:
        """Seconds of an epoch, measured lately or predicted: of divided ones as far off as measured ones are."""
        took = self._took.get(division)
        if took:
            return min(took[-RECENT:])
        return self.predicted.get(division, unknown) * (self.off() if division.divided else 1.0)

    def off(self) -> float:
        """How many times as long as predicted the measured divisions took on average."""
        ratios = [min(took[-RECENT:]) / self.predicted[one] for one, took in self._took.items()
                  if one.divided and self.predicted.get(one)]  # fmt: skip
        return sum(ratios) / len(ratios) if ratios else 1.0

    def _worth_trying(self, new: Division, fastest: float) -> str:
        """Why, empty if it is not; uses up one of the trials unless it is predicted to be faster."""
        seconds = self.expected(new)
        if seconds < (1.0 - KEEP) * fastest:
            return f"an epoch takes {show_seconds(fastest)}, and so it is predicted to take {show_seconds(seconds)}"
        if seconds > (1.0 + NEAR) * fastest or not self.left:
            return ""
        self.left -= 1
        return f"it is predicted to take about as long ({show_seconds(seconds)}) and is tried for an epoch"

    def _words(self, division: Division) -> str:
        return show_seconds(self.expected(division))


DRIFT = 1.25  # ratio of measured to predicted seconds from which on a phase has drifted
STRONG = 1.6  # from which on one epoch suffices; below, two in a row
GAIN = 0.05  # of an epoch that a new division must be predicted to save
REST = 2  # epochs after a change in which only strong drifts count
MOST_FASTER = 10.0  # times as fast as predicted that reads are taken to be
DIVIDING = "dividing"  # among the factors: whole epochs of divided ones, where their phases do not say it
FORGET = 20  # epochs without measuring a phase after which its drift is forgotten, so that it is tried again


@dataclass(frozen=True)
class Change:
    """A new division, why, and the seconds of an epoch predicted for the former and the new one."""

    division: Division
    why: str
    before: float
    after: float


@dataclass
class Adapter:
    """Keeps the phase times of one group up to date; ``batches`` per epoch.

    ``profiled``: the phase times that ``division`` was chosen by; ``found``: what it was chosen from, if known. Begun
    with fewer workers of the host than ``limits`` allow, it keeps to so many.
    """

    profiled: PhaseTimes
    division: Division
    registry: Registry
    limits: Limits
    batches: int
    found: Partition | None = None
    factors: dict[str, float] = field(default_factory=dict)  # of phases that have drifted
    _eased: dict[str, float] = field(default_factory=dict)  # by phase: share of how others slow it down that is left
    _suspected: dict[str, int] = field(default_factory=dict)
    _unseen: dict[str, int] = field(default_factory=dict)
    _patience: dict[str, int] = field(default_factory=dict)  # epochs after which a drift is forgotten
    _rest: int = 0
    _simulated_for: tuple[object, Mapping[str, float]] | None = None
    _trials: Trials | None = None
    _trials_left: int = MOST_TRIALS
    _changed: tuple[float, str] | None = None  # seconds of the epoch before the last change, until its gain is told

    def __post_init__(self) -> None:
        if self.division.host_batches:
            workers = min(self.limits.workers, self.division.workers)
            self.limits = replace(self.limits, workers=workers)

    @property
    def times(self) -> PhaseTimes:
        """Phase times as they are now believed to be."""
        return self.profiled.scaled(**self.factors).eased(self._eased)

    def observe(self, measured: Mapping[str, float], epochs: int = 1) -> Change | None:
        """A new division after ``epochs`` epochs with these mean seconds by phase; None if the present one stays.

        Phases of a side that is not used, or not measured, are left out. ``epoch`` among them: of a whole epoch.
        """
        took = measured.get(EPOCH)
        measured = {key: seconds for key, seconds in measured.items() if key != EPOCH}
        expected = self._expected() if measured else {}
        drifted = self._by_phase(self._drifted(measured, expected), measured, expected)
        forgotten = self._forget(self._seen(measured), epochs)
        self._rest = max(self._rest - epochs, 0)
        if not drifted and not forgotten:
            return None if took is None else self._try(took)
        for key, ratio in drifted.items():
            self._learn(key, ratio, expected[key])
            self._suspected.pop(key, None)
        why = [f"{key} takes {ratio:.2g} times as long as predicted" for key, ratio in drifted.items()]
        why += [f"{key} was slow {epochs} epochs ago and is tried again" for key, epochs in forgotten.items()]
        change = self._divide(", ".join(why), took)
        return self._try(took) if change is None and took is not None else change

    def _expected(self) -> Mapping[str, float]:
        """As now believed; simulated once, since a short epoch takes hardly longer than its simulation."""
        about = (self.division, tuple(sorted(self.factors.items())), tuple(sorted(self._eased.items())))
        if self._simulated_for is None or self._simulated_for[0] != about:
            self._simulated_for = (about, self.expected(self.times))
        return self._simulated_for[1]

    def expected(self, times: PhaseTimes) -> dict[str, float]:
        """Mean seconds of every phase in an epoch simulated with ``times``, interference included."""
        spent: dict[str, list[float]] = {}
        steps: dict[int, dict[str, float]] = {}
        for one in simulate(self.division, times, self.batches, self.registry).activities:
            spent.setdefault(one.key, []).append(one.end - one.begin)
            steps.setdefault(one.batch, {})[one.key] = one.end - one.begin
        sampling, _, _, step = self._own_phases
        inside = [sum(one.values()) for one in steps.values() if sampling in one] if self.division.in_step else []
        if inside:
            spent[step] = inside
        return {key: sum(some) / len(some) for key, some in spent.items()}

    def _learn(self, key: str, ratio: float, expected: float) -> None:
        """Take over that a phase took ``ratio`` times as long as ``expected``."""
        alone = self.expected(self.times.eased({key: 0.0})).get(key, 0.0) if ratio < 1.0 else 0.0
        if 0.0 < alone < expected:
            left = max(ratio * expected, alone)  # seconds, still slowed down by others
            self._eased[key] = self._eased.get(key, 1.0) * (left - alone) / (expected - alone)
            ratio *= expected / left
        self.factors[key] = self.factors.get(key, 1.0) * ratio

    @property
    def _own_phases(self) -> tuple[str, str, str, str]:
        """Sampling, reading and training of the trainer, and steps that have all of them."""
        trainer = self.division.trainer
        return f"batching_{trainer}", f"transfer_{trainer}", f"training_{trainer}", f"step_{trainer}"

    def _by_phase(
        self, drifted: dict[str, float], measured: Mapping[str, float], expected: Mapping[str, float]
    ) -> dict[str, float]:
        """Of steps that sample and read their batch, only the whole is measured: unless training drifts, reads do."""
        _, reading, training, step = self._own_phases
        found = {key: ratio for key, ratio in drifted.items() if key != step}
        if step in drifted and training not in drifted and expected.get(reading):
            more = (measured[step] - expected[step]) / expected[reading]
            found[reading] = max(1.0 + more, 1.0 / MOST_FASTER)
        return found

    def _seen(self, measured: Mapping[str, float]) -> set[str]:
        """Phases that were measured, by themselves or as a part of steps."""
        sampling, reading, _, step = self._own_phases
        divided = (DIVIDING,) if self.division.divided else ()
        return {*measured, *((sampling, reading) if step in measured else ()), *divided}

    def _simulated(self, division: Division) -> Simulation:
        return simulate(division, self.times, self.batches, self.registry)

    def _drifted(self, measured: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
        """The ratio of every phase that has drifted for long enough."""
        found = {}
        for key, seconds in measured.items():
            if key not in expected or expected[key] <= 0 or seconds <= 0:
                continue
            ratio = seconds / expected[key]
            off = max(ratio, 1.0 / ratio)
            self._suspected[key] = self._suspected.get(key, 0) + 1 if off >= DRIFT else 0
            lasting = self._suspected[key] >= 2 and not self._rest
            if off >= STRONG or (off >= DRIFT and lasting):
                found[key] = ratio
        return found

    def _forget(self, measured: Collection[str], epochs: int) -> dict[str, int]:
        """Forget drifts that nobody has measured for long; every time it takes twice as long, against flapping."""
        forgotten = {}
        for key in list(self.factors):
            self._unseen[key] = 0 if key in measured else self._unseen.get(key, 0) + epochs
            patience = self._patience.get(key, FORGET)
            if self._unseen[key] >= patience:
                self._patience[key] = 2 * patience
                forgotten[key] = self._unseen[key]
                del self.factors[key], self._unseen[key]
                self._eased.pop(key, None)
        return forgotten

    def _try(self, took: float) -> Change | None:
        """After an epoch of ``took`` seconds: another division that is faster, or may be."""
        trials = self._trials = self._trials or self._contenders(Trials({}))
        found = trials.after(self.division, took)
        self._trials_left = trials.left
        if found is None:
            return None
        if self.division.divided and not found[0].divided:  # not to be divided anew at the next drift
            self.factors[DIVIDING] = self._off(self.division) * trials.off()
        self.division, self._rest = found[0], REST
        return Change(*found, took, trials.expected(found[0]))

    def _off(self, division: Division) -> float:
        """How many times as long as simulated an epoch under ``division`` takes."""
        return self.factors.get(DIVIDING, 1.0) if division.divided else 1.0

    def _contenders(self, before: Trials) -> Trials:
        """With the epochs under the present division that ``before`` knows; others were at other times."""
        if self.found is None:
            self.found = self._partition()
        seconds = self._simulated(self.division).seconds
        found = contenders(self.found, self.division, seconds, self.batches)
        predicted = {one: each * self._off(one) for one, each in found.items()}
        return Trials(predicted, self._trials_left, before.of(self.division), before.trained)

    def _partition(self) -> Partition:
        return partition(self.times, self.registry, self.batches, self.limits, self.division.trainer)

    def _divide(self, why: str, took: float | None = None) -> Change | None:
        """Divide anew if that is predicted to be faster, also than the epoch that ``took`` so many seconds."""
        now = self._simulated(self.division).seconds * self._off(self.division)
        now = now if took is None else min(now, took)
        found = self.found = self._partition()
        before, self._trials = self._trials or Trials({}), None
        ways = [(found.division, found.simulation.seconds)]
        ways += [(one, each * self.batches) for one, each in found.tried if not one.divided]
        best, seconds = min(((one, each * self._off(one)) for one, each in ways), key=lambda way: way[1])
        same = best == self.division or (best.elastic and self.division.elastic)  # which divides anew by itself
        if seconds > (1.0 - GAIN) * now or same:
            self._trials = self._contenders(before)
            return None
        self.division, self._rest = best, REST
        return Change(best, why, now, seconds)

    # ---- what it gained ------------------------------------------------------------------------------

    def told(self, epoch_seconds: float, change: Change | None) -> list[str]:
        """Sentences for the journal after an epoch: what the last change gained, and what changes now."""
        notes = []
        if self._changed is not None:
            before, words = self._changed
            notes.append(f"{words}: an epoch took {show_seconds(epoch_seconds)}, before {show_seconds(before)}")
            self._changed = None
        if change is not None:
            saved = f"{show_seconds(change.before)} to {show_seconds(change.after)} predicted per epoch"
            notes.append(f"divided anew, because {change.why}: {change.division.words()}; {saved}")
            self._changed = (epoch_seconds, "divided anew")
        return notes
