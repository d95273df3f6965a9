"""A team's queue: jobs that arrive over time, as single tasks with the second at which each is submitted.

A job is a sweep, one task, several seeds of a module of PyG, or inference that is repeated every few seconds
(``team_queue.json``, format below). ``graph`` and settings are those of :class:`weft.Task`.

    {"name": ..., "user": ..., "submit_at_s": 3, "graph": "shape:pubmed", "sweep": {...}, "epochs": 100}
    {..., "task": {...}}    {..., "module": "torch_geometric.nn.GCN", "module_args": {...}, "seeds": [0, 1]}
    {..., "infer": {"of": JOB, "nodes": 10, "every_s": 1, "times": 20, "latency_target_s": 0.1}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.serve.submissions import given_settings

QUEUE = Path(__file__).with_name("team_queue.json")
MODULE = "benchmarks.queue_runs.team:pyg_module"  # what a task of the queue names as its model


@dataclass(frozen=True)
class Arrival:
    """One task: its job, the second of its submission, its user and its settings.

    ``of``: an inference task uses the weights of the first task of that job, and ``settings`` are that task's.
    """

    job: str
    label: str
    at: float
    user: str
    settings: Mapping[str, Any]
    of: str = ""
    infer: Mapping[str, Any] = field(default_factory=dict)


def pyg_module(in_features: int, out_features: int, kind: str, heads: int | None = None, **options: Any) -> nn.Module:
    """A model of PyG by the name of its class: ``kind="GCN"``; ``heads`` is a setting of a task."""
    from torch_geometric.nn import models

    options |= {} if heads is None else {"heads": heads}
    made: nn.Module = getattr(models, kind)(in_features, out_channels=out_features, **options)
    return made


def read_jobs(path: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The jobs of a file, or those whose names begin with one of ``names``."""
    jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
    return [job for job in jobs if not names or job["name"].startswith(tuple(names))]


def shapes_of(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shapes of the graphs of ``jobs``, each once."""
    return list(dict.fromkeys(job["graph"].removeprefix("shape:") for job in jobs if "graph" in job))


def arrivals(jobs: Sequence[Mapping[str, Any]], graphs: Mapping[str, Path], epochs: int | None = None) -> list[Arrival]:
    """The tasks of ``jobs`` in order of submission; ``epochs`` replaces those of every job."""
    found: list[Arrival] = []
    for job in jobs:
        if "infer" not in job:
            tasks = _tasks(job, str(graphs[job["graph"].removeprefix("shape:")]), epochs or job["epochs"])
            found += [
                Arrival(job["name"], f"{job['name']}/{number:02}", job["submit_at_s"], job["user"], settings)
                for number, settings in enumerate(tasks)
            ]
    first = {one.job: one for one in reversed(found)}
    for job in jobs:
        if "infer" in job and job["infer"]["of"] in first:
            found += _requests(job, first[job["infer"]["of"]])
    return sorted(found, key=lambda one: one.at)


def _tasks(job: Mapping[str, Any], graph: str, epochs: int) -> Iterator[dict[str, Any]]:
    if "sweep" in job:
        members: Sequence[Task] = Sweep(graph, epochs=epochs, **job["sweep"]).tasks()
    elif "task" in job:
        members = [Task(graph=graph, epochs=epochs, **job["task"])]
    else:
        args = {"kind": job["module"].rpartition(".")[2], **job["module_args"]}
        shared = {"graph": graph, "model": MODULE, "epochs": epochs}
        shared |= {"heads": args.pop("heads")} if "heads" in args else {}
        members = [Task(**shared, model_args=args, seed=seed) for seed in job["seeds"]]
    for task in members:
        settings = given_settings(task)
        yield {name: value for name, value in settings.items() if name != "name"}


def _requests(job: Mapping[str, Any], trained: Arrival) -> Iterator[Arrival]:
    asked = job["infer"]
    for number in range(asked["times"]):
        at = job["submit_at_s"] + number * asked["every_s"]
        nodes = [place + number for place in range(asked["nodes"])]
        infer = {"nodes": nodes, "latency_target": asked["latency_target_s"]}
        yield Arrival(
            job["name"], f"{job['name']}/{number:02}", at, job["user"], trained.settings, trained.label, infer
        )
