"""``weft run --on ray``: train a task or a sweep on the nodes of a Ray cluster.

The plan is made here: which tasks train together and what they take. Every node gets a share of them
(:mod:`weft.cluster.ray`); results, events and checkpoints come back, and are written here as a run on one machine
writes them.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.core.errors import DivergedError, InputError, SpecError, TrainingError, WeftError
from weft.core.event import Event
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep, as_work
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.engine.events import Broadcast, Listener
from weft.engine.folder import REPORT, RunFolder, SweepFolder
from weft.engine.graphs import HOST, Graphs, with_all_splits
from weft.engine.plan import plan
from weft.engine.result import Result
from weft.engine.run import about_graph
from weft.engine.sweep_result import SweepResult
from weft.planner.machine_profiles import PROFILES
from weft.planner.report.plan_report import GroupEstimate, PlanReport
from weft.runtime.checkpoint import FILE

# ---- The nodes of a Ray cluster, and the connection to it. Ray is an extra, imported here and where it is used.

HEAD = "node:__internal_head__"


@dataclass(frozen=True)
class Node:
    """A node: its id, memory in bytes, GPUs and what they are called (as Ray calls them, lower case), and CPUs."""

    id: str
    memory: int
    gpus: int = 0
    gpu: str = ""
    head: bool = False
    cpus: int = 1


def import_ray() -> Any:
    """Ray, or one sentence."""
    try:
        import ray
    except ImportError:
        raise InputError("on='ray' needs Ray: pip install 'weft-gnn[ray]'") from None
    return ray


def address_of(on: str) -> str | None:
    """``"ray"``: the cluster at hand, or one on this machine (None); ``"ray://host:port"``: that one."""
    if on == "ray":
        return None
    if on.startswith("ray://") and len(on) > len("ray://"):
        return on
    raise SpecError(f"on={on!r} must be 'ray' or 'ray://HOST:PORT'")


def connect(on: str) -> tuple[Any, bool]:
    """Ray, connected to the cluster that ``on`` names, and whether this call did it."""
    address, ray = address_of(on), import_ray()
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


def nodes_of(ray: Any) -> list[Node]:
    """The nodes that are there."""
    found = []
    for one in ray.nodes():
        if one["Alive"]:
            has = one["Resources"]
            kind = next((name.split(":", 1)[1] for name in has if name.startswith("accelerator_type:")), "")
            gpus, cpus, memory = (int(has.get(name, 0)) for name in ("GPU", "CPU", "memory"))
            found.append(Node(one["NodeID"], memory, gpus, kind.lower(), HEAD in has, cpus))
    return found


def device_names(nodes: list[Node]) -> tuple[str, ...]:
    """The devices of ``nodes`` as ``DEVICE@NODE``: their GPUs, or the CPU of each if there is none at all."""
    gpus = [f"cuda:{place}@{node.id}" for node in nodes for place in range(node.gpus)]
    return tuple(gpus or [f"cpu@{node.id}" for node in nodes])


# ---- What a node does: train a share in a folder of its own, and send events and checkpoints home while it does.
#
# A checkpoint goes home as the bytes of the folder, so that another node can continue if this one is lost.

Send = Callable[[str, Any], None]  # kind ("event", "checkpoint"), and what it is


def train_share(
    tasks: Sequence[Task], send: Send, checkpoint: bytes | None, options: RunOptions
) -> tuple[list[Any], str]:
    """Train ``tasks`` from ``checkpoint`` on, if there is one: their results, or none and what went wrong."""
    from weft.engine.run import run

    with tempfile.TemporaryDirectory(prefix="weft-share-") as place:
        folder = Path(place) / "run"
        if checkpoint is not None:
            unpack(checkpoint, folder)

        def on_event(event: Event) -> None:
            if event.kind == "checkpoint":
                send("checkpoint", pack(folder))
            send("event", event.to_dict())

        try:
            resume = checkpoint is not None
            found = run(list(tasks), out=folder, resume=resume, progress=False, on_event=on_event, options=options)
        except WeftError as error:
            return [], f"{type(error).__name__}: {error}"
        return list(found), ""


def pack(folder: Path) -> bytes:
    """The settings and checkpoints in the folder of a run."""
    with io.BytesIO() as kept:
        with tarfile.open(fileobj=kept, mode="w") as archive:
            for path in (folder / "sweep.json", *folder.rglob(FILE)):
                if path.exists():
                    archive.add(path, str(path.relative_to(folder)))
        return kept.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """The inverse of :func:`pack`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


# ---- Shares: the groups of a plan, divided over the nodes of a cluster.
#
# Tasks on one graph are joined per node: a group is cut into as many shares as its part of the work is worth nodes, so
# that every node trains one share, and members of a share still train together.


@dataclass(frozen=True)
class Share:
    """Tasks that one node trains. ``key`` names it; ``num_bytes``: what its device must have, at most."""

    key: str
    tasks: tuple[Task, ...]
    num_bytes: int


def shares_of(report: PlanReport, nodes: int) -> list[Share]:
    """The groups of ``report``, which has its tasks, over ``nodes``."""
    counts = _counts([group.cost.epoch_seconds * _epochs(group) for group in report.groups], nodes)
    found = []
    for number, (group, count) in enumerate(zip(report.groups, counts, strict=True), 1):
        parts = divide(group.plan.tasks, count)
        keys = [str(number)] if len(parts) == 1 else [f"{number}.{place}" for place in range(1, len(parts) + 1)]
        found += [Share(key, part, group.cost.total_bytes) for key, part in zip(keys, parts, strict=True)]
    return found


def _epochs(group: GroupEstimate) -> int:
    return max(task.epochs for task in group.plan.tasks)


def _counts(seconds: Sequence[float], nodes: int) -> list[int]:
    """How many nodes every group is worth, at least one."""
    total = sum(seconds) or 1.0
    return [max(1, round(nodes * one / total)) for one in seconds]


def divide(tasks: Sequence[Task], count: int) -> list[tuple[Task, ...]]:
    """``tasks`` in at most ``count`` parts of about equal size, in order."""
    count = max(1, min(count, len(tasks)))
    cuts = [len(tasks) * place // count for place in range(count + 1)]
    return [tuple(tasks[first:last]) for first, last in itertools.pairwise(cuts)]


# ---- A Ray cluster: connect to it, see what its nodes have, and run shares on them.
#
# Ray is an extra. A share asks for what its plan says it takes: a part of a GPU by its bytes, or of a node's memory.

POLL_SECONDS = 0.2
MOST_ATTEMPTS = 5  # of one share: a share that kills every node it is on is not tried for ever

Take = Callable[[str, str, Any], None]  # key of a share, kind of message, message


@contextmanager
def connected(on: str) -> Iterator[Cluster]:
    """The cluster that ``on`` names. What was connected before stays so."""
    ray, mine = connect(on)
    try:
        yield Cluster(ray)
    finally:
        if mine:
            ray.shutdown()


@dataclass
class _Running:
    share: Share
    attempt: int


@dataclass
class Cluster:
    """The nodes that Ray has, and shares on them. ``notes``: what went wrong on the way."""

    ray: Any
    notes: list[str] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """Those that are there."""
        return nodes_of(self.ray)

    def train(self, shares: list[Share], options: RunOptions, take: Take, done: Callable[[Share, Any], None]) -> None:
        """Train every share somewhere; ``take`` gets messages, ``done`` the results of a share or its error.

        A share whose node is lost continues on another one, from the last checkpoint that came home.
        """
        mailbox = self._mailbox()
        kept: dict[str, bytes] = {}
        reserve = partial(needs, device=options.device, shares=len(shares), cpus=least_cpus(self.nodes()))
        submit = partial(self._submit, reserve, mailbox, options)
        running = {submit(share, 1, None): _Running(share, 1) for share in shares}

        def deliver() -> None:
            for key, attempt, kind, message in self.ray.get(mailbox.take.remote()):
                if kind == "checkpoint":
                    kept[key] = message
                elif any(one.share.key == key and one.attempt == attempt for one in running.values()):
                    take(key, kind, message)

        try:
            while running:
                ready, _ = self.ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                deliver()
                for reference in ready:
                    one = running.pop(reference)
                    outcome = self._outcome(reference, one)
                    if outcome is not None:
                        done(one.share, outcome)
                        continue
                    again = submit(one.share, one.attempt + 1, kept.get(one.share.key))
                    running[again] = _Running(one.share, one.attempt + 1)
                    how = "its last checkpoint" if one.share.key in kept else "the beginning"
                    take(one.share.key, "lost", f"the node of share {one.share.key} was lost; it continues from {how}")
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)
            self.ray.kill(mailbox)

    def _outcome(self, reference: Any, one: _Running) -> Any:
        """What a share came to; None if its node was lost and it is to be tried again."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            raise TrainingError(f"share {one.share.key} failed on its node: {_last_line(error)}") from None
        except errors.RayError as error:
            if one.attempt >= MOST_ATTEMPTS:
                raise TrainingError(
                    f"share {one.share.key} lost its node {one.attempt} times; the last time: {_first_line(error)}"
                ) from None
            return None

    def _mailbox(self) -> Any:
        """Where nodes send messages: beside the head, which the cluster does not outlive."""
        on_head = {HEAD: 0.001} if any(node.head for node in self.nodes()) else {}
        return self.ray.remote(num_cpus=0, resources=on_head)(Mailbox).remote()

    def _submit(
        self,
        reserve: Callable[[Share, list[Node]], dict[str, Any]],
        mailbox: Any,
        options: RunOptions,
        share: Share,
        attempt: int,
        checkpoint: bytes | None,
    ) -> Any:
        wanted = reserve(share, self.nodes())
        # Ray fills half of a node before it takes the next one, unless it is asked to spread.
        task = self.ray.remote(max_retries=0, scheduling_strategy="SPREAD", **wanted)(_on_node)
        return task.remote(share, attempt, mailbox, checkpoint, options)


def least_cpus(nodes: list[Node]) -> int:
    """CPUs of the smallest node that has any."""
    return min((node.cpus for node in nodes if node.cpus), default=1)


def needs(share: Share, nodes: list[Node], device: str, shares: int = 1, cpus: int = 1) -> dict[str, Any]:
    """What Ray is to reserve for ``share``, one of ``shares``: a part of a GPU, or memory and ``cpus`` of a node.

    A share takes a whole GPU while there is one for each, since Ray puts small parts on the same one. Without GPUs its
    ``cpus`` matter: Ray gives a task as many threads as it reserved. Refused if no node has as much memory.
    """
    if device.startswith("cuda"):
        largest = max((gpu_bytes(node.gpu) for node in nodes if node.gpus), default=0)
        if share.num_bytes > largest:
            raise SpecError(f"share {share.key} takes {show_bytes(share.num_bytes)}; no GPU of the cluster has as much")
        beside = math.ceil(shares / sum(node.gpus for node in nodes))  # shares of one GPU
        part = max(math.ceil(100 * share.num_bytes / largest), 100 // beside) / 100
        return {"num_cpus": 1, "num_gpus": min(1.0, part)}
    most = max((node.memory for node in nodes if node.cpus), default=0)
    if share.num_bytes > most:
        raise SpecError(
            f"share {share.key} takes {show_bytes(share.num_bytes)}; "
            f"the largest node of the cluster has {show_bytes(most)}"
        )
    return {"num_cpus": cpus, "memory": share.num_bytes}


def gpu_bytes(name: str) -> int:
    """The memory of a GPU by the name that Ray has for it; that of the smallest one known, if the name is not."""
    sizes = {key: profile.memory_bytes for key, profile in PROFILES.items() if profile.device == "cuda"}
    fitting = [size for key, size in sizes.items() if name and name in key]
    return min(fitting or list(sizes.values()))


class Mailbox:
    """Messages of nodes, in the order in which they arrive. A checkpoint replaces the one before it."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, int, str, Any]] = []

    def put(self, key: str, attempt: int, kind: str, message: Any) -> None:
        """Add a message."""
        if kind == "checkpoint":
            self._messages = [one for one in self._messages if one[0] != key or one[2] != kind]
        self._messages.append((key, attempt, kind, message))

    def take(self) -> list[tuple[str, int, str, Any]]:
        """All messages; they are gone then."""
        found, self._messages = self._messages, []
        return found


def _on_node(share: Share, attempt: int, mailbox: Any, checkpoint: bytes | None, options: RunOptions) -> Any:
    """Runs on a node."""
    import ray

    def send(kind: str, message: Any) -> None:
        sent = mailbox.put.remote(share.key, attempt, kind, message)
        if kind == "checkpoint":
            ray.get(sent)  # home before training goes on: a node that is lost then is not missed

    begin, node = time.time(), ray.get_runtime_context().get_node_id()
    send("begin", node)
    found, error = train_share(share.tasks, send, checkpoint, options)
    ray.get(mailbox.put.remote(share.key, attempt, "end", node))  # messages of one sender stay in order: all are home
    return {"results": found, "error": error, "seconds": time.time() - begin, "node": node}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


FORWARDED = ("note", "progress", "end", "checkpoint")


def run_on_ray(
    work: Task | Sweep | Sequence[Task],
    on: str = "ray",
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_event: Listener | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008
) -> Result | SweepResult:
    """Train ``work`` on a Ray cluster and return what :func:`weft.run` would.

    ``on``: ``"ray"`` for the cluster at hand (or one started on this machine), ``"ray://HOST:PORT"`` for another.
    Of the ``options``, ``device="auto"`` uses the cluster's GPUs if it has some, and ``budget`` is what a group may
    take on a device. A node that is lost costs what it trained since its last checkpoint (``checkpoint_every``).
    Weft, its extras and what users' modules import have to be installed on the nodes, and graphs that are named by a
    path have to be there.
    """
    options.refuse_unread("cluster", f"does not go with --on {on}: every node trains its share on one device")
    planned = with_all_splits(as_work(work, "run_on_ray"))
    folder = _folder(out, planned, overwrite)
    try:
        with connected(on) as cluster:
            return _Run(cluster, planned, folder, on_event, options).train()
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
        options: RunOptions,
    ) -> None:
        device = options.device
        self._cluster, self._work, self._folder = cluster, work, folder
        self._nodes = [node for node in cluster.nodes() if _usable(node, device)]
        if not self._nodes:
            raise SpecError(f"device={device!r}: no node of the cluster has such a device")
        self._device = "cuda" if device != "cpu" and any(node.gpus for node in self._nodes) else "cpu"
        self._options = replace(options, device=self._device)
        self._tasks = [work] if isinstance(work, Task) else work.tasks()
        journal = [] if folder is None else [folder.journal]
        self._emit = Broadcast(journal, on_event, uuid.uuid4().hex[:12], 0)
        self._results: dict[str, Result] = {}
        self._failures: list[str] = []

    def train(self) -> Result | SweepResult:
        """Plan, spread, train, collect."""
        begin = time.perf_counter()
        report = plan(
            self._work, machine=_machine(self._nodes) if self._device == "cuda" else None, budget=self._options.budget
        )
        if not report.fits:
            raise SpecError(f"{report.name}: it does not fit a device of the cluster; `weft plan` says what would")
        slots = sum(node.gpus for node in self._nodes) if self._device == "cuda" else len(self._nodes)
        shares = shares_of(report, slots)
        if self._folder is not None:
            self._folder.open(afresh=True)
            self._folder.save_groups([(share.key, _plan_of(share, report)) for share in shares])
        self._tell("start", tasks=len(self._tasks), device=self._device, nodes=len(self._nodes), shares=_about(shares))
        # A node of GPUs keeps to what is free on each of them.
        options = self._options if self._device == "cpu" else replace(self._options, budget=None)
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
