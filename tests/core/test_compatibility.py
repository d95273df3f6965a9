"""May these share a step? The planner and the runtime read the same answer."""

from __future__ import annotations

import pytest

from weft.core.compatibility import group_key, padding_obstacle, stack_key, stack_obstacle, width
from weft.core.models import ModelTraits, with_traits
from weft.core.task import Task


def net(in_features, out_features, hidden=16): ...


def other(in_features, out_features): ...


BASE = {"graph": "g", "epochs": 3}


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        ({}, {"layers": 3}, "layers"),
        ({}, {"model": "sage"}, "model"),
        ({}, {"norm": "batch"}, "norm"),
        ({}, {"optimizer": "sgd"}, "optimizer"),
        ({}, {"metric": "f1_macro"}, "metric"),
        ({}, {"graph": "h"}, "graph"),
        ({"model": "gat"}, {"model": "gat", "heads": 4}, "heads"),
        ({"model": "sage"}, {"model": "sage", "aggregator": "max"}, "aggregator"),
        ({"model": net}, {"model": other}, "model"),
        ({"model": net, "hidden": 8}, {"model": net, "hidden": 4}, "hidden"),
        ({"model": net}, {"model": net, "hidden": 64}, "hidden"),  # 16 is the module's own default
        ({"model": net}, {"model": net, "model_args": {"k": 3}}, "model_args.k"),
        ({"model": "gin"}, {"model": "gin", "model_args": {"train_eps": True}}, "model_args.train_eps"),
        ({"decay": "first", "weight_decay": 1.0}, {"weight_decay": 1.0}, "weight decay reaches"),
    ],
)
def test_what_keeps_tasks_apart(one, two, reason):
    tasks = [Task(**{**BASE, **one}), Task(**{**BASE, **two})]
    assert reason in stack_obstacle(tasks, False)
    keys = [(group_key(task, False), stack_key(task)) for task in tasks]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {"lr": 1.0, "seed": 3, "dropout": 0.1, "hidden": 8, "optimizer": "adamw"}),
        ({"metric": "accuracy"}, {"metric": "auto"}),
        ({}, {"heads": 4}),  # a GCN has none
        ({"model": net, "hidden": 8, "seed": 1}, {"model": net, "hidden": 8}),
    ],
)
def test_what_does_not(one, two):
    tasks = [Task(**{**BASE, **one}), Task(**{**BASE, **two})]
    assert stack_obstacle(tasks, False) is None
    assert stack_key(tasks[0]) == stack_key(tasks[1])


@pytest.mark.parametrize("change", [{"eval_every": 2}, {"input_dropout": 0.5}, {"decay": "first", "weight_decay": 0.1}])
def test_what_would_only_be_slower_is_kept_apart_by_the_planner_alone(change):
    tasks = [Task(**BASE), Task(**BASE, **change)]
    assert stack_key(tasks[0]) != stack_key(tasks[1])
    assert stack_obstacle(tasks, False) is None


def test_padding():
    assert padding_obstacle(Task(**BASE)) is None
    assert "layer norm takes its mean" in padding_obstacle(Task(**BASE, norm="layer"))
    assert "net is a model of its own" in padding_obstacle(Task(**BASE, model=net))
    with with_traits(ModelTraits("own", padding="it divides by its width")):
        assert padding_obstacle(Task(**BASE, model="own")) == "it divides by its width"
    assert (width(Task(**BASE, hidden=8)), width(Task(**BASE, layers=1)), width(Task(**BASE, model=net))) == (8, 0, 0)
