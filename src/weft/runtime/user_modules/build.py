"""From a task's ``model`` to an ``nn.Module``: by name, by import, by factory, or a copy of a user's."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft import nn as weft_nn
from weft.core.errors import SpecError
from weft.core.task import MODELS, Task

ATTENTION = ("gat", "gatv2")


def build_model(task: Task, in_features: int, out_features: int) -> nn.Module:
    """The model of ``task`` with fresh weights from its seed; a module given as an object keeps its own."""
    if task.model in MODELS:
        model = weft_nn.build(task.model, in_features, out_features, **model_options(task))
        weft_nn.reset_parameters(model, task.seed)
    elif isinstance(task.model, nn.Module):
        model = copy.deepcopy(task.model)
    else:
        model = _from_factory(task, in_features, out_features)
    weft_nn.assign_sites(model)
    return model


def model_options(task: Task) -> dict[str, Any]:
    """The settings that the named model of ``task`` understands."""
    options: dict[str, Any] = {
        "hidden": task.hidden,
        "layers": task.layers,
        "dropout": task.dropout,
        "input_dropout": task.input_dropout or 0.0,
        "norm": task.norm,
        "residual": task.residual,
    }
    if task.model in ATTENTION:
        attention = task.dropout if task.attention_dropout is None else task.attention_dropout
        options |= {"heads": task.heads, "out_heads": task.out_heads, "attention_dropout": attention}
    if task.model == "sage":
        options["aggregator"] = task.aggregator
    return options


def _from_factory(task: Task, in_features: int, out_features: int) -> nn.Module:
    factory = import_callable(task) if isinstance(task.model, str) else task.model
    torch.manual_seed(task.seed)
    try:
        model = factory(in_features, out_features)
    except Exception as error:
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} could not be called as "
            f"(in_features={in_features}, out_features={out_features}): {_in_words(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} returned {type(model).__name__}; expected an nn.Module"
        )
    return model


def import_callable(task: Task) -> Callable[[int, int], nn.Module]:
    """What ``"package.module:name"`` or ``"path/file.py:name"`` points to."""
    place, _, name = task.model.rpartition(":")
    if not place or not name:
        raise SpecError(
            f'task {task.label!r}: model={task.model!r} must be "module:callable" or "file.py:callable" with both parts'
        )
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise SpecError(f"task {task.label!r}: model={task.model!r}: {_in_words(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise SpecError(f"task {task.label!r}: model={task.model!r}: {place} has no callable {name!r}")
    return found


def _in_words(error: Exception) -> str:
    """What went wrong in a user's code, and on which line of it."""
    if isinstance(error, (ImportError, FileNotFoundError)):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    known = last.filename == __file__ or isinstance(error, SyntaxError)
    place = "" if known else f" (line {last.lineno} of {last.filename})"
    return f"{type(error).__name__}: {error}{place}"


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that classes defined there can be copied and pickled
    spec.loader.exec_module(module)
    return module
