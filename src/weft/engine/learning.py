"""Calibrate predictions: keep measured times with predicted ones, per machine."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import InputError
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimator import Estimator
from weft.engine.machine import load_calibration, update_calibration
from weft.planner.cost.calibration import Calibration, Observation

FAMILIES = ("spmm", "attention", "scatter", "matmul", "pointwise", "launch")
MAX_OBSERVATIONS = 400  # the newest ones stay in a calibration file
OUTLIER = 0.2  # residual, as a log ratio, from which on a run counts less
LOOSE, TIGHT = 0.005, 0.05  # how firmly the common factor is held near 1, and each family near the common one
ROUNDS, NEAR_ENOUGH = 60, 1e-6  # of Newton's method; as a log ratio
MOST_ALIKE = 10  # runs of one decade of seconds count together like so many
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
    estimator, new, skipped = Estimator(machine), list[Observation](), list[str]()
    for label, results in _groups(folders, skipped).items():
        try:
            new.append(observation_of(results, estimator, label))
        except (ValueError, KeyError, TypeError, InputError) as error:
            skipped.append(f"{label}: {error}")
    calibration = keep(machine, new) if new else load_calibration(machine) or Calibration()
    before, after = typical_error(new, {}), typical_error(new, calibration.factors)
    return Lesson(calibration, tuple(new), before, after, tuple(skipped))


def keep(machine: Machine, new: Sequence[Observation]) -> Calibration:
    """Add runs to the calibration of ``machine``, and keep it."""
    return update_calibration(machine, lambda former: with_runs(former, new))


def with_runs(former: Calibration, new: Sequence[Observation]) -> Calibration:
    """Fitted anew with more runs; one with a label replaces an earlier one of that label.

    Of too many the oldest of the commonest length are forgotten: short runs are many and say little of long ones.
    """
    labels = {run.label for run in new if run.label}
    runs = [run for run in (*(run for run in former.observations if run.label not in labels), *new) if run.usable]
    counts = Counter(run.decade for run in runs)
    forgotten: Counter[int] = Counter()
    for _ in range(len(runs) - MAX_OBSERVATIONS):
        forgotten[max(counts, key=lambda decade: counts[decade] - forgotten[decade])] += 1
    remembered = []
    for run in runs:  # the oldest come first
        if forgotten[run.decade]:
            forgotten[run.decade] -= 1
        else:
            remembered.append(run)
    return Calibration(fit(remembered, former.factors), tuple(remembered), former.phases)


def fit(observations: Sequence[Observation], near: Mapping[str, float] | None = None) -> dict[str, float]:
    """The factor of every family that the observations have; the search begins at the factors ``near``.

    The factors ``f`` are those for which ``sum_k f_k s_ik`` comes nearest to ``t_i`` in ratio, not in difference (a
    millisecond matters to a short epoch and not to a long one), with a limit on what one odd run can do (Huber), and
    held near one common factor if the runs do not separate the families. Runs of about the same length count together
    like a few. Found by weighted Gauss-Newton steps on the log ratios.
    """
    present = [name for name in FAMILIES if any(run.families.get(name, 0.0) > 0 for run in observations)]
    if not present:
        return {}
    predicted = np.array([[run.families.get(name, 0.0) for name in present] for run in observations])
    measured, alike = np.array([run.measured for run in observations]), Counter(run.decade for run in observations)
    counted = np.array([min(1.0, MOST_ALIKE / alike[run.decade]) for run in observations])
    held = np.array([LOOSE] + [TIGHT] * len(present))
    start = np.log([(near or {}).get(name, 1.0) for name in present])
    logs = np.append(start.mean(), start - start.mean())  # the common factor, then each family's deviation from it
    for _ in range(ROUNDS):
        parts = predicted * np.exp(logs[0] + logs[1:])
        total = parts.sum(1)
        residuals = np.log(measured / total)
        weights = counted * np.minimum(1.0, OUTLIER / np.maximum(np.abs(residuals), 1e-12))
        rows = np.column_stack([np.ones_like(total), parts / total[:, None]])
        matrix = rows.T @ (weights[:, None] * rows) + np.diag(held)
        step = np.linalg.solve(matrix, rows.T @ (weights * residuals) - held * logs)
        logs = logs + step.clip(-1.0, 1.0)
        if np.abs(step).max() < NEAR_ENOUGH:
            break
    return dict(zip(present, np.exp(logs[0] + logs[1:]).tolist(), strict=True))


def observation_of(results: Sequence[Mapping[str, Any]], estimator: Estimator, label: str) -> Observation:
    """The run of a group, one ``result.json`` per member; raises if nothing can be learned from it."""
    plan = Plan.from_dict(results[0]["plan"])
    if plan.device != estimator.machine.device:
        raise ValueError(f"ran on {plan.device}, not on {estimator.machine.device}")
    by_name = {}
    for result in results:  # a plan of a server names tasks by their ids
        settings = {**result["task"], **({"name": result["id"]} if "id" in result else {})}
        task = Task.from_dict(settings)
        by_name[task.label] = task
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


def typical_error(observations: Sequence[Observation], factors: Mapping[str, float]) -> float:
    """Median of how far predictions are off, as a share of what was measured."""
    errors = []
    for observation in observations:
        predicted = sum(factors.get(name, 1.0) * value for name, value in observation.families.items())
        errors.append(abs(math.expm1(math.log(predicted / observation.measured))))
    return statistics.median(errors) if errors else 0.0


def label_of(folder: Path, members: Sequence[str]) -> str:
    """The name of a group's run: the folder of the run, and its members."""
    more = f" and {len(members) - 1} others" if len(members) > 1 else ""
    return f"{folder.absolute()}: {members[0]}{more}"


def _groups(folders: Iterable[Path], skipped: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Every result in or under the folders once, members of a group together, by the label of their run."""
    files: dict[Path, None] = {}
    for folder in folders:
        path = folder.absolute()
        files |= dict.fromkeys([path] if path.is_file() else sorted(path.rglob(RESULT)))
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if "task" not in result and "statuses" in result:
                continue  # a sweep as a whole: its members have files of their own
            members = result["plan"]["members"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(f"{path}: not the result of a run ({type(error).__name__}: {error})")
            continue
        inside_sweep = path.parent.parent.name == "tasks"
        run = path.parent.parent.parent if inside_sweep else path.parent
        groups.setdefault(label_of(run, members), []).append(result)
    return groups
