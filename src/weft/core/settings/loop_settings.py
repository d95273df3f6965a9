"""Read the settings of the training loop that are more than a number: class weights, parameter groups, plateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from weft.core.errors import SpecError

# Of schedule="plateau", as torch's ReduceLROnPlateau calls them; ``watch``: the column that should improve.
PLATEAU = {"factor": 0.1, "patience": 10, "threshold": 1e-4, "cooldown": 0, "min_lr": 0.0, "watch": "val_loss"}
GROUP_SETTINGS = ("lr", "weight_decay")  # what a group of parameters may have of its own with Weft's optimizers
LOWER = ("mse", "mae")  # metrics of which less is better
BOUNDED = ("accuracy", "f1_micro", "f1_macro", "roc_auc")  # metrics that are never below 0


def lower_is_better(column: str) -> bool:
    """Whether less is better of a column such as ``val_loss``, ``test_mse`` or ``seconds``."""
    return column.endswith("loss") or column.startswith("seconds") or column.partition("_")[2] in LOWER


def read_class_weights(label: str, value: Any) -> str | tuple[float, ...] | None:
    """``"balanced"``, or one number per class, none below 0."""
    if value is None:
        return None
    if isinstance(value, str) and value == "balanced":
        return value
    if hasattr(value, "tolist"):  # arrays of numpy and torch
        value = value.tolist()
    numbers = isinstance(value, (list, tuple)) and all(_is_number(one) for one in value)
    if not numbers or not value or min(value) < 0 or not any(value):
        raise SpecError(
            f'task {label!r}: class_weights={value!r} must be "balanced", or one number per class, at least 0 and '
            "not all 0, such as [1.0, 2.5]"
        )
    return tuple(float(one) for one in value)


def read_param_groups(label: str, value: Any) -> dict[str, dict[str, Any]]:
    """Settings by name pattern: ``{"conv1.*": {"weight_decay": 5e-4}}``; of several patterns the first one counts."""
    if value is None:
        return {}
    tables = isinstance(value, Mapping) and all(isinstance(one, Mapping) and one for one in value.values())
    if not tables or not all(isinstance(name, str) for name in value):
        raise SpecError(
            f"task {label!r}: param_groups={value!r} must be settings by name pattern, such as "
            'param_groups={"conv1.*": {"weight_decay": 5e-4}}'
        )
    return {pattern: dict(settings) for pattern, settings in value.items()}


def check_group_settings(label: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """A :class:`SpecError` for settings that Weft's own optimizers do not have per group."""
    for pattern, settings in groups.items():
        for name, value in settings.items():
            if name not in GROUP_SETTINGS:
                known = " and ".join(GROUP_SETTINGS)
                raise SpecError(
                    f"task {label!r}: param_groups[{pattern!r}] has {name!r}; a group of Weft's own optimizers may "
                    f"set {known}; that of a torch.optim class, whatever the class takes"
                )
            if not _is_number(value) or value < 0:
                raise SpecError(f"task {label!r}: param_groups[{pattern!r}]: {name}={value!r} must be at least 0")


def group_of(name: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The pattern of the group that the parameter ``name`` is in; None: in none."""
    return next((pattern for pattern in groups if fnmatchcase(name, pattern)), None)


def read_plateau(label: str, value: Any) -> dict[str, Any]:
    """The settings of ``schedule="plateau"`` that were given."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"task {label!r}: plateau={value!r} must be a table, such as plateau={{'patience': 5}}")
    for name, one in value.items():
        if name not in PLATEAU:
            raise SpecError(f"task {label!r}: plateau has no {name!r}; it has {', '.join(PLATEAU)}")
        _check_plateau(label, name, one)
    return dict(value)


def _check_plateau(label: str, name: str, value: Any) -> None:
    if name == "watch":
        fine, expected = isinstance(value, str), "the name of a column, such as val_loss"
    elif name in ("patience", "cooldown"):
        fine, expected = (
            isinstance(value, int) and not isinstance(value, bool) and value >= 0,
            "a number of evaluations",
        )
    elif name == "factor":
        fine, expected = _is_number(value) and 0 < value < 1, "above 0 and below 1"
    else:
        fine, expected = _is_number(value) and value >= 0, "a number of at least 0"
    if not fine:
        raise SpecError(f"task {label!r}: plateau: {name}={value!r} must be {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
