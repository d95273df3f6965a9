"""Learning from runs: what was measured, beside what would have been predicted, kept for the machine it ran on."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimate import Estimator
from weft.engine.machines import keep_calibration, load_calibration
from weft.plan.calibration import Calibration, Observation

RESULT = "result.json"
ENOUGH_EPOCHS = 3  # fewer are set-up and little else


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
    for path in _results(folders):
        try:
            new += observations_of(json.loads(path.read_text(encoding="utf-8")), estimator, str(path.parent))
        except (OSError, ValueError, KeyError, TypeError, InputError) as error:
            skipped.append(f"{path}: {error}")
    known = load_calibration(machine) or Calibration()
    labels = {one.label for one in new}
    others = [one for one in known.observations if one.label not in labels]  # a run learned twice counts once
    calibration = Calibration().with_observations([*others, *new])
    if new:
        keep_calibration(machine, calibration)
    return Lesson(
        calibration, tuple(new), typical_error(new, {}), typical_error(new, calibration.factors), tuple(skipped)
    )


def observe(machine: Machine, cost: Mapping[str, Any], seconds_per_epoch: float, label: str) -> Calibration | None:
    """Add one run to what is known of ``machine``: its predicted ``Cost`` as plain data, and what it took."""
    one = Observation(dict(cost.get("uncorrected", {})), seconds_per_epoch, label)
    if not one.usable:
        return None
    calibration = (load_calibration(machine) or Calibration()).with_observations([one])
    keep_calibration(machine, calibration)
    return calibration


def observations_of(result: Mapping[str, Any], estimator: Estimator, label: str) -> list[Observation]:
    """The run of a ``result.json`` as observations; raises where it cannot be one."""
    task, metrics = Task.from_dict(result["task"]), result["metrics"]
    if metrics["epochs_run"] < ENOUGH_EPOCHS:
        raise ValueError(f"only {metrics['epochs_run']} epochs were run")
    plan = Plan.from_dict(result["plan"])
    if plan.device != estimator.machine.device:
        raise ValueError(f"ran on {plan.device}, not on {estimator.machine.device}")
    if plan.join != "solo":
        raise ValueError(f"was {plan.join} with others, whose seconds are not its own")
    cost = estimator.alone(task).cost
    return [Observation(dict(cost.uncorrected), float(metrics["seconds_per_epoch"]), label)]


def typical_error(observations: Sequence[Observation], factors: Mapping[str, float]) -> float:
    """Median of how far predictions are off, as a share of what was measured."""
    errors = []
    for one in observations:
        predicted = sum(factors.get(name, 1.0) * value for name, value in one.families.items())
        errors.append(abs(math.expm1(math.log(predicted / one.measured))))
    return statistics.median(errors) if errors else 0.0


def _results(folders: Iterable[Path]) -> list[Path]:
    """Every result in or under the folders, once; its absolute folder is what a run is known by."""
    places = [folder.absolute() for folder in folders]
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob(RESULT)))]
    return list(dict.fromkeys(found))
