"""Measure the phases of a group's batches before it trains; its state is unchanged afterwards."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.batches.source import Batch
from weft.core.division import PhaseTimes
from weft.core.errors import InputError
from weft.runtime.group import GroupRun

if TYPE_CHECKING:
    from weft.batches.division.source import DividedSampled


LEAST_REMAINING = 0.5  # of the limit of a profile, however long recordings of its steps take


def divided_source(group: GroupRun) -> DividedSampled | None:
    """The source of ``group`` if two sides prepare its batches."""
    source = group.stacks[0].source if group.stacks else None
    if source is None or source.constant:  # a run on the whole graph imports nothing of sampling
        return None
    from weft.batches.division.source import DividedSampled

    return source if isinstance(source, DividedSampled) else None


def profile_group(group: GroupRun, workers: int, steps: int | None = None, limit: float | None = None) -> PhaseTimes:
    """Phases of the batches of ``group`` with up to ``workers`` threads of the host.

    ``steps`` and ``limit`` (seconds, recordings of steps included): the profiler's own, unless given.
    """
    from weft.batches.division import profiler

    begin = time.perf_counter()
    steps, limit = profiler.STEPS if steps is None else steps, profiler.LIMIT_SECONDS if limit is None else limit
    source = divided_source(group)
    if source is None:
        raise InputError("only a group whose batches are divided between two sides has phases to measure")
    train = group.one_step(source)
    saved = {name: tensor.clone() for name, tensor in group.tensors().items()}
    pipeline = source.divided
    pipeline.close()  # its batches would take the room of those that are profiled
    clocks = [(stack.state.clock, stack.state.clock.clone()) for stack in group.stacks]

    def step(batch: Batch) -> None:
        train(batch)
        for clock, before in clocks:  # there are rates for the steps of the training alone
            clock.copy_(before)

    whole = source.whole_step()
    alone = None if whole is None else partial(step, whole)
    if alone is not None:
        try:
            alone()
        except torch.OutOfMemoryError:  # no room to capture a step of its own shape as well
            alone = None
    what = profiler.Profiled(
        pipeline.host,
        pipeline.device,
        lambda item: step(source.as_batch(item)),
        source.hardware.name,
        pipeline.clock,
        alone,
    )
    remaining = max(limit - (time.perf_counter() - begin), LEAST_REMAINING * limit)
    try:
        workers = min(workers, source.slots - 1)
        return profiler.profile(what.with_named_failures(), source.seeds(), workers, steps, remaining)
    finally:
        group.restore(saved)
