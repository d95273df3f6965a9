"""Describe full and sampled training for a plan: steps per epoch, stages, and why."""

from __future__ import annotations

from weft.core.graph_stats import GraphStats
from weft.core.settings.fanout import show_hop
from weft.core.stage import Stage
from weft.core.task import Task

QUEUE_DEPTH = 2  # finished batches that wait behind a stage
MODE_IS_SET = "mode='sampled' is set"


def steps_per_epoch(task: Task, stats: GraphStats) -> int:
    """Steps that an epoch of ``task`` has: one on the whole graph, else as many as there are batches of seeds."""
    return -(-max(stats.num_train, 1) // task.batch) if task.sampled else 1


def why_this_mode(task: Task, stats: GraphStats) -> str:
    """The sentence that a plan says about a sampled task."""
    given = MODE_IS_SET if task.mode == "sampled" else "the task says how to sample"
    fanout = ", ".join(show_hop(hop) for hop in task.fanouts)
    return (
        f"sampled: {given}; {steps_per_epoch(task, stats):,} steps per epoch of up to {task.batch:,} seeds, "
        f"neighbours per hop {fanout}"
    )


def stages_of(task: Task, device: str) -> tuple[Stage, ...]:
    """The way of a batch: of the whole graph one stage; of sampled batches those that overlap."""
    train = Stage("train", "gpu" if device == "cuda" else "cpu")
    if not task.sampled:
        return (train,)
    names = ("sample", "fetch", "transfer")
    return (*(Stage(name, train.resource, depth=QUEUE_DEPTH) for name in names), train)


def may_sample(task: Task) -> bool:
    """Whether the choice is left to the plan, and Weft can sample for the model."""
    return task.mode == "auto" and not task.sampled and task.traits is not None and task.norm != "batch"
