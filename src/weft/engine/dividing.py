"""Divide the batches of a group between the host and the trainer: profile and partition.

A profile measures the phases of the batches before the group trains; the group's state is unchanged afterwards.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weft.batches.division import profiler
from weft.batches.division.preparers import Hardware
from weft.batches.division.source import DividedSampled
from weft.batches.sampled import Sampling
from weft.batches.source import Batch, MakeSource
from weft.core.cost import Cost
from weft.core.division import Division, PhaseTimes
from weft.core.errors import InputError, WeftError
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.run_options import Placement
from weft.core.units import show_seconds
from weft.engine.machine import load_calibration, update_calibration
from weft.planner.division.partitioner import Limits, partition
from weft.planner.division.ways import PINNED_SHARE, SPARE_SLOTS, host_workers, strategy_of
from weft.runtime.group import GroupRun

PROFILE_EPOCHS, SHORTEST_PROFILE = 1.7, 1.0  # a profile ends a little later than its limit: within two epochs
LEAST_REMAINING = 0.5  # of the limit of a profile, however long recordings of its steps take
DEVICE_BUFFER = 4


@dataclass(frozen=True)
class Dividing:
    """Divides groups on ``machine``; ``hardware``: what prepares batches with the host (None: the GPU)."""

    machine: Machine
    hardware: Hardware | None = None
    options: Placement = field(default_factory=Placement)

    def source(self, source: MakeSource, plan: Plan) -> MakeSource:
        """``source``, with batches from both sides if the plan allows it and it may pay."""
        alone = self.hardware is not None and len(plan.stack_members) == 1
        if not isinstance(source, Sampling) or not (alone or plan.division is not None):
            return source
        division = plan.division
        if division is None:  # room for a profile and for what may be chosen after it
            trainer = "gpu" if self.hardware is None else self.hardware.name
            workers = host_workers(self.machine)
            division = Division(1, 1, workers, workers + SPARE_SLOTS, DEVICE_BUFFER, trainer)
        return partial(DividedSampled, sampling=source, division=division, hardware=self.hardware)

    def divide(self, group: GroupRun, source: DividedSampled, key: str) -> tuple[dict[str, Any], str]:
        """Choose a division for ``group``: the fields of its plan as they turned out, and a note for the journal."""
        plan = group.plan
        times = PhaseTimes.from_dict(plan.phases) if plan.phases else self._times(group, key)
        registry, batches = source.hardware.registry(), source.steps_per_epoch
        fixed = plan.division is not None and plan.division.strategy == "fixed" and self.options.division is None
        if plan.division is not None and (plan.phases or fixed):  # a fixed ratio of a plan is kept
            division, words = plan.division, f"as planned: {plan.division.words()}"
        else:
            slots = max(
                1, min(source.slots - 1, int(PINNED_SHARE * self.machine.host.memory_bytes / max(times.bytes, 1)))
            )
            limits = Limits(
                slots, source.division.device_buffer, host_workers(self.machine), *strategy_of(self.options)
            )
            chosen = partition(times, registry, batches, limits, source.hardware.name)
            division = chosen.division
            sides = [
                f"{show_seconds(per_batch)} by the {'host' if side.host_batches else side.trainer}"
                for side, per_batch in chosen.tried
                if not side.divided
            ]
            seconds = show_seconds(chosen.simulation.seconds)
            words = f"{division.words()}: {seconds} predicted per epoch; per batch {', '.join(sides)} alone"
        source.divide(division)
        return {"division": source.division, "phases": times.to_dict()}, words

    def _times(self, group: GroupRun, key: str) -> PhaseTimes:
        """Phase times from the calibration of the machine, or from a profile, which is kept there."""
        calibration = load_calibration(self.machine)
        times = None if calibration is None else calibration.phases.get(key)
        if times is not None:
            return times
        predicted = Cost.from_dict(group.plan.cost).epoch_seconds if group.plan.cost else 0.0
        limit = profiler.LIMIT_SECONDS
        if predicted:
            limit = min(max(PROFILE_EPOCHS * predicted, SHORTEST_PROFILE), profiler.LIMIT_SECONDS)
        times = profile_group(group, host_workers(self.machine), limit=limit)
        with suppress(WeftError, OSError):  # a calibration that cannot be written is no reason to stop
            update_calibration(self.machine, lambda before: before.with_phases(key, times))
        return times


def divided_source(group: GroupRun) -> DividedSampled | None:
    """The source of ``group`` if two sides prepare its batches."""
    source = group.stacks[0].source if group.stacks else None
    return source if isinstance(source, DividedSampled) else None


def profile_group(group: GroupRun, workers: int, steps: int | None = None, limit: float | None = None) -> PhaseTimes:
    """Phases of the batches of ``group`` with up to ``workers`` threads of the host.

    ``steps`` and ``limit`` (seconds, recordings of steps included): the profiler's own, unless given.
    """
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
