"""Schedules of real threads and queues, with random phase durations, keep to MorphGL's Equations 2 to 4."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

from examples.thread_accelerator import PacedDevice, PacedHost, ThreadAccelerator
from tests.flow.division.preparers import order, sides
from tests.planner.division.constraints import violations
from weft.batches.division.executor import DividedPipeline
from weft.core.division import Division
from weft.planner.division.simulator import Activity, Simulation

pytestmark = pytest.mark.timeout(60)
PHASES = ("batching_cpu", "transfer_pcie", "batching_npu", "transfer_npu", "training_npu")


class Spans(list):
    """The spans of an accelerator, each with the batch that its thread has begun last."""

    def __init__(self, begun: threading.local) -> None:
        super().__init__()
        self._begun = begun

    def append(self, span) -> None:
        super().append((*span, self._begun.batch))


class Noted:
    """A side that says which batch its thread works on."""

    def __init__(self, inner, begun: threading.local) -> None:
        self._inner, self._begun = inner, begun

    def __getattr__(self, name):
        def call(item):
            self._begun.batch = item.batch
            return getattr(self._inner, name)(item)

        return call


def traced(division: Division, delays) -> tuple[Simulation, ThreadAccelerator]:
    """An epoch of 14 batches on real threads, as a schedule."""
    begun = threading.local()
    fake = ThreadAccelerator("npu", delays)
    fake.spans = Spans(begun)
    host, device = (Noted(one, begun) for one in sides(division.pinned_batches or 1))
    pipeline = DividedPipeline(division, PacedHost(fake, host), PacedDevice(fake, device))

    def step(batch: int) -> None:
        begun.batch = batch

    for item in pipeline.run(order().epoch(0)):
        fake.train(lambda batch=item.batch: step(batch))
    fake.stop()
    registry = fake.registry()
    occupies = {one.key: one.occupies for one in registry.operators}
    first = min(begin for _, begin, _, _ in fake.spans)
    found = [Activity(key, batch, occupies[key], begin - first, end - first) for key, begin, end, batch in fake.spans]
    # A batch leaves a buffer when it is claimed, a moment before what claims it has begun.
    wider = replace(division, device_buffer=division.device_buffer + 1)
    wider = replace(wider, host_buffer=division.host_buffer + 1) if division.host_batches else wider
    return Simulation(wider, 14, max(one.end for one in found), {}, tuple(found)), fake


def random_case(seed: int) -> tuple[Division, dict[str, float]]:
    chance = random.Random(seed)
    delays = {key: 10 ** chance.uniform(-4, -2) for key in PHASES}
    host, device = chance.randint(0, 3), chance.randint(0, 3)
    device = device or int(host == 0)
    about = {
        "workers": chance.randint(1, 3),
        "host_buffer": chance.randint(1, 5),
        "device_buffer": chance.randint(1, 4),
    }
    about |= {"strategy": chance.choice(["fixed", "elastic"]), "lead": chance.randint(0, 3)}
    return Division(host, device, trainer="npu", **about), delays


@pytest.mark.parametrize("seed", range(24))
def test_real_threads_keep_to_hardware_dependencies_and_buffers(seed):
    division, delays = random_case(seed)
    found, fake = traced(division, delays)
    assert violations(found, fake.registry()) == [], (division, delays)
    assert sum(one.key == "training_npu" for one in found.activities) == 14
    assert {one.batch for one in found.activities} == set(range(14))


def test_a_schedule_that_breaks_a_rule_would_be_found():
    """Of the same spans: with smaller buffers, and with a phase moved before the one that it needs."""
    delays = dict.fromkeys(PHASES, 0.0005) | {"training_npu": 0.004}
    found, fake = traced(Division(1, 0, workers=3, host_buffer=5, device_buffer=4, trainer="npu"), delays)
    small = replace(found, division=replace(found.division, host_buffer=1, device_buffer=1))
    assert any("buffer holds" in one for one in violations(small, fake.registry()))
    early = [
        replace(one, begin=-1.0) if one.key == "training_npu" and one.batch == 5 else one for one in found.activities
    ]
    assert any("begins before" in one for one in violations(replace(found, activities=tuple(early)), fake.registry()))
