"""ShardedJob: a job whose graph is spread over ranks. Rank 0 plans, decides, reports and saves; all ranks train.

Every rank runs this with the same tasks. What rank 0 alone knows (groups, checkpoints, decisions) it sends to the
others, so all of them do the same at every step. Weights are replicated, so a checkpoint fits any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from weft.batches.sampled import Sampling, source_for
from weft.batches.sharded import Shard, ShardedSampled
from weft.batches.source import MakeSource
from weft.core.compatibility import graph_key
from weft.core.decision import Decision, Progress
from weft.core.keyed_store import KeyedStore
from weft.core.placement import on_device
from weft.core.plan import Plan
from weft.core.run_options import RunOptions
from weft.core.settings import SHARDED_KERNELS
from weft.core.task import Task
from weft.dist.node_order import order_nodes, reordered_graph
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardedAdjacency, ShardGraph
from weft.engine.control import Control
from weft.engine.driver import Driver
from weft.engine.events import EventSource
from weft.engine.folder import Groups, RunFolder
from weft.engine.home import machine_folder
from weft.engine.job import Job
from weft.engine.machine import machine_of
from weft.engine.process_state import Needs, process_state
from weft.engine.result import Result
from weft.engine.session import Session
from weft.graph.graph import Graph
from weft.ops.sharded.sharded_spmm import ShardedLaunch
from weft.planner.kernel_tuner import (
    CrossIterationSearch,
    KernelConfig,
    KernelShape,
    Multiprocessors,
    is_sensible,
)
from weft.planner.partition import split_by_edges
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import Checkpoint
from weft.runtime.group import GroupRun

# ---- The launch of the sharded kernel of a run: what was found on this machine for such a shape, or a search for it.
#
# The search is the cross-iteration search of :mod:`weft.planner.kernel_tuner`. Its iterations are aggregations of
# random numbers before the first epoch, not training steps: pieces of other sizes are summed in another order, so a
# launch that changed while training would change the bits of what is trained. All ranks try the same launches, and the
# slowest rank counts.

WARM, TIMED = 2, 3  # aggregations with every launch: the first compile the kernel and build its pieces
LEAST_EDGES = 1 << 22  # of all ranks: a search compiles a dozen kernels, which small graphs do not repay


def launch_of(config: KernelConfig) -> ShardedLaunch:
    """The kernel's launch for a configuration of the search."""
    return ShardedLaunch(config.ps, config.dist, config.wpb, config.way)


def shape_of(adj: ShardedAdjacency, features: int, ranks: Ranks) -> KernelShape:
    """The shape that the fullest rank has: the same on all ranks."""
    columns, rows = adj.forward.columns, adj.forward
    remote = int(((columns < rows.low) | (columns >= rows.high)).sum())
    every = ranks.gather_objects((columns.numel() - remote, remote, adj.num_rows))
    local, far, most = (max(counts) for counts in zip(*every, strict=True))
    return KernelShape(features, local, far, most)


def search_launch(
    adj: ShardedAdjacency, shape: KernelShape, ranks: Ranks, way: str | None = None
) -> CrossIterationSearch:
    """The whole search on ``adj``, on all ranks together; each of them finds the same.

    ``way``: the one to search launches of; None: the staged one, and then the others are timed once.
    """
    on_gpu, before = adj.device.type == "cuda", ranks.staging.launch
    x = torch.randn(adj.num_rows, shape.features, device=adj.device)

    def took(config: KernelConfig) -> float:
        """Seconds of one aggregation by the slowest rank."""
        ranks.staging.launch = launch_of(config if way is None else replace(config, way=way))
        probe = adj.without_derived()  # pieces of a launch that is not kept go with it
        samples = []
        try:
            for _ in range(WARM + TIMED):
                ranks.barrier.wait()
                begin = time.perf_counter()
                probe.aggregate(x)
                if on_gpu:
                    torch.cuda.synchronize(x.device)
                samples.append(time.perf_counter() - begin)
        finally:
            ranks.staging.launch = before
        return max(ranks.gather_objects(median(samples[WARM:])))

    count = {"count": torch.cuda.get_device_properties(adj.device).multi_processor_count} if on_gpu else {}
    limits = Multiprocessors(**count)
    search = CrossIterationSearch(lambda config: is_sensible(config, shape, limits))
    while not search.finished:
        search.tell(took(search.next()))
    kernels = [replace(search.best, way=kernel) for kernel in SHARDED_KERNELS if kernel != search.best.way]
    for config in kernels if way is None else ():
        search.trials[config] = took(config)
    return search


def choose_launch(
    adj: ShardedAdjacency, tasks: Sequence[Task], ranks: Ranks, machine: str, way: str | None = None
) -> str:
    """Set the launch of all ranks; a sentence about it. All ranks call this together. ``way``: the user's, if any."""
    shape = shape_of(adj, max(task.hidden for task in tasks), ranks)
    chosen = "" if way is None else f"-{way}"
    store, key = KeyedStore(machine_folder(machine)), f"sharded-kernel-{ranks.ranks}-{shape.key()}{chosen}.json"
    config = ranks.share(store.read(key, lambda data: KernelConfig(**data)))
    words = "found before on this machine"
    if config is None:
        search = search_launch(adj, shape, ranks, way)
        config, seconds = search.best, list(search.trials.values())
        config = config if way is None else replace(config, way=way)
        faster = seconds[0] / max(min(seconds), 1e-12)
        words = f"found in {len(seconds)} iterations, {faster:.2f}x as fast as the first"
        if ranks.rank == 0:
            with suppress(OSError):  # the next run searches again
                store.write(key, asdict(config))
    ranks.staging.launch = launch_of(config)
    pieces = f"ps={config.ps}, dist={config.dist}, warps per block={config.wpb}"
    ways = {"tiles": "by tiles of remote rows", "fetched": "remote rows first, then one sum"}
    return f"sharded kernel: {ways.get(config.way, f'{config.way}, {pieces}')} ({words})"


STILL_PAUSED, PAUSED_SECONDS = "still paused", 0.5


class SharedSession(Session):
    """A session whose decisions are those of rank 0."""

    ranks: Ranks

    def decide(self, progress: Progress) -> Decision:
        """What rank 0 decides.

        While it is paused it says so again and again: to the others, silence is a rank that is gone.
        """
        decided = None
        if self.ranks.rank == 0:
            while self.paused and self._control.requests() == self._acted_on:
                self.ranks.share(STILL_PAUSED)
                time.sleep(PAUSED_SECONDS)
            decided = super().decide(progress)
        while (decision := self.ranks.share(decided)) == STILL_PAUSED:
            pass
        return decision

    def _is_to_leave(self) -> bool:
        return False  # between two steps no rank knows what was requested of rank 0


class ShardedJob(Job):
    """``tasks`` over ``ranks``; ``folder`` and the events of ranks other than 0 go nowhere."""

    _session_kind = SharedSession

    def __init__(
        self,
        tasks: Sequence[Task],
        ranks: Ranks,
        events: EventSource,
        folder: RunFolder | None,
        options: RunOptions,
        control: Control | None = None,
        report: PlanReport | None = None,
    ) -> None:
        self._ranks = ranks
        self._shards: dict[Any, ShardGraph] = {}
        super().__init__(tasks, ranks.device, events, folder if ranks.rank == 0 else None, options, control, report)

    # ---- what rank 0 knows ---------------------------------------------------------------------------

    def _find_groups(self, saved: Groups | None) -> Groups:
        decided = None
        if self._ranks.rank == 0:
            planned = self._planned.plans if self._planned is not None else None
            if not saved and planned is None:
                planned = self._planner.groups(list(self._tasks.values()))
            plain = saved or [(str(number), replace(plan, tasks=())) for number, plan in enumerate(planned or (), 1)]
            decided = (saved is not None, [(key, self._over_ranks(plan)) for key, plan in plain])
        self._resuming, groups = self._ranks.share(decided)
        return list(groups)

    def _over_ranks(self, plan: Plan) -> Plan:
        """The plan with one step after the other; ranks meet on the host inside of a step over the whole graph.

        In sampled training they meet after a step has its gradients, which may be captured.
        """
        count, sampled = self._ranks.ranks, plan.mode == "sampled"
        why = f"{count} ranks with about as many edges each; "
        why += "gradients are summed" if sampled else "steps run eagerly, since ranks wait for each other in them"
        reasons = tuple(reason for reason in plan.why if "ranks with about" not in reason)
        join = plan.join if plan.join == "solo" else "stacked"
        return replace(
            plan,
            join=join,
            replay=plan.replay and sampled,
            compiled=False,
            row_order="by_length",
            threads=None,
            placement=on_device(plan.device),
            division=None,
            stages=(),
            shards=count,
            why=(*reasons, why),
        )

    def _checkpoint(self, key: str, tasks: list[Task]) -> Checkpoint | None:
        checkpoint = super()._checkpoint(key, tasks) if self._ranks.rank == 0 else None
        return self._ranks.share(checkpoint) if self._resuming else None

    # ---- training ------------------------------------------------------------------------------------

    def _warm(self, tasks: list[Task], plan: Plan, progress: Any) -> None:
        """Rank 0 compiles those of sampled steps for all; other kernels are compiled by their launches."""
        if tasks[0].sampled:
            if self._ranks.rank == 0:
                super()._warm(tasks, plan, progress)
            self._ranks.share(None)

    def train(self, resume: bool) -> list[Result]:
        """See :meth:`Job.train`. Memory of peers is open no longer than that: they may end before this rank."""
        try:
            return super().train(resume)
        finally:
            self._shards.clear()

    def _make_group(self, tasks: list[Task], graph: Graph, plan: Plan, checkpoint: Checkpoint | None) -> GroupRun:
        key = graph_key(tasks[0])
        if key not in self._shards:
            ranks, order = self._ranks, self._options.order
            if order != "given":  # rank 0 finds the order, all ranks take it
                nodes = order_nodes(graph.adj, order, ranks.ranks) if ranks.rank == 0 else None
                graph = reordered_graph(graph, ranks.share(nodes))
            shard = ShardGraph(graph, split_by_edges(graph.adj.indptr.cpu().numpy(), ranks.ranks).bounds, ranks)
            self._shards, adj = {key: shard}, shard.adj
            way, edges = self._options.sharded, shard.stats().num_edges
            if way is not None:
                ranks.staging.launch = ShardedLaunch(way=way)
            # The other ways have no launch to search; of sampled training only evaluations aggregate over ranks.
            searched = way not in ("tiles", "fetched") and not tasks[0].sampled and adj.device.type == "cuda"
            if searched and adj.forward.exchange.is_needed and edges >= LEAST_EDGES:
                self._events.note(choose_launch(adj, tasks, ranks, machine_of(self._device), way))
        shard = self._shards[key]
        if tasks[0].sampled:
            _ = shard.spread  # before the features are anywhere else
        return super()._make_group(tasks, shard, plan, checkpoint)

    def _source(self, task: Task, plan: Plan) -> MakeSource:
        """The whole graph in every step, or parts of sampled batches."""
        if not task.sampled:
            return partial(Shard, ranks=self._ranks)
        source_for(task)  # refuses what no sampled training can do
        sampling = Sampling(tuple(task.fanouts), task.batch, task.batch_seed)
        return partial(ShardedSampled, ranks=self._ranks, sampling=sampling)

    def _make_session(self, key: str, group: GroupRun, driver: Driver) -> Session:
        session = super()._make_session(key, group, driver)
        session.ranks = self._ranks
        return session


def train_as_rank(ranks: Ranks, tasks: Sequence[Task], options: RunOptions) -> None:
    """The part of a rank other than 0 in a run of ``tasks``."""
    with process_state(Needs.of(tasks, ranks.device, options.budget), ranks.device):
        ShardedJob(tasks, ranks, EventSource(), None, options).train(resume=False)
