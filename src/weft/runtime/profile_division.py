"""Measure the phases of a group's batches before it trains; its state is unchanged afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.core.division import PhaseTimes
from weft.core.errors import InputError
from weft.runtime.group import GroupRun

if TYPE_CHECKING:
    from weft.runtime.batches.divided_source import DividedSampled


def divided_source(group: GroupRun) -> DividedSampled | None:
    """The source of ``group`` if two sides prepare its batches."""
    source = group.stacks[0].source if group.stacks else None
    if source is None or source.constant:  # a run on the whole graph imports nothing of sampling
        return None
    from weft.runtime.batches.divided_source import DividedSampled

    return source if isinstance(source, DividedSampled) else None


def profile_group(group: GroupRun, workers: int, steps: int | None = None, limit: float | None = None) -> PhaseTimes:
    """Phases of the batches of ``group`` with up to ``workers`` threads of the host.

    ``steps`` and ``limit`` (seconds): the profiler's own, unless given.
    """
    from weft.flow.division.profiler import LIMIT_SECONDS, STEPS, Profiled, profile

    steps, limit = STEPS if steps is None else steps, LIMIT_SECONDS if limit is None else limit
    source = divided_source(group)
    if source is None:
        raise InputError("only a group whose batches are divided between two sides has phases to measure")
    train = group.one_step(source)
    saved = {name: tensor.clone() for name, tensor in group.tensors().items()}
    pipeline, hardware = source.divided, source.hardware
    clocks = [(stack.state.clock, stack.state.clock.clone()) for stack in group.stacks]

    def step(item: Any) -> None:
        train(source.as_batch(item))
        for clock, before in clocks:  # there are rates for the steps of the training alone
            clock.copy_(before)

    what = Profiled(
        pipeline.host,
        pipeline.device,
        step,
        hardware.name,
        pipeline.clock,
        hardware.registry().beside(hardware.name),
        source.captured_sampling(),
    )
    try:
        return profile(what, source.seeds(), min(workers, source.slots - 1), steps, limit)
    finally:
        group.restore(saved)
