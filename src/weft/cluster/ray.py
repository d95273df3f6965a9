"""``weft run --on ray``: train a task or a sweep on the nodes of a Ray cluster.

The plan is made here: which tasks train together and what they take. Every node trains a share of them and sends
results, events and checkpoints back, which are written here as a run on one machine writes them. A share whose node is
lost continues on another one from its last checkpoint. Ray is an extra, imported only where it is used.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.core.errors import DivergedError, InputError, SpecError, TrainingError, WeftError
from weft.core.event import Event
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep, as_work
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.display import display_for
from weft.engine.events import Broadcast, Listener
from weft.engine.folder import REPORT, RunFolder, SweepFolder
from weft.engine.graphs import HOST, Graphs, with_all_splits
from weft.engine.plan import over_the_whole_graph, plan, shard_groups
from weft.engine.result import Result
from weft.engine.run import about_graphs
from weft.engine.sweep_result import SweepResult
from weft.planner.machine_profiles import PROFILES
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import FILE

HEAD = "node:__internal_head__"


@dataclass(frozen=True)
class RayNode:
    """A node: its id, memory in bytes, GPUs and their name (as Ray has it, lower case), and CPUs."""

    id: str
    memory: int
    gpus: int = 0
    gpu: str = ""
    head: bool = False
    cpus: int = 1


def import_ray() -> Any:
    """Ray; an InputError of one sentence if it is not installed."""
    try:
        import ray
    except ImportError:
        raise InputError("on='ray' needs Ray: pip install 'weft-gnn[ray]'") from None
    return ray


def connect(on: str) -> tuple[Any, bool]:
    """Ray, connected to the cluster that ``on`` names, and whether this call did it.

    ``"ray"`` is the running cluster or a new one on this machine, ``"ray://HOST:PORT"`` another one.
    """
    if on != "ray" and not (on.startswith("ray://") and len(on) > len("ray://")):
        raise SpecError(f"on={on!r} must be 'ray' or 'ray://HOST:PORT'")
    address, ray = None if on == "ray" else on, import_ray()
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ImportError, ValueError) as error:  # Ray's client is an extra of Ray's
        if address is None or "ray[client]" not in str(error):
            raise
        raise InputError(f"on={on!r} needs Ray's client: pip install 'weft-gnn[ray]' (or 'ray[client]')") from None
    except ConnectionError as error:
        raise InputError(f"on={on!r}: no Ray cluster answers there ({str(error).splitlines()[0]})") from None
    return ray, True


def nodes_of(ray: Any) -> list[RayNode]:
    """The nodes that are alive."""
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            kind = next((name.split(":", 1)[1] for name in resources if name.startswith("accelerator_type:")), "")
            gpus, cpus, memory = (int(resources.get(name, 0)) for name in ("GPU", "CPU", "memory"))
            nodes.append(RayNode(node["NodeID"], memory, gpus, kind.lower(), HEAD in resources, cpus))
    return nodes


def device_names(nodes: list[RayNode]) -> tuple[str, ...]:
    """The devices of ``nodes`` as ``DEVICE@NODE``: their GPUs, or the CPU of each if there is none at all."""
    gpus = [f"cuda:{number}@{node.id}" for node in nodes for number in range(node.gpus)]
    return tuple(gpus or [f"cpu@{node.id}" for node in nodes])


# ---- On a node

Send = Callable[[str, Any], None]  # kind ("event", "checkpoint"), and what it is
Files = dict[str, bytes]  # by their path in a folder


def train_share(
    tasks: Sequence[Task], send: Send, checkpoint: Files | None, options: RunOptions
) -> tuple[list[Any], str]:
    """Train ``tasks`` from ``checkpoint`` on, if there is one: their results, or none and what went wrong.

    A checkpoint is sent as the files of the folder, so that another node can continue if this one is lost.
    """
    from weft.engine.run import run

    with tempfile.TemporaryDirectory(prefix="weft-share-") as parent:
        folder = Path(parent) / "run"
        if checkpoint is not None:
            unpack(checkpoint, folder)

        def on_event(event: Event) -> None:
            if event.kind == "checkpoint":
                send("checkpoint", pack(folder))
            send("event", event.to_dict())

        try:
            resume = checkpoint is not None
            results = run(list(tasks), out=folder, resume=resume, progress=False, on_event=on_event, options=options)
        except WeftError as error:
            return [], f"{type(error).__name__}: {error}"
        return list(results), ""


def pack(folder: Path) -> Files:
    """The settings and checkpoints in the folder of a run."""
    files = (folder / "sweep.json", *folder.rglob(FILE))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.exists()}


def unpack(files: Files, folder: Path) -> None:
    """The inverse of :func:`pack`."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class Mailbox:
    """Messages of nodes, in the order in which they arrive. A checkpoint replaces the one before it."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, int, str, Any]] = []

    def put(self, key: str, attempt: int, kind: str, message: Any) -> None:
        """Add a message."""
        if kind == "checkpoint":
            self._messages = [sent for sent in self._messages if sent[0] != key or sent[2] != kind]
        self._messages.append((key, attempt, kind, message))

    def take(self) -> list[tuple[str, int, str, Any]]:
        """Remove and return all messages."""
        messages, self._messages = self._messages, []
        return messages


def _on_node(share: Share, attempt: int, mailbox: Any, checkpoint: Files | None, options: RunOptions) -> Any:
    """Runs on a node."""
    import ray

    def send(kind: str, message: Any) -> None:
        sent = mailbox.put.remote(share.key, attempt, kind, message)
        if kind == "checkpoint":
            ray.get(sent)  # arrives before training continues: a node that is lost then loses nothing

    begin, node = time.time(), ray.get_runtime_context().get_node_id()
    send("begin", node)
    results, error = train_share(share.tasks, send, checkpoint, options)
    ray.get(mailbox.put.remote(share.key, attempt, "end", node))  # messages of one sender stay in order: all arrived
    return {"results": results, "error": error, "seconds": time.time() - begin, "node": node}


# ---- Shares: the groups of a plan, divided over the nodes of a cluster
#
# Tasks on one graph are joined per node: a group is cut into as many shares as its part of the work is worth nodes, so
# that every node trains one share, and members of a share still train together.


@dataclass(frozen=True)
class Share:
    """Tasks that one node trains. ``key`` names it; ``num_bytes``: what its device, or that of every rank, must have.

    ``plan``: its members stack as the planner would have them on one machine.
    """

    key: str
    tasks: tuple[Task, ...]
    num_bytes: int
    plan: Plan


def shares_of(report: PlanReport, nodes: int, ranks: int = 1) -> list[Share]:
    """The groups of ``report``, which has its tasks, over ``nodes``; every share over ``ranks`` of one node."""
    groups = report.groups
    sizes = [group.cost.total_bytes for group in groups]
    if ranks > 1:
        sizes = [sharded.bytes_per_rank for sharded in shard_groups(report, ranks)]
    seconds = [group.cost.epoch_seconds * max(task.epochs for task in group.plan.tasks) for group in groups]
    total = sum(seconds) or 1.0
    shares = []
    for number, (group, spent) in enumerate(zip(groups, seconds, strict=True), 1):
        parts = divide(group.plan.tasks, max(1, round(nodes * spent / total)))
        for part_number, part in enumerate(parts, 1):
            key = str(number) if len(parts) == 1 else f"{number}.{part_number}"
            names, planned = tuple(task.label for task in part), group.plan
            why = f"share {key}: {len(names)} of a group of {len(planned.members)}, on a node that Ray chose"
            join = "stacked" if len(names) > 1 else "solo"
            joined = Plan(names, join, planned.device, why=(why, *planned.why), mode=planned.mode, batch=planned.batch)
            shares.append(Share(key, part, sizes[number - 1], joined))
    return shares


def divide(tasks: Sequence[Task], count: int) -> list[tuple[Task, ...]]:
    """``tasks`` in at most ``count`` parts of about equal size, in order."""
    count = max(1, min(count, len(tasks)))
    cuts = [len(tasks) * number // count for number in range(count + 1)]
    return [tuple(tasks[first:last]) for first, last in itertools.pairwise(cuts)]


def needs(share: Share, nodes: list[RayNode], device: str, shares: int = 1, ranks: int = 1) -> dict[str, Any]:
    """What Ray is to reserve for ``share``, one of ``shares``: a part of a GPU, or memory and CPUs of a node.

    A share takes a whole GPU while there is one for each, since Ray puts small parts on the same one; over ``ranks`` it
    takes a GPU of one node for each. Without GPUs it takes the CPUs of the smallest node that has enough: Ray gives a
    task as many threads as it reserved. Raises SpecError if no node has as much.
    """
    takes = f"share {share.key} takes {show_bytes(share.num_bytes)}{' per rank' if ranks > 1 else ''}"
    if max(node.gpus if device.startswith("cuda") else node.cpus for node in nodes) < ranks > 1:
        kind = "GPUs" if device.startswith("cuda") else "CPUs"
        raise SpecError(f"ranks={ranks}: no node of the cluster has {ranks} {kind}, and ranks share one node")
    if device.startswith("cuda"):
        largest = max((gpu_bytes(node.gpu) for node in nodes if node.gpus), default=0)
        if share.num_bytes > largest:
            raise SpecError(f"{takes}; no GPU of the cluster has as much")
        if ranks > 1:
            return {"num_cpus": 1, "num_gpus": ranks}
        per_gpu = math.ceil(shares / sum(node.gpus for node in nodes))
        part = max(math.ceil(100 * share.num_bytes / largest), 100 // per_gpu) / 100
        return {"num_cpus": 1, "num_gpus": min(1.0, part)}
    most = max((node.memory for node in nodes if node.cpus), default=0)
    if ranks * share.num_bytes > most:
        raise SpecError(f"{takes}; the largest node of the cluster has {show_bytes(most)}")
    return {"num_cpus": min(node.cpus for node in nodes if node.cpus >= ranks), "memory": ranks * share.num_bytes}


def gpu_bytes(name: str) -> int:
    """The memory of a GPU by Ray's name for it; that of the smallest known GPU if the name is unknown."""
    sizes = {key: profile.memory_bytes for key, profile in PROFILES.items() if profile.device == "cuda"}
    fitting = [size for key, size in sizes.items() if name and name in key]
    return min(fitting or list(sizes.values()))


# ---- The run

POLL_SECONDS = 0.2
MOST_ATTEMPTS = 5  # of one share: a share that kills every node it is on is not tried for ever
FORWARDED = ("note", "group", "rows", "log", "progress", "end", "checkpoint")


def run_on_ray(
    work: Task | Sweep | Sequence[Task],
    on: str = "ray",
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool | str = "auto",
    on_event: Listener | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008
) -> Result | SweepResult:
    """Train ``work`` on a Ray cluster and return what :func:`weft.run` would.

    ``on``: ``"ray"`` for the running cluster (or one started on this machine), ``"ray://HOST:PORT"`` for another.
    ``progress`` and ``on_event``: as of :func:`weft.run`. Of the ``options``, ``device="auto"`` uses the cluster's GPUs
    if it has some, ``budget`` is what a group may take on a device, and ``ranks`` spreads every group over so many
    devices of one node. A node that is lost costs what it trained since
    its last checkpoint (``checkpoint_every``). Weft, its extras and what users' modules import have to be installed on
    the nodes, and graphs that are named by a path have to exist there.
    """
    options.refuse_unread("cluster", f"does not go with --on {on}: every node trains its share on one device")
    planned = with_all_splits(as_work(work, "run_on_ray"))
    options.check_tasks([planned] if isinstance(planned, Task) else planned.tasks())
    folder: RunFolder | None = None
    if out is not None:
        folder = RunFolder(Path(out)) if isinstance(planned, Task) else SweepFolder(Path(out), planned)
        if not overwrite:
            folder.check_free()
    with ExitStack() as stack:
        if folder is not None:
            stack.callback(folder.close)
        ray, connected = connect(on)
        if connected:
            stack.callback(ray.shutdown)
        display = display_for(progress, several=True)
        shown = [] if display is None else [stack.enter_context(display)]
        return _Run(ray, planned, folder, shown, on_event).train(options)


class _Run:
    """One run on a cluster."""

    def __init__(
        self,
        ray: Any,
        work: Task | Sweep,
        folder: RunFolder | None,
        shown: Sequence[Listener],
        on_event: Listener | None,
    ) -> None:
        self._ray, self._work, self._folder = ray, work, folder
        self._tasks = [work] if isinstance(work, Task) else work.tasks()
        journal = [] if folder is None else [folder.journal]
        self._broadcast = Broadcast([*journal, *shown], on_event, uuid.uuid4().hex[:12], 0)
        # Task epochs that every share has trained, will, and per second.
        self._advanced: dict[str, dict[str, float]] = {}
        self._results: dict[str, Result] = {}
        self._failures: list[str] = []
        # The last epoch of every member: a share whose node was lost sends some again.
        self._sent: dict[tuple[str, str], int] = {}

    def train(self, options: RunOptions) -> Result | SweepResult:
        """Plan, spread, train, collect."""
        begin = time.perf_counter()
        by_gpu, by_cpu = options.device != "cpu", not options.device.startswith("cuda")
        nodes = [node for node in nodes_of(self._ray) if (by_gpu and node.gpus) or (by_cpu and node.cpus)]
        if not nodes:
            raise SpecError(f"device={options.device!r}: no node of the cluster has such a device")
        on_gpu = by_gpu and any(node.gpus for node in nodes)
        device = "cuda" if on_gpu else "cpu"
        machine = None
        if on_gpu:
            kind = next(node.gpu for node in nodes if node.gpus)
            machine = next((name for name in PROFILES if kind and kind in name), None)
            if machine is None:
                raise SpecError(f"nothing is known of the cluster's GPU {kind!r}; give device='cpu'")
        ranks = options.ranks
        whole = self._work if ranks == 1 else over_the_whole_graph(self._work)
        report = plan(whole, machine=machine, budget=options.budget)
        shares = shares_of(report, sum(node.gpus // ranks for node in nodes) if on_gpu else len(nodes), ranks)
        if not (report.fits if ranks == 1 else all(share.num_bytes <= report.budget for share in shares)):
            raise SpecError(f"{report.name}: it does not fit a device of the cluster; `weft plan` says what would")
        for share in shares:  # a SpecError before anything is written
            needs(share, nodes, device, len(shares), ranks)
        if self._folder is not None:
            self._folder.open(afresh=True)
            self._folder.save_groups([(share.key, share.plan) for share in shares])
        described = [
            {"key": share.key, "tasks": [task.label for task in share.tasks], "bytes": share.num_bytes}
            for share in shares
        ]
        stats = Graphs(HOST).stats(self._tasks[0])
        size = {"name": stats.name, "nodes": stats.num_nodes, "edges": stats.num_edges}
        graphs = [] if isinstance(self._work, Task) else list(self._work.graphs)
        self._advanced = {
            share.key: {"done": 0, "total": sum(task.epochs for task in share.tasks), "epochs_per_second": 0.0}
            for share in shares
        }
        total = sum(share["total"] for share in self._advanced.values())
        about = {"tasks": len(self._tasks), "epochs": total, "device": device, "nodes": len(nodes)}
        # The groups of shares name their metrics.
        self._emit("start", **about, graph=size, graphs=graphs, metric="", shares=described)
        # A node of GPUs keeps to what is free on each of them.
        self._train_shares(shares, replace(options, device=device, budget=None if on_gpu else options.budget))
        return self._conclude(tuple(share.plan for share in shares), time.perf_counter() - begin)

    def _train_shares(self, shares: list[Share], options: RunOptions) -> None:
        """Train every share on some node; a share whose node is lost continues on another one."""
        ray = self._ray
        # The mailbox lives on the head, which the cluster does not outlive.
        on_head = {HEAD: 0.001} if any(node.head for node in nodes_of(ray)) else {}
        mailbox = ray.remote(num_cpus=0, resources=on_head)(Mailbox).remote()
        checkpoints: dict[str, Files] = {}
        running: dict[Any, tuple[Share, int]] = {}

        def submit(share: Share, attempt: int) -> None:
            reserved = needs(share, nodes_of(ray), options.device, len(shares), options.ranks)
            # By default Ray fills half of a node before it takes the next one.
            task = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **reserved)(_on_node)
            reference = task.remote(share, attempt, mailbox, checkpoints.get(share.key), options)
            running[reference] = (share, attempt)

        try:
            for share in shares:
                submit(share, 1)
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                current = {(share.key, attempt) for share, attempt in running.values()}
                for key, attempt, kind, message in ray.get(mailbox.take.remote()):
                    if kind == "checkpoint":
                        checkpoints[key] = message
                    elif (key, attempt) in current:
                        if kind == "begin":
                            self._emit("note", key=key, message=f"share {key} begins", node=message)
                        elif kind == "event" and message["event"] in FORWARDED:
                            event = Event.from_dict(message)
                            if event.kind == "checkpoint":
                                self._emit("checkpoint", key=key, epoch=event.data.get("epoch"))
                            else:
                                data = dict(event.data)
                                if event.kind == "progress":  # of the share; that of the whole run is reported
                                    self._advanced[key] = {name: data[name] for name in self._advanced[key]}
                                    every = list(self._advanced.values())
                                    data |= {name: sum(one[name] for one in every) for name in every[0]}
                                if event.kind in ("rows", "log") and not self._keep_unsent(event, data):
                                    continue
                                if "groups" in data:  # the share is one of the groups of the whole
                                    data |= {"group": list(self._advanced).index(key) + 1, "groups": len(shares)}
                                of_member = event.kind in ("end", "log")
                                self._emit(event.kind, event.task if of_member else "", key, **data)
                for reference in ready:
                    share, attempt = running.pop(reference)
                    outcome = self._outcome(reference, share.key, attempt)
                    if outcome is not None:
                        self._finish(share, outcome)
                        continue
                    submit(share, attempt + 1)
                    how = "its last checkpoint" if share.key in checkpoints else "the beginning"
                    message = f"the node of share {share.key} was lost; it continues from {how}"
                    self._emit("note", key=share.key, message=message)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.kill(mailbox)

    def _outcome(self, reference: Any, key: str, attempt: int) -> dict[str, Any] | None:
        """What a share returned; None if its node was lost and it is to be tried again."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)  # type: ignore[no-any-return]
        except errors.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            if isinstance(error, errors.RayTaskError):
                raise TrainingError(f"share {key} failed on its node: {lines[-1][:300]}") from None
            if attempt >= MOST_ATTEMPTS:
                lost = f"share {key} lost its node {attempt} times; the last time: {lines[0][:300]}"
                raise TrainingError(lost) from None
            return None

    def _keep_unsent(self, event: Event, data: dict[str, Any]) -> bool:
        """Keep in ``data`` of a ``rows`` or ``log`` event what none has had yet; whether that is anything."""
        parts = []
        for part in data.get("members", [{"task": event.task, "first": data.get("epoch"), "rows": [()]}]):
            sent = self._sent.get((event.kind, part["task"]), 0)
            rows = part["rows"][max(sent + 1 - part["first"], 0) :]
            if rows:
                first = part["first"] + len(part["rows"]) - len(rows)
                parts.append({**part, "first": first, "rows": rows})
                self._sent[event.kind, part["task"]] = first - 1 + len(rows)
        if "members" in data:
            data["members"] = parts
        return bool(parts)

    def _emit(self, kind: str, task: str = "", key: str = "", **data: Any) -> None:
        self._broadcast(Event(kind, task or self._work.label, data, group=key))

    def _finish(self, share: Share, outcome: dict[str, Any]) -> None:
        """Collect the results of a share."""
        if outcome["error"]:
            self._failures.append(outcome["error"])
            self._emit("note", key=share.key, message=f"share {share.key} failed: {outcome['error']}")
        for result in outcome["results"]:
            self._results[result.name] = result
        where = {"node": outcome["node"][:8], "seconds": round(outcome["seconds"], 3)}
        self._emit("note", key=share.key, message=f"share {share.key} of {len(share.tasks)} tasks has ended", **where)
        if self._folder is not None and outcome["results"]:
            self._folder.save_members(outcome["results"])

    def _conclude(self, plans: tuple[Plan, ...], seconds: float) -> Result | SweepResult:
        missing = [task.label for task in self._tasks if task.label not in self._results]
        if missing:
            words = "; ".join(self._failures) or "no reason is known"
            self._emit("failed", status="failed", message=words)
            raise TrainingError(f"task {missing[0]!r} was not trained: {words}")
        results = [self._results[task.label] for task in self._tasks]
        report = {} if self._folder is None else {"report": str(self._folder.path / REPORT)}
        if isinstance(self._work, Task):
            self._emit("finish", status=results[0].status, metrics=results[0].metrics, **report)
            if results[0].status == "diverged":
                raise DivergedError(results[0].message)
            return results[0]
        graphs = about_graphs(Graphs(HOST).stats, self._work)
        result = SweepResult(self._work, results, plans, results[0].environment, seconds, graphs)
        if isinstance(self._folder, SweepFolder):
            self._folder.save_sweep(result)
        summary = result.summary()
        several = ("graphs",) if len(summary["graphs"]) > 1 else ()
        figures = {key: summary[key] for key in ("best", "best_settings", "metric", "statuses", "seconds", *several)}
        self._emit("finish", status="finished", **figures, **report)
        return result
