"""Learn from runs: keep measured times beside predicted ones, per machine."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimator import Estimator
from weft.engine.machine import load_calibration, update_calibration
from weft.planner.cost.calibration import Calibration, Observation

RESULT = "result.json"
ENOUGH_EPOCHS = 3  # fewer are set-up and little else
_ASIDE: ContextVar[list[Observation] | None] = ContextVar("observations that are set aside", default=None)


@dataclass(frozen=True)
class Lesson:
    """What some runs taught: the calibration, their observations, typical errors before and after, what was skipped."""

    calibration: Calibration
    observations: tuple[Observation, ...]
    before: float
    after: float
    skipped: tuple[str, ...] = ()


def learn(folders: Iterable[Path], machine: Machine) -> Lesson:
    """Fit ``machine``'s calibration to every ``result.json`` under ``folders``, with what was known, and keep it."""
    estimator = Estimator(machine)
    new: list[Observation] = []
    skipped: list[str] = []
    for label, results in _groups(folders, skipped).items():
        try:
            new.append(observation_of(results, estimator, label))
        except (ValueError, KeyError, TypeError, InputError) as error:
            skipped.append(f"{label}: {error}")
    labels = {one.label for one in new}

    def added(known: Calibration) -> Calibration:
        others = [one for one in known.observations if one.label not in labels]  # a run learned twice counts once
        return replace(known, observations=()).with_observations([*others, *new])

    calibration = update_calibration(machine, added) if new else added(load_calibration(machine) or Calibration())
    before, after = typical_error(new, {}), typical_error(new, calibration.factors)
    return Lesson(calibration, tuple(new), before, after, tuple(skipped))


def observe(machine: Machine, cost: Mapping[str, Any], seconds_per_epoch: float, label: str) -> None:
    """Add one run to what is known of ``machine``: its predicted ``Cost`` as plain data, and what it took."""
    one = Observation(dict(cost.get("uncorrected", {})), seconds_per_epoch, label)
    aside = _ASIDE.get()
    if aside is not None:
        aside.append(one)
    elif one.usable:
        keep(machine, [one])


@contextmanager
def observations_aside() -> Iterator[list[Observation]]:
    """Runs inside teach nothing yet: what they took is collected, for whoever knows if they had the device alone."""
    found: list[Observation] = []
    token = _ASIDE.set(found)
    try:
        yield found
    finally:
        _ASIDE.reset(token)


def keep(machine: Machine, new: Sequence[Observation]) -> Calibration:
    """Add runs to what is known of ``machine``.

    A run of the same label that is known already is replaced; one without a label is not.
    """
    labels = {one.label for one in new if one.label}

    def added(known: Calibration) -> Calibration:
        others = [other for other in known.observations if other.label not in labels]
        return replace(known, observations=()).with_observations([*others, *new])

    return update_calibration(machine, added)


def observation_of(results: Sequence[Mapping[str, Any]], estimator: Estimator, label: str) -> Observation:
    """The run of a group, one ``result.json`` per member; raises if nothing can be learned from it."""
    plan = Plan.from_dict(results[0]["plan"])
    if plan.device != estimator.machine.device:
        raise ValueError(f"ran on {plan.device}, not on {estimator.machine.device}")
    by_name = {task.label: task for task in map(_task_of, results)}
    tasks = [by_name[name] for name in plan.members if name in by_name]
    epochs = {result["metrics"]["epochs_run"] for result in results}
    if len(tasks) < len(plan.members) or len(epochs) > 1:
        raise ValueError("its members did not all train to the same epoch, so the group changed on the way")
    if min(epochs) < ENOUGH_EPOCHS:
        raise ValueError(f"only {min(epochs)} epochs were run")
    cost = estimator.together(tasks, plan).cost
    # Members are charged equal shares of what the group took.
    seconds = sum(float(result["metrics"]["seconds_per_epoch"]) for result in results)
    return Observation(dict(cost.uncorrected), seconds, label)


def _task_of(result: Mapping[str, Any]) -> Task:
    """The task of a result, by the name that its plan has for it: of one from a server, its id."""
    settings = dict(result["task"])
    return Task.from_dict({**settings, "name": result["id"]} if "id" in result else settings)


def typical_error(observations: Sequence[Observation], factors: Mapping[str, float]) -> float:
    """Median of how far predictions are off, as a share of what was measured."""
    errors = []
    for one in observations:
        predicted = sum(factors.get(name, 1.0) * value for name, value in one.families.items())
        errors.append(abs(math.expm1(math.log(predicted / one.measured))))
    return statistics.median(errors) if errors else 0.0


def _groups(folders: Iterable[Path], skipped: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Every result in or under the folders, members of a group together, by what the run is known by."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in _files(folders):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if "task" not in result and "statuses" in result:
                continue  # a sweep as a whole: its members have files of their own
            members = result["plan"]["members"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(f"{path}: not the result of a run ({type(error).__name__}: {error})")
            continue
        groups.setdefault(label_of(_run_folder(path), members), []).append(result)
    return groups


def label_of(folder: Path, members: Sequence[str]) -> str:
    """What the run of a group is known by: the folder of the run, and who was in it."""
    others = f" and {len(members) - 1} others" if len(members) > 1 else ""
    return f"{folder.absolute()}: {members[0]}{others}"


def _run_folder(result: Path) -> Path:
    """The folder of the run that wrote a result: members of a sweep have folders of their own inside it."""
    return result.parent.parent.parent if result.parent.parent.name == "tasks" else result.parent


def _files(folders: Iterable[Path]) -> list[Path]:
    """Every result file, once, by its absolute path."""
    places = [folder.absolute() for folder in folders]
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob(RESULT)))]
    return list(dict.fromkeys(found))
