"""Registry, phase times and divisions are checked data that survive JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.core.division import Division, DualBuffer, Operator, PhaseTime, PhaseTimes, Registry, built_in
from weft.core.errors import SpecError


def test_the_built_in_registry_has_two_routes_to_the_gpu():
    registry = built_in()
    assert [operator.key for operator in registry.host_route()] == ["batching_cpu", "transfer_pcie"]
    assert [operator.key for operator in registry.device_route("gpu")] == ["batching_gpu", "transfer_gpu"]
    assert registry.training("gpu").key == "training_gpu"


def test_hardware_joins_by_registering_and_replaces_none():
    more = built_in().registered(Operator("training", "npu", "mine"))
    assert more.training("npu").occupies == ("npu",)
    assert more.device_route("npu") == ()
    with pytest.raises(SpecError, match="training_gpu is registered twice"):
        more.registered(Operator("training", "gpu", "another"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operator("sampling", "gpu", "x"), "phase='sampling' must be one of"),
        (lambda: Operator("training", "", "x"), "needs a name and the hardware"),
        (lambda: built_in().training("tpu"), "nothing is registered to train on 'tpu'; hardware that trains: gpu"),
        (lambda: Division(0, 0), "both 0"),
        (lambda: Division(-1, 2), "host_batches=-1"),
        (lambda: Division(1, 1, workers=0), "workers=0"),
        (lambda: Division(1, 1, strategy="both"), "strategy='both' must be one of elastic, fixed"),
        (lambda: PhaseTime(-1.0), "mean=-1.0"),
        (lambda: PhaseTime.of([]), "at least one"),
        (lambda: PhaseTimes({}).of("training_gpu"), "'training_gpu' was not measured; measured: none"),
        (lambda: PhaseTimes({}, {"a": {"b": 0.0}}), "interference of b with a"),
        (lambda: PhaseTimes({}, crowding=-1), "crowding=-1"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_phase_times_keep_mean_and_variance():
    time = PhaseTime.of([1.0, 2.0, 3.0])
    assert (time.mean, time.std, time.count) == (2.0, 1.0, 3)
    assert time.scaled(2.0).std == 2.0
    assert PhaseTime.of([1.0, 1.0, 1.2, 50.0]).mean == pytest.approx(3.2 / 3)  # another process had the core


def test_workers_crowd_the_host_and_concurrent_phases_slow_each_other():
    times = PhaseTimes({"batching_cpu": PhaseTime(1.0)}, {"a": {"b": 2.0, "c": 1.5}}, crowding=0.1)
    assert times.of("batching_cpu", workers=3).mean == pytest.approx(1.2)
    assert times.slowdown("a", ["a", "b", "c", "b"]) == 3.0
    assert times.slowdown("b", ["a"]) == 1.0


def test_json_and_back():
    times = PhaseTimes({"training_gpu": PhaseTime(1.0, 0.1, 20)}, {"a": {"b": 2.0}}, 0.1, 1000)
    for one in (times, replace(times, captured={"batching_gpu": PhaseTime(0.5)})):
        assert PhaseTimes.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    division = Division(3, 2, 4, 8, 5, "npu", "fixed")
    assert Division.from_dict(json.loads(json.dumps(division.to_dict() | {"later": 1}))) == division


def test_buffers_hold_at_least_an_overlap_and_a_batch_per_worker():
    division = Division(3, 2, workers=5)
    assert (division.host_buffer, division.device_buffer, division.pinned_batches) == (5, 2, 6)
    alone = Division(0, 3)
    assert (alone.host_buffer, alone.pinned_batches, alone.kind) == (0, 0, "sequential")


def test_an_overlap_begins_with_the_devices_batches():
    division = Division(2, 1, strategy="fixed")
    schedule = DualBuffer(division, 6)
    assert [schedule.prepared_by_device(batch) for batch in range(6)] == [True, False, False, True, False, False]
    assert division.device_share == pytest.approx(1 / 3)
    assert [Division(1, 0).kind, division.kind] == ["pipeline", "dual buffer"]
    assert Registry().host_route() == ()
