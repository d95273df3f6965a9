"""Measure the phases of a group's batches before it trains; its state is unchanged afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.batches.source import Batch
from weft.core.division import PhaseTimes
from weft.core.errors import InputError
from weft.runtime.group import GroupRun

if TYPE_CHECKING:
    from weft.batches.division.source import DividedSampled


LEAST_LEFT = 0.5  # of the limit of a profile, however long recordings of its steps take


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
    from weft.batches.division.measuring import with_named_failures
    from weft.batches.division.profiler import LIMIT_SECONDS, STEPS, Profiled, profile

    begin = time.perf_counter()
    steps, limit = STEPS if steps is None else steps, LIMIT_SECONDS if limit is None else limit
    source = divided_source(group)
    if source is None:
        raise InputError("only a group whose batches are divided between two sides has phases to measure")
    train = group.one_step(source)
    saved = {name: tensor.clone() for name, tensor in group.tensors().items()}
    pipeline, hardware = source.divided, source.hardware
    pipeline.close()  # its batches would take the room of those that are profiled
    clocks = [(stack.state.clock, stack.state.clock.clone()) for stack in group.stacks]

    def step(batch: Batch) -> None:
        train(batch)
        for clock, before in clocks:  # there are rates for the steps of the training alone
            clock.copy_(before)

    whole = source.whole_step()
    alone = None if whole is None else partial(step, whole)
    what = Profiled(
        pipeline.host,
        pipeline.device,
        lambda item: step(source.as_batch(item)),
        hardware.name,
        pipeline.clock,
        hardware.registry().beside(hardware.name),
        alone if alone is not None and _has_room(alone) else None,
    )
    left = max(limit - (time.perf_counter() - begin), LEAST_LEFT * limit)
    try:
        return profile(with_named_failures(what), source.seeds(), min(workers, source.slots - 1), steps, left)
    finally:
        group.restore(saved)


def _has_room(step: Callable[[], None]) -> bool:
    """Whether a step of its own shape can be captured beside the others."""
    try:
        step()
    except torch.OutOfMemoryError:
        return False
    return True
