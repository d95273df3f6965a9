"""Pipeline: the same items as one after another, bounded memory, and errors that arrive at once with a name."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from tests.flow.graphs import random_graph
from weft import ops
from weft.batches import FeatureStore, NeighbourSampler, Pipeline, SeedOrder, Stage, training_stages
from weft.batches.pipeline import Channel, Closed, Pace
from weft.core.errors import InputError, TrainingError

pytestmark = pytest.mark.timeout(60)


def sampled_batches(depth: int):
    """Three epochs of 6 batches."""
    graph = random_graph()
    sampler, store = NeighbourSampler(graph, [4, 3], seed=2), FeatureStore(graph.x)
    order = SeedOrder(graph.train, 7)
    return Pipeline(training_stages(sampler, store, graph.y), depth).run(order.epochs(3))


@pytest.mark.parametrize("depth", [2, 4])
def test_pipelined_equals_synchronous(depth):
    expected = list(sampled_batches(1))
    found = list(sampled_batches(depth))
    assert len(found) == len(expected) == 18
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.epoch, mine.batch) == (theirs.epoch, theirs.batch)
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors(), theirs.tensors(), strict=True))


def losses(batches) -> list[float]:
    """Train two layers of mean aggregation on the batches."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 16), torch.nn.Linear(32, 3)]
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.01)
    found = []
    for batch in batches:
        x = batch.x
        for layer, block in zip(layers, batch.blocks, strict=True):
            own = x[: block.num_dst]
            x = layer(torch.cat([own, ops.spmm(block.adjacency().mean(), x)], 1)).relu()
        loss = torch.nn.functional.cross_entropy(x, batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_sees_the_same_losses():
    assert losses(sampled_batches(4)) == losses(sampled_batches(1))


@pytest.mark.parametrize("depth", [1, 3])
def test_poisoned_batches_harm_no_other(depth):
    """A batch is overwritten after its use; later ones, made meanwhile, are as they should be."""
    expected = [[t.clone() for t in batch.tensors()] for batch in sampled_batches(1)]
    for batch, before in zip(sampled_batches(depth), expected, strict=True):
        time.sleep(0.002)  # let the stages run ahead
        assert all(torch.equal(a, b) for a, b in zip(batch.tensors(), before, strict=True))
        for tensor in batch.tensors():
            tensor.fill_(77)


class Tracked:
    """An item that ``alive`` counts while it exists."""

    def __init__(self, alive: weakref.WeakSet) -> None:
        alive.add(self)


def test_back_pressure_bounds_what_is_alive():
    most, depth, alive = 0, 3, weakref.WeakSet()
    pipeline = Pipeline([Stage("make", lambda _: Tracked(alive)), Stage("pass", lambda item: item)], depth)
    for _ in pipeline.run(range(60)):
        time.sleep(0.003)
        most = max(most, len(alive))
    gc.collect()
    # Two queues of `depth`, one item in work per stage, one with the consumer.
    assert most <= 2 * depth + 3
    assert [report.items for report in pipeline.reports] == [60, 60]
    assert all(report.longest_queue <= depth for report in pipeline.reports)
    assert pipeline.reports[0].held_back > 0


def test_the_source_is_not_read_far_ahead():
    read = []

    def source():
        for number in range(100):
            read.append(number)
            yield number

    items = Pipeline([Stage("a", lambda i: i)], 2).run(source())
    next(items)
    time.sleep(0.2)
    assert len(read) <= 7
    items.close()


def fails_at(number: int):
    def work(item):
        if item == number:
            raise ValueError(f"bad item {item}")
        return item

    return work


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_names_its_stage(place, depth):
    stages = [Stage(name, fails_at(5) if i == place else (lambda item: item)) for i, name in enumerate("abc")]
    start = time.monotonic()
    with pytest.raises(
        TrainingError, match=f"stage '{'abc'[place]}' failed at item 5: ValueError: bad item 5"
    ) as caught:
        list(Pipeline(stages, depth).run(range(1000)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - start < 5
    assert_no_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_of_the_source(depth):
    def source():
        yield 1
        raise OSError("disk full")

    with pytest.raises(TrainingError, match="stage 'source' failed at item 1: OSError: disk full"):
        list(Pipeline([Stage("a", lambda i: i)], depth).run(source()))


def test_a_killed_stage_is_an_error():
    def work(item):
        if item == 3:
            raise SystemExit(9)
        return item

    with pytest.raises(TrainingError, match="stage 'b' failed at item 3: SystemExit: 9"):
        list(Pipeline([Stage("a", lambda i: i), Stage("b", work)], 2).run(range(100)))
    assert_no_threads()


def test_an_error_overtakes_finished_items():
    """The consumer is slow and has items waiting; it hears of the error at its next step."""
    pipeline = Pipeline([Stage("a", fails_at(3)), Stage("b", lambda i: i)], 8)
    seen = []

    def consume():
        for item in pipeline.run(range(100)):
            seen.append(item)
            time.sleep(0.2)

    with pytest.raises(TrainingError, match="stage 'a'"):
        consume()
    assert len(seen) <= 2


def test_a_stage_that_is_stuck_does_not_keep_others_from_failing(monkeypatch):
    from weft.batches import pipeline as module

    monkeypatch.setattr(module, "JOIN_SECONDS", 0.2)
    release = threading.Event()

    def stuck(item):
        release.wait()
        return item

    start = time.monotonic()
    with pytest.raises(TrainingError, match="stage 'a'"):
        list(Pipeline([Stage("a", fails_at(1)), Stage("b", stuck)], 2).run(range(10)))
    assert time.monotonic() - start < 5
    release.set()


def test_leaving_early_stops_all_threads():
    for depth in (2, 4):
        for item in Pipeline([Stage("a", lambda i: i), Stage("b", lambda i: i)], depth).run(range(10**9)):
            if item == 5:
                break
    gc.collect()
    assert_no_threads()


def _is_stage(name):
    """Whether a thread is a stage's: those of samplers and of stand-ins for a device live as long as the process."""
    return name.startswith("weft-") and "cpu" not in name and "npu" not in name


def assert_no_threads():
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not [t for t in threading.enumerate() if _is_stage(t.name)]:
            return
        time.sleep(0.01)
    raise AssertionError([t.name for t in threading.enumerate()])


def test_an_empty_source():
    assert list(Pipeline([Stage("a", lambda i: i)], 3).run([])) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 0}, "depth=0 must be at least 1"),
        ({"stages": []}, "needs stages"),
        ({"stages": [Stage("a", str), Stage("a", str)]}, "different names"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        Pipeline(**{"stages": [Stage("a", str)], "depth": 2, **given})


def test_a_growing_queue_slows_its_stage_until_it_has_drained():
    pace = Pace(8, patience=3)
    assert [pace.limit(n) for n in (0, 1, 2)] == [8, 8, 8]
    assert pace.limit(3) == 4  # three times longer than before
    assert pace.limit(5) == 4
    assert pace.limit(4) == 8
    assert Pace(1).limit(0) == 1


def test_closing_a_channel_wakes_both_sides():
    channel, woken = Channel(1), []
    channel.put(1)

    def writer():
        try:
            channel.put(2)
        except Closed:
            woken.append("writer")

    thread = threading.Thread(target=writer)
    thread.start()
    time.sleep(0.02)
    channel.close()
    thread.join(2)
    assert woken == ["writer"]
    assert channel.take() == 1
    with pytest.raises(Closed):
        channel.take()


def test_a_stage_begins_nothing_that_has_no_place_behind_it():
    """With items that the consumer never takes, a stage holds ``depth`` finished items and none in work."""
    begun, depth = [], 3
    items = Pipeline([Stage("work", lambda item: begun.append(item) or item)], depth).run(range(100))
    assert next(items) == 0
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline and len(begun) <= depth + 1:
        time.sleep(0.01)
    items.close()
    assert len(begun) == depth + 1  # those that wait, and the one that was taken
