"""The cases that two trees are compared by: small runs, plans and simulated queues, by kind and name."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import weft
from tests.behaviour import calls, modules

GRAPHS = ("plain", "sparse", "weighted", "multilabel", "regression")
MACHINES = ("h200", "a100-40g", "v100-32g", "cpu")
EPOCHS = 8


@cache
def graph(kind: str = "plain", nodes: int = 80) -> weft.Graph:
    """A graph with three relations, made of random numbers; ``kind``: what its features, edges or labels are."""
    draw = torch.Generator().manual_seed(5)
    label = torch.arange(nodes) % 4
    src, dst = torch.randint(0, nodes, (2, 5 * nodes), generator=draw)
    x = torch.randn(nodes, 10, generator=draw)
    x[torch.arange(nodes), label] += 1.5
    many = (torch.rand(nodes, 4, generator=draw) < 0.3).float()
    y = {"multilabel": many, "regression": x[:, :1] * 2 + many[:, :1]}.get(kind, label)
    weight = torch.rand(5 * nodes, generator=draw) + 0.5 if kind == "weighted" else None
    features = weft.SparseFeatures.from_torch(torch.where(x > 0.8, x, 0.0)) if kind == "sparse" else x
    relation = torch.arange(5 * nodes) % 3
    made = weft.Graph.from_edges(
        src, dst, nodes, x=features, y=y, edge_weight=weight, relation=relation, directed=True, name=kind
    )
    return made.random_split(train=nodes // 2, val=nodes // 4, seed=3)


def drawn_settings(count: int = 20, seed: int = 34) -> list[dict[str, Any]]:
    """Random settings of built-in models, the same in every process."""
    draw = random.Random(seed)
    return [_drawn(draw, number) for number in range(count)]


def _drawn(draw: random.Random, number: int) -> dict[str, Any]:
    model = ("gcn", "sage", "gin", "gat", "gatv2", "rgcn")[number % 6]
    kind = GRAPHS[number % 5]
    settings: dict[str, Any] = {
        "graph": kind,
        "model": model,
        "layers": draw.randint(1, 3),
        "hidden": draw.choice([8, 16, 24]),
        "dropout": draw.choice([0.0, 0.3, 0.6]),
        "input_dropout": draw.choice([None, 0.2]),
        "norm": draw.choice([None, "batch", "layer"]),
        "residual": draw.random() < 0.4,
        "optimizer": draw.choice(["adam", "adamw", "sgd"]),
        "lr": draw.choice([0.003, 0.01, 0.05]),
        "weight_decay": draw.choice([0.0, 5e-4, 0.01]),
        "decay": draw.choice(["all", "first"]),
        "schedule": draw.choice(["constant", "cosine", "linear", "step", "plateau"]),
        "warmup": draw.choice([0, 2]),
        "clip_norm": draw.choice([None, 0.5]),
        "accumulate": draw.choice([1, 1, 2]),
        "ema": draw.choice([None, None, 0.9]),
        "eval_every": draw.choice([1, 2]),
        "precision": draw.choice(["fp32", "fp32", "fp32", "bf16"]),
        "feature_norm": draw.choice([None, "row"]),
        "seed": draw.choice([[0], [3], [0, 1, 2]]),
    }
    if settings["schedule"] == "plateau":
        settings["warmup"] = 0
    if settings["optimizer"] == "sgd":
        settings["momentum"] = draw.choice([0.0, 0.9])
    if model in ("gat", "gatv2"):
        settings |= {"heads": draw.choice([2, 4]), "attention_dropout": draw.choice([None, 0.2])}
    if model == "sage":
        settings["aggregator"] = draw.choice(["mean", "max", "sum"])
    if model == "rgcn":
        settings["bases"] = draw.choice([None, 2])
    if kind in ("plain", "sparse", "weighted"):
        settings["label_smoothing"] = draw.choice([0.0, 0.1])
    return settings


def trained(result: Any) -> dict[str, Any]:
    """Every column of the history and all weights of every member; which members shared a step."""
    members = [result] if isinstance(result, weft.Result) else list(result)
    numbers = {}
    for member in members:
        columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in member.history.items()}
        weights = {name: value.detach().clone() for name, value in member.model.state_dict().items()}
        numbers[member.name] = {
            "status": member.status,
            "join": member.plan.join,
            "best_epoch": member.metrics["best_epoch"],
            "history": columns,
            "weights": weights,
        }
    return numbers


def _train(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train a task, or a sweep where a setting is a list; a name of a graph is one of this file."""
    settings = {"epochs": EPOCHS, **settings, "graph": graph(settings.get("graph", "plain"))}
    seeds = settings.pop("seed", [0])
    tasks = [weft.Task(**settings, seed=seed, name=f"seed {seed}") for seed in seeds]
    return trained(calls.run(tasks if len(tasks) > 1 else tasks[0], **options))


def _plan(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    settings = dict(settings)
    return calls.plan_data(calls.plan(weft.Sweep(settings.pop("graph"), **settings), **options))


def _simulate(*arguments: object) -> dict[str, Any]:
    """Groups of every policy, when each starts and ends, and the figures."""
    ended = calls.shell("queue", "simulate", *arguments, "--json")
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    decided = {}
    for run in json.loads(ended.stdout)["simulations"]:
        groups = [{name: one[name] for name in ("worker", "members", "start", "end")} for one in run["groups"]]
        decided[run["policy"]] = {"groups": groups, "refused": sorted(run["refused"]), "metrics": run["metrics"]}
    return decided


def _settings() -> dict[str, Callable[[], Any]]:
    return {
        f"{number:02} {one['model']} on {one['graph']}": partial(_train, one)
        for number, one in enumerate(drawn_settings())
    }


def _modules() -> dict[str, Callable[[], Any]]:
    drawn = (
        (modules.Base, {"seed": [0, 1, 2]}),
        (modules.Draws, {}),
        (modules.Drops, {"seed": [0, 1]}),
        (modules.RunningMean, {"seed": [0, 1]}),
        (modules.BatchNormed, {"optimizer": "sgd", "momentum": 0.9}),
        (modules.TwoOutputs, {"weight_decay": 0.01}),
        (modules.Tied, {"optimizer": torch.optim.RAdam, "schedule": "cosine"}),
        (modules.PygGCN, {"seed": [0, 1, 2]}),
        (modules.PygGAT, {}),
        (modules.PygSAGE, {"convert": False}),
    )
    return {model.__name__: partial(_train, {"model": model, "lr": 0.02, **more}) for model, more in drawn}


def _sampled() -> dict[str, Callable[[], Any]]:
    drawn: dict[str, dict[str, Any]] = {
        "sage": {"model": "sage", "fanout": (4, 3), "batch": 16},
        "gcn, three seeds": {"model": "gcn", "fanout": (3, 3), "batch": 12, "seed": [0, 1, 2], "batch_seed": 4},
        "gat": {"model": "gat", "heads": 2, "fanout": (3, -1), "batch": 20, "norm": "layer"},
        "gin of many labels": {"model": "gin", "graph": "multilabel", "fanout": (3, 2), "batch": 10},
        "a module of PyG": {"model": modules.PygSAGE, "fanout": (4, 2), "batch": 16},
    }
    built_in = {"hidden": 8, "mode": "sampled", "epochs": 4}
    return {
        name: partial(_train, (built_in if isinstance(one["model"], str) else {"mode": "sampled", "epochs": 4}) | one)
        for name, one in drawn.items()
    }


def _sharded() -> dict[str, Callable[[], Any]]:
    drawn: dict[str, dict[str, Any]] = {
        "gcn": {"model": "gcn", "hidden": 8},
        "gat": {"model": "gat", "hidden": 8, "heads": 2, "norm": "batch"},
        "sage, two seeds": {"model": "sage", "hidden": 8, "seed": [0, 1], "residual": True},
        "sampled sage": {"model": "sage", "hidden": 8, "mode": "sampled", "fanout": (3, 2), "batch": 14, "epochs": 3},
        "a module": {"model": modules.TwoBranches},
    }
    return {name: partial(_train, one, ranks=2) for name, one in drawn.items()}


def _queues() -> dict[str, Callable[[], Any]]:
    made = {f"queue {name}": ("--queue", name) for name in ("gcn", "sage", "gat", "gin", "mix")}
    for seed in range(15):
        options = ("--tasks", 20 + 10 * seed, "--seed", seed, "--gap", (0, 1.5, 6)[seed % 3])
        machine = ("--machine", ("v100-32g", "h200", "a100-40g")[seed % 3], "--workers", 1 + seed % 4)
        made[f"random {seed}"] = (*options, *machine, "--budget", ("12GiB", "26GiB", "60GiB")[seed % 3])
    return {name: partial(_simulate, *arguments) for name, arguments in made.items()}


def _plans() -> dict[str, Callable[[], Any]]:
    works: dict[str, dict[str, Any]] = {
        "one gcn": {"graph": "shape:ogbn-arxiv", "model": "gcn", "layers": 3},
        "models and widths": {
            "graph": "shape:pubmed",
            "model": ["gcn", "sage", "gat"],
            "hidden": [16, 64],
            "seed": [0, 1],
        },
        "many seeds": {"graph": "shape:cora", "model": "gcn", "lr": [0.01, 0.003], "seed": range(16)},
        "deep": {"graph": "shape:ogbn-arxiv", "model": "gin", "layers": [4, 8], "norm": "batch", "hidden": 256},
        "sampled": {
            "graph": "shape:ogbn-products",
            "model": "sage",
            "layers": 3,
            "hidden": 128,
            "mode": "sampled",
            "fanout": (15, 10, 5),
        },
        "a user's module": {"graph": graph(), "model": modules.PygGCN, "seed": [0, 1]},
        "whole products": {"graph": "shape:ogbn-products", "model": "gcn", "hidden": [64, 256]},
    }
    made = {
        f"{name}, {machine}": partial(_plan, work, machine=machine)
        for name, work in works.items()
        for machine in MACHINES
    }
    for name in ("one gcn", "many seeds", "a user's module", "deep"):
        del made[f"{name}, v100-32g"]  # they differ from those of the A100 in nothing but rates
    more: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "no room, v100-32g": (works["deep"], {"budget": "1GiB"}),
        "features in host memory, h200": (works["sampled"], {"budget": "6GiB", "features": "host"}),
        "cached features, a100-40g": (works["sampled"], {"budget": "9GiB", "features": "cached", "cache": "256MiB"}),
        "too large as a whole, v100-32g": (works["whole products"], {"budget": "8GiB"}),
        "woven and compiled, a100-40g": (works["models and widths"], {"weave": "merged", "compile": True}),
        "relations in bf16, h200": (
            {"graph": graph(), "model": "rgcn", "bases": [None, 2], "precision": "bf16", "seed": range(3)},
            {},
        ),
    }
    for name, (work, options) in more.items():
        made[name] = partial(_plan, work, machine=name.split(", ")[-1], **options)
    return made


CASES: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
    "settings": _settings,
    "modules": _modules,
    "sampled": _sampled,
    "sharded": _sharded,
    "queues": _queues,
    "plans": _plans,
}
TRAININGS = ("settings", "modules", "sampled", "sharded")


def outcome(case: Callable[[], Any]) -> Any:
    """What a case comes to, with a home of its own, so that no case depends on another."""
    before = os.environ.get("WEFT_HOME")
    with tempfile.TemporaryDirectory() as home:
        os.environ["WEFT_HOME"] = home
        try:
            return case()
        except weft.WeftError as error:
            return {"refused": type(error).__name__}
        finally:
            os.environ.pop("WEFT_HOME") if before is None else os.environ.update(WEFT_HOME=before)


def losses(kind: str, name: str) -> dict[str, list[float]]:
    """The training losses of a case by member, of the Weft in this process."""
    numbers = outcome(CASES[kind]()[name])
    return {member: one["history"]["loss"].tolist() for member, one in numbers.items()}


GOLDENS = Path(__file__).parent / "goldens.json"
