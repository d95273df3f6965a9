"""Shares of a padded batch that exist: batches are padded to the most that their fan-outs allow."""

from __future__ import annotations

from weft.core.batches.batch_sizes import expected_batch
from weft.core.graph_stats import GraphStats
from weft.core.settings.fanout import picks_per_hop
from weft.core.task import Task
from weft.planner.cost.roofline import FULL, Filled


def filled(task: Task, stats: GraphStats) -> Filled:
    """Expected nodes, rows and edges of a batch of ``task`` over the most that there can be; 1 on the whole graph."""
    if not task.sampled:
        return FULL
    seeds = min(task.batch, max(stats.num_train, 1))
    found, nodes, rows, edges = expected_batch(stats, task.fanouts, seeds), seeds, 0, 0
    for fanout in picks_per_hop(task.fanouts, stats):
        picked = nodes * (fanout if fanout >= 0 else stats.num_nodes)
        rows, edges = rows + nodes, edges + picked
        nodes = min(nodes + picked, stats.num_nodes + seeds)
    return Filled(_share(found.nodes, nodes), _share(sum(found.rows), rows), _share(sum(found.edges), edges))


def _share(part: float, whole: float) -> float:
    return min(part / max(whole, 1), 1.0)
