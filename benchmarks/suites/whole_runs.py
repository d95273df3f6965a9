"""Whole runs as a user makes them, for ``benchmarks.suites.heterogeneous``: seconds from the call to the results, by
parts.

``runs``: ``weft.run(task)`` for one task after another, in one process. ``run``: ``weft.run([all tasks])``, joined as
Weft does by itself. ``run_woven``: the same with ``weave=True``. ``shells``, ``shell`` and ``shell_woven``: the same
through the command, ``python -m weft run SPEC.toml``, a process each, which also imports everything, starts the device,
reads the graph from a folder and writes results and a report.

The graph is made before and handed over as an object on the host; every run moves it to the device and derives what it
needs. All sides have run for a few epochs before anything is timed, so kernels are compiled; and what Weft learns of a
machine starts empty in every cell.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import weft
from benchmarks.harness.graphs import fresh
from benchmarks.harness.timing import synchronize
from weft.core.task import Task, rules
from weft.engine.graphs import Graphs
from weft.engine.home import HOME_VARIABLE
from weft.engine.job import Job
from weft.engine.result import Result
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun
from weft.weave import step as weaving

RUNS = ("runs", "run", "run_woven")
SHELLS = ("shells", "shell", "shell_woven")
WARM_EPOCHS = 3
# What the engine calls for each part of a run.
PARTS: dict[str, tuple[Any, str]] = {
    "planning": (Job, "_plans"),
    "moving": (Graphs, "on_device"),
    "building": (GroupRun, "__init__"),
    "recording": (GroupRun, "prepare"),  # warm-up and recording of the step
    "matching": (weaving, "merged"),  # of a woven group: taking its stacks' operators down, and matching them
    "training": (GroupRun, "advance"),
}
ANALYSIS = ("planning", "matching")
Settings = Sequence[Mapping[str, Any]]


class Parts:
    """Seconds of each of :data:`PARTS` while entered; what one part does inside of another counts for itself alone.

    Planning builds and matches groups too, without data: all of that is planning.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device, self._stack = device, ExitStack()
        self._open: list[str] = []
        self._since = 0.0

    def __enter__(self) -> Parts:
        for name, (owner, attribute) in PARTS.items():
            timed = self._timed(name, getattr(owner, attribute))
            self._stack.enter_context(patch.object(owner, attribute, timed))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            if "planning" in self._open:
                return call(*args, **options)
            self._mark()
            self._open.append(name)
            try:
                return call(*args, **options)
            finally:
                self._mark()
                self._open.pop()

        return timed

    def _mark(self) -> None:
        """What has passed since the last mark belongs to the innermost part."""
        synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def own_home() -> Iterator[None]:
    """Nothing that was learned of this machine before is known, and nothing is kept."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {HOME_VARIABLE: folder}):
        yield


def lasting(settings: Settings, epochs: int, evaluate_every: int | None) -> list[dict[str, Any]]:
    """The settings with so many epochs; ``evaluate_every`` None: evaluated after the last one only."""
    return [{**one, "epochs": epochs, "eval_every": evaluate_every or epochs} for one in settings]


# ---- in one process ----------------------------------------------------------------------------------


def measure_runs(
    side: str,
    settings: Settings,
    graph: Graph,
    device: torch.device,
    epochs: int,
    *,
    evaluate_every: int | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """Wall seconds of ``side``, and of each part: those of the pass of median length."""
    with own_home():
        train(side, lasting(settings, WARM_EPOCHS, evaluate_every), graph, device)
        chosen = lasting(settings, epochs, evaluate_every)
        passes = sorted((one_pass(side, chosen, graph, device) for _ in range(repeats)), key=lambda one: one["seconds"])
    found = passes[len(passes) // 2]
    return {**found, "passes": [round(one["seconds"], 4) for one in passes], "evaluate_every": evaluate_every}


def one_pass(side: str, settings: Settings, graph: Graph, device: torch.device) -> dict[str, Any]:
    """One pass over all tasks, timed."""
    gc.collect()
    synchronize(device)
    with Parts(device) as parts:
        begin = time.perf_counter()
        results = train(side, settings, graph, device)
        synchronize(device)
        seconds = time.perf_counter() - begin
    groups = {result.plan.members: result.plan.join for result in results}
    return {
        "seconds": seconds,
        **{f"{name}_seconds": spent for name, spent in parts.seconds.items()},
        "other_seconds": seconds - sum(parts.seconds.values()),
        "analysis_share": sum(parts.seconds[name] for name in ANALYSIS) / seconds,
        "groups": [f"{len(members)} {join}" for members, join in groups.items()],
        "losses": [result.history["loss"][-1] for result in results],
    }


def train(side: str, settings: Settings, graph: Graph, device: torch.device) -> list[Result]:
    """Everything trained as ``side`` does it; all of it must have ended well."""
    how: dict[str, Any] = {"device": str(device), "progress": False}
    if side == "runs":
        results = [weft.run(Task(graph=fresh(graph), **one), **how) for one in settings]
    else:
        shared = fresh(graph)
        tasks = [Task(graph=shared, **one) for one in settings]
        results = weft.run(tasks, weave=True if side == "run_woven" else None, **how).tasks
    for result in results:
        if result.status != "finished":
            raise RuntimeError(f"task {result.name!r}: {result.status}: {result.message}")
    return results


# ---- through the command -----------------------------------------------------------------------------


def measure_shells(
    side: str,
    settings: Settings,
    graph: Graph,
    device: torch.device,
    epochs: int,
    *,
    evaluate_every: int | None = None,
) -> dict[str, Any]:
    """Wall seconds of ``side`` through the command, once; kernels are compiled in this process before."""
    with own_home(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph.save(folder / "graph")
        inside = {"shells": "runs", "shell": "run", "shell_woven": "run_woven"}[side]
        train(inside, lasting(settings, WARM_EPOCHS, evaluate_every), graph, device)
        chosen = lasting(settings, epochs, evaluate_every)
        specs = [[one] for one in chosen] if side == "shells" else [chosen]
        files = [write_spec(folder / f"spec-{place}.toml", spec) for place, spec in enumerate(specs)]
        options = ["--device", str(device), *(["--weave"] if side == "shell_woven" else [])]
        begin = time.perf_counter()
        for file in files:
            shell(file, options)
        return {"seconds": time.perf_counter() - begin, "processes": len(files), "evaluate_every": evaluate_every}


def shell(spec: Path, options: Sequence[str]) -> None:
    """One ``weft run``, whose results lie beside its spec file."""
    command = [sys.executable, "-W", "ignore", "-m", "weft", "run", str(spec), "--out", str(spec.with_suffix(""))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"weft run {spec.name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def write_spec(path: Path, settings: Settings) -> Path:
    """A spec file of one task, or of a sweep with a table for each, on the graph in the folder ``graph`` beside it."""
    lines = [f"graph = {json.dumps(str(path.parent / 'graph'))}"]
    if len(settings) > 1:
        for one in settings:
            lines += ["[[task]]", *(f"{key} = {json.dumps(value)}" for key, value in one.items())]
    else:
        sections: dict[str, list[str]] = {"": [], "model": [], "train": []}
        for key, value in settings[0].items():
            section, name = ("model", "name") if key == "model" else (rules()[key].section, key)
            sections[section].append(f"{name} = {json.dumps(value)}")
        lines += [*sections.pop(""), *(line for name, rows in sections.items() for line in (f"[{name}]", *rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
