"""``weft run --on ray``: train a task or a sweep on the nodes of a Ray cluster.

The plan is made here: which tasks train together and what they take. Every node gets a share of them
(:mod:`weft.cluster.shares`); results, events and checkpoints come back, and are written here as a run on one machine
writes them.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.cluster.ray_cluster import Cluster, connected
from weft.cluster.ray_nodes import Node
from weft.cluster.shares import Share, shares_of
from weft.core.errors import DivergedError, SpecError, TrainingError
from weft.core.event import Event
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.base.all_splits import with_all_splits
from weft.engine.base.graph_cache import HOST, Graphs
from weft.engine.planning.plan_report_builder import plan
from weft.engine.results.result import Result
from weft.engine.results.sweep_result import SweepResult
from weft.engine.run import about_graph
from weft.engine.training.decisions import CHECKPOINT_SECONDS
from weft.engine.training.event_source import Broadcast, Listener
from weft.engine.training.run_folder import REPORT, RunFolder, SweepFolder
from weft.planner.machine_profiles import PROFILES
from weft.planner.report.plan_report import PlanReport

FORWARDED = ("note", "progress", "end", "checkpoint")


def run_on_ray(
    work: Task | Sweep | Sequence[Task],
    on: str = "ray",
    *,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_event: Listener | None = None,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    budget: str | float | None = None,
) -> Result | SweepResult:
    """Train ``work`` on a Ray cluster and return what :func:`weft.run` would.

    ``on``: ``"ray"`` for the cluster at hand (or one started on this machine), ``"ray://HOST:PORT"`` for another.
    ``device``: ``"auto"`` uses the cluster's GPUs if it has some. ``budget``: bytes that a group may take on a device.
    A node that is lost costs what it trained since its last checkpoint (``checkpoint_every`` seconds).
    Weft, its extras and what users' modules import have to be installed on the nodes, and graphs that are named by a
    path have to be there.
    """
    sweep = work if isinstance(work, Sweep) else None if isinstance(work, Task) else Sweep.from_tasks(list(work))
    planned: Task | Sweep = with_all_splits(work if isinstance(work, Task) else sweep)  # type: ignore[arg-type]
    folder = _folder(out, planned, overwrite)
    try:
        with connected(on) as cluster:
            return _Run(cluster, planned, folder, on_event, checkpoint_every, device, budget).train()
    finally:
        if folder is not None:
            folder.close()


def _folder(out: str | os.PathLike[str] | None, work: Task | Sweep, overwrite: bool) -> RunFolder | None:
    if out is None:
        return None
    folder = RunFolder(Path(out)) if isinstance(work, Task) else SweepFolder(Path(out), work)
    if not overwrite:
        folder.check_free()
    return folder


class _Run:
    """One run on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        work: Task | Sweep,
        folder: RunFolder | None,
        on_event: Listener | None,
        checkpoint_every: float,
        device: str,
        budget: str | float | None,
    ) -> None:
        self._cluster, self._work, self._folder = cluster, work, folder
        self._nodes = [node for node in cluster.nodes() if _usable(node, device)]
        if not self._nodes:
            raise SpecError(f"device={device!r}: no node of the cluster has such a device")
        self._device = "cuda" if device != "cpu" and any(node.gpus for node in self._nodes) else "cpu"
        self._every, self._budget = checkpoint_every, budget
        self._tasks = [work] if isinstance(work, Task) else work.tasks()
        journal = [] if folder is None else [folder.journal]
        self._emit = Broadcast(journal, on_event, uuid.uuid4().hex[:12], 0)
        self._results: dict[str, Result] = {}
        self._failures: list[str] = []

    def train(self) -> Result | SweepResult:
        """Plan, spread, train, collect."""
        begin = time.perf_counter()
        report = plan(
            self._work, machine=_machine(self._nodes) if self._device == "cuda" else None, budget=self._budget
        )
        if not report.fits:
            raise SpecError(f"{report.name}: it does not fit a device of the cluster; `weft plan` says what would")
        slots = sum(node.gpus for node in self._nodes) if self._device == "cuda" else len(self._nodes)
        shares = shares_of(report, slots)
        if self._folder is not None:
            self._folder.open(afresh=True)
            self._folder.save_groups([(share.key, _plan_of(share, report)) for share in shares])
        self._tell("start", tasks=len(self._tasks), device=self._device, nodes=len(self._nodes), shares=_about(shares))
        options: dict[str, Any] = {"device": self._device, "progress": False, "checkpoint_every": self._every}
        if self._device == "cpu":
            options["budget"] = self._budget
        self._cluster.train(shares, options, self._take, self._done)
        return self._conclude(shares, report, time.perf_counter() - begin)

    # ---- while it trains ---------------------------------------------------------------------------------

    def _tell(self, kind: str, task: str = "", key: str = "", **data: Any) -> None:
        self._emit(Event(kind, task or self._work.label, data, group=key))

    def _take(self, key: str, kind: str, message: Any) -> None:
        if kind == "lost":
            self._tell("note", key=key, message=message)
        elif kind == "begin":
            self._tell("note", key=key, message=f"share {key} begins", node=message)
        elif kind == "event" and message["event"] in FORWARDED:
            event = Event.from_dict(message)
            if event.kind == "checkpoint":
                self._tell("checkpoint", key=key, epoch=event.data.get("epoch"))
            else:
                self._tell(event.kind, event.task if event.kind == "end" else "", key, **event.data)

    def _done(self, share: Share, outcome: dict[str, Any]) -> None:
        if outcome["error"]:
            self._failures.append(outcome["error"])
            self._tell("note", key=share.key, message=f"share {share.key} failed: {outcome['error']}")
        for result in outcome["results"]:
            self._results[result.name] = result
        where = {"node": outcome["node"][:8], "seconds": round(outcome["seconds"], 3)}
        self._tell("note", key=share.key, message=f"share {share.key} of {len(share.tasks)} tasks has ended", **where)
        if self._folder is not None and outcome["results"]:
            self._folder.save_members(outcome["results"])

    # ---- at the end --------------------------------------------------------------------------------------

    def _conclude(self, shares: list[Share], report: PlanReport, seconds: float) -> Result | SweepResult:
        missing = [task.label for task in self._tasks if task.label not in self._results]
        if missing:
            words = "; ".join(self._failures) or "no reason is known"
            self._tell("failed", status="failed", message=words)
            raise TrainingError(f"task {missing[0]!r} was not trained: {words}")
        found = [self._results[task.label] for task in self._tasks]
        if isinstance(self._work, Task):
            self._tell("finish", status=found[0].status, metrics=found[0].metrics, **self._report())
            if found[0].status == "diverged":
                raise DivergedError(found[0].message)
            return found[0]
        plans = tuple(_plan_of(share, report) for share in shares)
        result = SweepResult(self._work, found, plans, found[0].environment, seconds, self._graphs(self._work))
        if isinstance(self._folder, SweepFolder):
            self._folder.save_sweep(result)
        whole = result.summary()
        self._tell(
            "finish",
            status="finished",
            **{key: whole[key] for key in ("best", "metric", "statuses", "seconds")},
            **self._report(),
        )
        return result

    def _report(self) -> dict[str, str]:
        return {} if self._folder is None else {"report": str(self._folder.path / REPORT)}

    def _graphs(self, sweep: Sweep) -> dict[str, Any]:
        graphs = Graphs(HOST)
        first = {sweep.graph_of(task): task for task in reversed(sweep.tasks())}
        return {name: about_graph(graphs.stats(first[name])) for name in sweep.graphs}


def _usable(node: Node, device: str) -> bool:
    if device.startswith("cuda"):
        return node.gpus > 0
    return node.cpus > 0 or (device == "auto" and node.gpus > 0)


def _machine(nodes: list[Node]) -> str:
    """The profile of the cluster's GPUs."""
    kind = next(node.gpu for node in nodes if node.gpus)
    found = next((name for name in PROFILES if kind and kind in name), None)
    if found is None:
        raise SpecError(f"nothing is known of the cluster's GPU {kind!r}; give device='cpu'")
    return found


def _plan_of(share: Share, report: PlanReport) -> Plan:
    """The plan of a share: its members stack as the planner would have them on one machine."""
    names = tuple(task.label for task in share.tasks)
    group = next(one.plan for one in report.groups if names[0] in one.plan.members)
    why = (f"share {share.key}: {len(names)} of a group of {len(group.members)}, on a node that Ray found", *group.why)
    return Plan(names, join="stacked" if len(names) > 1 else "solo", device=group.device, why=why, mode=group.mode)


def _about(shares: list[Share]) -> list[dict[str, Any]]:
    return [{"key": one.key, "tasks": [task.label for task in one.tasks], "bytes": one.num_bytes} for one in shares]
