"""The same batches whoever prepares them, in their order, with correct features, and bounded host memory."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch

from tests.flow.division.preparers import CPU, accelerated, order, sides
from tests.flow.graphs import random_graph
from tests.flow.memory_errors import MEMORY_ERRORS
from tests.flow.stages.test_pipeline import losses
from tests.planner.division.cases import times
from weft.batches import FeatureStore, NeighbourSampler
from weft.batches.division.executor import DividedPipeline
from weft.batches.division.preparers import PaddedHost
from weft.core.division import Division, PhaseTime, PhaseTimes
from weft.core.errors import InputError, TrainingError
from weft.planner.division.simulator import simulate

pytestmark = pytest.mark.timeout(60)

FIXED = {"trainer": "npu", "strategy": "fixed"}
DIVISIONS = [
    Division(1, 0, workers=1, trainer="npu"),
    Division(1, 0, workers=3, host_buffer=4, device_buffer=2, trainer="npu"),
    Division(0, 3, trainer="npu"),
    Division(2, 2, workers=2, **FIXED),
    Division(3, 1, workers=2, host_buffer=5, device_buffer=4, **FIXED),
    Division(1, 4, device_buffer=2, **FIXED),
    Division(3, 2, workers=2, device_buffer=2, trainer="npu", lead=4),
    Division(1, 1, workers=2, device_buffer=2, trainer="npu", lead=2),
]
IDS = [division.words() for division in DIVISIONS]


def reference() -> list[list[torch.Tensor]]:
    host, _ = sides()
    return [[tensor.clone() for tensor in host.prepare(seeds).tensors()] for seeds in order().epoch(0)]


@pytest.mark.parametrize("division", DIVISIONS, ids=IDS)
def test_batches_are_those_of_a_synchronous_run_bit_for_bit(division):
    expected = reference()
    fake, pipeline = accelerated(division)
    found = list(pipeline.run(order().epoch(0)))
    assert [batch.batch for batch in found] == list(range(len(expected)))
    for batch, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch.tensors(), theirs, strict=True))
    prepared = pipeline.prepared
    assert prepared["host"] + prepared["device"] == len(expected)
    assert (prepared["device"] > 0) == (division.device_batches > 0)
    fake.stop()


@pytest.mark.parametrize("division", DIVISIONS, ids=IDS)
def test_poisoned_batches_harm_no_other(division):
    """Every batch is overwritten after its use, while others wait in both buffers."""
    expected = reference()
    fake, pipeline = accelerated(division)
    for batch, before in zip(pipeline.run(order().epoch(0)), expected, strict=True):
        time.sleep(0.002)  # let both sides run ahead
        assert all(torch.equal(a, b) for a, b in zip(batch.tensors(), before, strict=True))
        for tensor in batch.tensors():
            tensor.fill_(77)
    fake.stop()


def test_losses_are_those_of_the_synchronous_run():
    graph_labels = torch.arange(80) % 3

    def labelled(division):
        fake, pipeline = accelerated(division, {"batching_cpu": 0.004, "training_npu": 0.001})
        for epoch in range(2):
            for batch in pipeline.run(order().epoch(epoch)):
                yield batch.with_data(batch.x, graph_labels[batch.seeds.long()])
        fake.stop()

    expected = losses(labelled(DIVISIONS[0]))
    for division in DIVISIONS[2:5]:
        assert losses(labelled(division)) == expected


def test_host_memory_keeps_to_the_plan():
    division = Division(4, 1, workers=3, host_buffer=4, trainer="npu")
    host, device = sides(division.pinned_batches)
    pipeline = DividedPipeline(division, host, device)
    for _ in pipeline.run(order(1).epoch(0)):
        time.sleep(0.003)
    assert 1 < host.slots.longest <= division.pinned_batches == 5
    assert host.slots.used == 0


def test_resuming_in_the_middle_of_an_epoch_gives_the_rest():
    expected = reference()
    fake, pipeline = accelerated(DIVISIONS[3])
    found = list(pipeline.run(order().epoch(0, 5)))
    assert [batch.batch for batch in found] == list(range(5, len(expected)))
    assert all(torch.equal(a, b) for a, b in zip(found[0].tensors(), expected[5], strict=True))
    fake.stop()


class Failing:
    """A side that fails at one batch."""

    def __init__(self, inner, method: str, error: Exception | None = None) -> None:
        self._inner, self._method, self._error = inner, method, error or ValueError("no more")

    def __getattr__(self, name):
        def call(item):
            if name == self._method and (getattr(item, "batch", None) or 0) >= 3:
                raise self._error
            return getattr(self._inner, name)(item)

        return call


@pytest.mark.parametrize(
    ("method", "phase"),
    [("prepare", "batching_cpu"), ("transfer", "transfer_pcie"), ("batch", "batching_gpu"), ("read", "batching_gpu")],
)
def test_an_error_arrives_with_the_name_of_its_phase_and_ends_all_threads(method, phase):
    host, device = sides()
    division = Division(1, 0, workers=2) if method in ("prepare", "transfer") else Division(2, 2, workers=2)
    pipeline = DividedPipeline(division, Failing(host, method), Failing(device, method))
    before = set(threading.enumerate())
    with pytest.raises(TrainingError, match=f"phase '{phase}' failed at batch .*ValueError: no more"):
        list(pipeline.run(order().epoch(0)))
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("kind", MEMORY_ERRORS)
@pytest.mark.parametrize("strategy", ["fixed", "elastic"])
@pytest.mark.parametrize("method", ["prepare", "transfer", "batch", "read"])
def test_memory_that_ran_out_stays_what_it_is_and_ends_all_threads(method, strategy, kind):
    host, device = sides()
    error, division = MEMORY_ERRORS[kind](), Division(2, 2, workers=2, strategy=strategy)
    if method in ("prepare", "transfer"):  # else the device may take over every batch that would fail
        division = Division(2, 0, workers=2)
    pipeline = DividedPipeline(division, Failing(host, method, error), Failing(device, method, error))
    before = set(threading.enumerate())
    with pytest.raises(type(error)) as caught:
        list(pipeline.run(order().epoch(0)))
    assert caught.value is error
    assert error.__cause__ is None
    assert not set(threading.enumerate()) - before
    assert host.slots.used == 0


def test_leaving_early_ends_all_threads():
    before = set(threading.enumerate())
    pipeline = DividedPipeline(Division(2, 1, workers=3), *sides())
    for _ in pipeline.run(order().epoch(0)):
        break
    assert not set(threading.enumerate()) - before
    assert pipeline.host.slots.used == 0


def test_a_side_that_is_missing_is_named():
    host, device = sides()
    with pytest.raises(InputError, match="the npu is to prepare 2 batches of an overlap, but it cannot"):
        DividedPipeline(Division(1, 2, trainer="npu"), host, None)
    with pytest.raises(InputError, match="the host is to prepare 1"):
        DividedPipeline(Division(1, 2), None, device)
    assert list(DividedPipeline(Division(1, 1), host, device).run([])) == []


def test_a_division_may_change_between_epochs():
    pipeline = DividedPipeline(Division(1, 0), *sides())
    first = list(pipeline.run(order().epoch(0)))
    pipeline.division = Division(0, 2)
    again = list(pipeline.run(order().epoch(0)))
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))
    assert pipeline.prepared["host"] == pipeline.prepared["device"] == len(first)


@pytest.mark.parametrize("strategy", ["fixed", "elastic"])
def test_other_threads_rest_while_it_is_quiet(strategy):
    """As while a CUDA graph is captured."""
    host, device = sides()
    busy = []

    class Counted:
        def __init__(self, inner) -> None:
            self._inner = inner

        def __getattr__(self, name):
            def call(item):
                busy.append(name)
                time.sleep(0.001)
                found = getattr(self._inner, name)(item)
                busy.remove(name)
                return found

            return call

    division = Division(2, 2, workers=2, host_buffer=6, device_buffer=4, strategy=strategy)
    pipeline = DividedPipeline(division, Counted(host), Counted(device))
    count = 0
    with pipeline.quiet():
        pass  # nothing runs
    for batch in pipeline.run(order().epoch(0)):
        with pipeline.quiet():
            time.sleep(0.002)
            assert busy == []
        count += batch.batch == count
    assert count == 14


def test_phases_are_measured_while_it_runs():
    delays = {"batching_cpu": 0.012, "batching_npu": 0.004, "training_npu": 0.006}
    fake, pipeline = accelerated(Division(2, 2, workers=2, **FIXED), delays)
    pipeline.log = []
    for _ in pipeline.run(order().epoch(0)):
        fake.train(lambda: None)
    assert {phase for phase, *_ in pipeline.log} == {*delays, "transfer_pcie", "transfer_npu"}
    for phase, clock, begin, end in pipeline.log:
        assert clock.seconds(begin, end) >= delays.get(phase, 0)
    fake.stop()


def test_what_the_accelerator_does_never_overlaps_and_the_bus_carries_one_at_a_time():
    delays = dict.fromkeys(("batching_cpu", "transfer_pcie", "batching_npu", "transfer_npu", "training_npu"), 0.001)
    fake, pipeline = accelerated(Division(2, 2, workers=2, **FIXED), delays)
    for _ in pipeline.run(order().epoch(0)):
        fake.train(lambda: None)
    for shared in (("npu",), ("pcie", "batching_npu", "transfer_npu")):
        spans = sorted((begin, end) for key, begin, end in fake.spans if any(one in key for one in shared))
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    fake.stop()


def test_the_executor_does_what_the_simulator_says():
    """Same decisions, so near the same batches per side; times are compared by the benchmark, not by a test."""
    delays = {"batching_cpu": 0.02, "transfer_pcie": 0.002, "batching_npu": 0.004, "transfer_npu": 0.004}
    delays["training_npu"] = 0.004
    division = Division(2, 2, workers=2, host_buffer=4, **FIXED)
    fake, pipeline = accelerated(division, delays)
    for _ in pipeline.run(order().epoch(0)):
        fake.train(lambda: None)
    measured = PhaseTimes({**times().phases, **{key: PhaseTime(value) for key, value in delays.items()}})
    simulated = simulate(division, measured, 14, fake.registry())
    own = sum(one.key == "batching_npu" for one in simulated.activities)
    assert pipeline.prepared["device"] == own == 8
    fake.stop()


def test_steps_that_prepare_their_batch_get_its_seeds_and_are_a_phase_of_their_own():
    fake, pipeline = accelerated(Division(1, 1, workers=2, trainer="npu", lead=2))
    pipeline.inside, pipeline.log = lambda seeds: ("inside", seeds.batch), []
    found = list(pipeline.run(order().epoch(0)))
    own = [place for place, item in enumerate(found) if isinstance(item, tuple)]
    assert {0, 1} <= set(own) < set(range(14))
    assert [found[place][1] for place in own] == own
    phases = [phase for phase, *_ in pipeline.log]
    assert phases.count("step_npu") == len(own) == pipeline.prepared["device"]
    assert phases.count("training_npu") == 14 - len(own)
    assert "batching_npu" not in phases
    fake.stop()


def test_an_elastic_division_gives_a_slow_host_fewer_batches_and_remembers_its_pace():
    """Begun with every second batch for the host, which is eight times as slow then and eight times as fast later."""
    division = Division(1, 1, workers=2, device_buffer=2, trainer="npu", lead=2)
    delays = {"batching_npu": 0.002, "transfer_npu": 0.002, "training_npu": 0.001, "batching_cpu": 0.064}
    fake, pipeline = accelerated(division, delays)
    shares = []
    for _ in range(3):
        before = pipeline.prepared["host"]
        for _ in pipeline.run(order(1).epoch(0)):
            fake.train(lambda: None)
        shares.append(pipeline.prepared["host"] - before)
    assert shares[-1] <= 12  # of 40 batches, 20 of which were planned for it
    delays["batching_cpu"] = 0.002
    for _ in range(4):
        before = pipeline.prepared["host"]
        for _ in pipeline.run(order(1).epoch(0)):
            fake.train(lambda: None)
    assert pipeline.prepared["host"] - before > 2 * shares[-1]
    fake.stop()


@pytest.mark.parametrize("cached", [0, 40])
def test_buffers_that_are_used_again_have_the_features_of_their_batch(cached):
    """Padded batches are packed into few pinned buffers: none is overwritten while a batch waits in it."""
    graph = random_graph()
    store = FeatureStore(graph.x, cached=torch.arange(cached))
    division = Division(1, 0, workers=3, host_buffer=4, device_buffer=3, trainer="npu")
    host = PaddedHost(NeighbourSampler(graph, [4, 3], seed=2), graph.x, CPU, division.pinned_batches, store=store)
    pipeline = DividedPipeline(division, _Late(host), None)
    found = [item for epoch in range(3) for item in pipeline.run(order().epoch(epoch))]
    expected = NeighbourSampler(graph, [4, 3], seed=2)
    seeds = [one for epoch in range(3) for one in order().epoch(epoch)]
    for item, one in zip(found, seeds, strict=True):
        nodes = expected.sample(one.seeds, one.epoch, one.batch).input_nodes
        assert torch.equal(item.nodes[: nodes.numel()], nodes)
        assert torch.equal(item.x[: nodes.numel()], graph.x[nodes.long()])
        assert not item.x[nodes.numel() :].any()
    assert 1 < host.slots.longest <= division.pinned_batches
    assert len(host._idle) <= division.pinned_batches


class _Late:
    """A host whose copies begin late, while its workers go on."""

    def __init__(self, inner) -> None:
        self.prepare, self.discard, self._inner = inner.prepare, inner.discard, inner

    def transfer(self, item):
        time.sleep(0.002)
        return self._inner.transfer(item)
