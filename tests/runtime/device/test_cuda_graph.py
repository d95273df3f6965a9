"""Replay: plain calls on a CPU; on a GPU the captured step equals the eager one."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from tests.runtime.alone import Alone
from tests.stacks import solo_plan
from weft.core.errors import OutOfMemoryError
from weft.core.startup import no_collections
from weft.core.task import Task
from weft.engine.run import run as engine_run
from weft.runtime.device import cuda_graph
from weft.runtime.device.cuda_graph import Recordings, Replay
from weft.runtime.device.process import seeded

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_without_recording_it_is_a_call():
    counter = torch.zeros(1)
    replay = Replay(lambda: counter.add_(1), [counter], record=False)
    assert counter.item() == 0
    replay()
    replay()
    assert counter.item() == 2
    assert not replay.recorded
    assert replay.pool is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_and_is_as_before_also_after_an_error(enabled):
    def fails():
        with no_collections():
            assert not gc.isenabled()
            raise KeyError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fails()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


class FakeGraph:
    """A CUDA graph that notes whether its capture was ended."""

    ended = False

    def pool(self):
        if not self.ended:
            raise RuntimeError("without a preceding successful capture")
        return (0, 7)


@pytest.fixture
def captures(monkeypatch):
    """Captures without a GPU: ``captures.fails`` says what ending one raises; what torch was told is in ``told``."""
    found = SimpleNamespace(fails=None, told=[], graphs=[], modes=[])

    @contextmanager
    def capture(graph, pool=None, stream=None, capture_error_mode="global"):
        found.graphs.append(weakref.ref(graph))
        found.modes.append((pool, capture_error_mode))
        try:
            yield
        finally:
            if found.fails is not None:
                raise found.fails
            graph.ended = True

    for name, call in {
        "CUDAGraph": FakeGraph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 7),
        "current_device": lambda: 0,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "current_stream": lambda: "stream",
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, call)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given, name=name: found.told.append((name, *given)), raising=False)
    monkeypatch.setattr(cuda_graph, "_BROKEN", [], raising=False)
    return found


def test_torch_forgets_a_capture_that_could_not_be_ended_and_its_graph_stays(captures):
    """Torch would ask the graph, which would be gone, about allocations of the captures to come."""
    replay = Replay(lambda: None, [], record=False, stream="side")
    captures.fails = RuntimeError("operation failed due to a previous error during capture")
    replay.capture()
    assert "previous error" in replay.reason
    assert captures.told == [("_cuda_endAllocateToPool", 0, (0, 7)), ("_cuda_releasePool", 0, (0, 7))]
    gc.collect()
    assert captures.graphs[0]() is not None


def test_a_capture_that_failed_but_was_ended_gives_its_memory_back(captures):
    def runs_out():
        raise torch.OutOfMemoryError

    replay = Replay(runs_out, [], record=False, stream="side")
    with pytest.raises(torch.OutOfMemoryError):
        replay.capture()
    gc.collect()
    assert captures.told == []
    assert captures.graphs[0]() is None


def test_recordings_share_a_pool_and_no_thread_may_do_what_a_graph_would_not_repeat(captures):
    """Backward passes run in a thread of autograd's: one that waits for the device must not be captured."""
    replay = Replay(lambda: None, [], record=False, stream="side")
    replay.capture()
    replay.capture((0, 5))
    assert captures.modes == [((0, 7), "global"), ((0, 5), "global")]
    assert replay.recorded


class Products:
    """Matrix products both ways on the GPU, to be recorded: cuBLAS is called by the main thread and by autograd's."""

    def __init__(self):
        self.weight = torch.ones(64, 64, device="cuda", requires_grad=True)
        self.total = torch.zeros((), device="cuda")

    def __call__(self):
        loss = (self.weight @ self.weight).sum()
        (gradient,) = torch.autograd.grad(loss, self.weight)
        self.total.add_(gradient.sum())

    def replay(self):
        return Replay(self, [self.total], record=True)


def cuda_run(graph, record, **settings):
    task = Task(**{"graph": graph, "hidden": 8, "epochs": 20, "heads": 2, "dropout": 0.5, **settings})
    device = torch.device("cuda", torch.cuda.current_device())
    plan = replace(solo_plan(task, graph.stats(), "cuda"), replay=record)
    with seeded(task.seed, device):
        solo = Alone(task, graph, plan, device)
        progress = solo.advance(task.epochs)
    return solo, progress


def rows(progress):
    return torch.tensor(progress.rows)


class Device:
    """Room for one step: a warm-up needs all of it, captures keep it for as long as any of them is there."""

    def __init__(self):
        self.captured, self.log = set(), []

    def step(self, name, broken=False):
        return Pretended(self, name, broken)


class Pretended:
    """A replay on a :class:`Device`."""

    def __init__(self, device, name, broken):
        self.device, self.name, self.broken, self.reason = device, name, broken, None
        self.breaks_again = False

    recorded = property(lambda self: self.name in self.device.captured)
    pool = property(lambda self: "pool" if self.recorded else None)

    def warm_up(self):
        self.device.log.append(f"warm {self.name}")
        if self.device.captured:
            raise torch.OutOfMemoryError
        self.reason = "it waits" if self.broken else None

    def capture(self, pool):
        self.reason = self.reason or ("it broke" if self.breaks_again else None)
        if self.reason is None:
            assert (pool == "pool") == bool(self.device.captured), "all share one pool"
            self.device.log.append(f"capture {self.name}")
            self.device.captured.add(self.name)

    def forget(self):
        self.device.captured.discard(self.name)


class TestRecordings:
    def test_all_are_warmed_up_before_one_is_captured(self):
        device = Device()
        Recordings().add(device.step("a"), device.step("b"))
        assert device.log == ["warm a", "warm b", "capture a", "capture b"]

    def test_one_that_comes_later_finds_room_all_the_same(self):
        device, found = Device(), Recordings()
        found.add(device.step("a"))
        found.add(device.step("b"))
        assert device.log == ["warm a", "capture a", "warm b", "warm b", "capture a", "capture b"]
        found.add(device.step("c"), warm=False)
        assert device.log[6:] == ["capture c"]
        assert device.captured == {"a", "b", "c"}

    def test_one_that_cannot_be_captured_is_left_out(self):
        device, found = Device(), Recordings()
        found.add(device.step("a", broken=True), device.step("b"))
        assert device.log == ["warm a", "warm b", "capture b"]
        found.add(device.step("c"))
        assert device.captured == {"b", "c"}
        assert found.reasons == ["it waits"]

    def test_one_that_breaks_when_it_is_captured_anew_leaves_the_others_captured(self):
        device, found = Device(), Recordings()
        first, second = device.step("a"), device.step("b")
        found.add(first, second)
        first.breaks_again = True
        found.add(device.step("c"))
        assert device.captured == {"b", "c"}
        assert found.reasons == ["it broke"]

    def test_what_does_not_fit_alone_is_told(self):
        device = Device()
        device.captured.add("others")
        with pytest.raises(torch.OutOfMemoryError):
            Recordings().add(device.step("a"))


@gpu
@needs_gpu
class TestOnTheGpu:
    def test_two_recordings_take_the_memory_of_one(self):
        """Within one and a half times what a step takes, whether both are known from the start or not."""
        size, total = 1 << 30, torch.zeros(1, device="cuda")

        def step():
            total.add_(torch.ones(size // 4, device="cuda")[:1])

        gc.collect()
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        before = torch.cuda.get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / whole)
        try:
            for together in (True, False):
                failed = torch.cuda.memory_stats()["num_ooms"]
                shared, pair = Recordings(), [Replay(step, [total], record=False) for _ in range(2)]
                for some in [pair] if together else [[one] for one in pair]:
                    shared.add(*some)
                assert all(one.recorded for one in pair)
                assert (torch.cuda.memory_stats()["num_ooms"] > failed) != together
                total.zero_()
                for one in pair:
                    one()
                assert total.item() == 2
                del shared, pair, one, some
        finally:
            torch.cuda.set_per_process_memory_fraction(before)

    def test_warm_up_is_undone_and_replays_count(self):
        counter = torch.zeros(1, device="cuda")
        replay = Replay(lambda: counter.add_(1), [counter], record=True)
        assert replay.recorded
        assert counter.item() == 0
        replay()
        replay()
        assert counter.item() == 2

    def test_a_step_that_never_waits_is_warmed_up_once(self):
        for never_waits, calls in ((False, 3), (True, 2)):  # the last call is the capture
            counter, called = torch.zeros(1, device="cuda"), []
            step = lambda counter=counter, called=called: (called.append(0), counter.add_(1))  # noqa: E731
            replay = Replay(step, [counter], record=True, never_waits=never_waits)
            assert replay.recorded
            assert len(called) == calls
            replay()
            assert counter.item() == 1

    def test_a_step_that_waits_though_it_should_not_runs_eagerly(self):
        step = Products()
        asks = Replay(lambda: step.total.add_(step.total.item()), [step.total], record=True, never_waits=True)
        assert not asks.recorded
        assert asks.reason
        assert step.replay().recorded

    def test_many_recordings_hold_no_more_than_one(self):
        def held():
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        step = Products()
        assert step.replay().recorded
        once = held()
        for _ in range(40):  # more than torch has streams
            assert step.replay().recorded
        assert held() == once

    def test_garbage_that_holds_a_recording_does_not_break_another(self):
        step = Products()
        older = [step.replay() for _ in range(4)]
        assert all(replay.recorded for replay in older)
        for replay in older:
            replay.itself = replay  # only the collector can let go of it
        before = gc.get_threshold()
        gc.collect()
        del older, replay
        gc.set_threshold(1, 1, 1)
        try:
            again = Replay(lambda: ([[] for _ in range(100)], step()), [step.total], record=True)
        finally:
            gc.set_threshold(*before)
        assert again.recorded, again.reason
        again()
        assert step.total.item() == 64 * 64 * 128

    def test_a_step_that_cannot_be_recorded_leaves_the_stream_to_the_next(self):
        step = Products()
        asks = Replay(lambda: step.total.add_(step.total.item()), [step.total], record=True)
        assert not asks.recorded
        assert step.replay().recorded
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    @pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
    @pytest.mark.parametrize("norm", [None, "batch"])
    def test_recorded_is_eager(self, model, norm):
        graph = tiny_graph()
        recorded, first = cuda_run(graph, True, model=model, norm=norm)
        eager, second = cuda_run(graph, False, model=model, norm=norm)
        assert recorded.notes == []
        assert recorded.group.recorded
        assert torch.allclose(rows(first), rows(second), atol=1e-4, equal_nan=True)
        assert torch.allclose(recorded.state.flat, eager.state.flat, atol=1e-4)

    @pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_the_gpu_trains_like_the_cpu(self, start, model, sparse):
        graph = tiny_graph(sparse=sparse)
        settings = {"model": model, "dropout": 0.5, "input_dropout": 0.3, "epochs": 10}
        _, on_gpu = cuda_run(graph, True, **settings)
        on_cpu = start(graph, **settings).advance(10)
        assert torch.allclose(rows(on_gpu)[:, 0], rows(on_cpu)[:, 0], atol=2e-3), "the same dropout, too"

    @pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
    @pytest.mark.parametrize("multilabel", [False, True])
    def test_optimizers_and_objectives(self, optimizer, multilabel):
        graph = tiny_graph(multilabel=multilabel)
        settings = {"optimizer": optimizer, "weight_decay": 0.01, "decay": "first", "schedule": "cosine"}
        recorded, first = cuda_run(graph, True, **settings)
        _, second = cuda_run(graph, False, **settings)
        assert recorded.group.recorded
        assert torch.allclose(rows(first), rows(second), atol=1e-4)

    @pytest.mark.parametrize("metric", ["accuracy", "f1_micro", "f1_macro", "roc_auc"])
    def test_metrics_are_recorded_too(self, metric):
        recorded, first = cuda_run(tiny_graph(), True, metric=metric, epochs=5)
        _, second = cuda_run(tiny_graph(), False, metric=metric, epochs=5)
        assert recorded.group.recorded, recorded.notes
        assert torch.allclose(rows(first), rows(second), atol=1e-4)

    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_precisions(self, precision):
        recorded, progress = cuda_run(tiny_graph(), True, precision=precision)
        assert recorded.group.recorded, recorded.notes
        losses = rows(progress)[:, 0]
        assert losses[-1] < losses[0]

    def test_early_stopping_and_rare_evaluation(self):
        settings = {"lr": 0.1, "patience": 4, "eval_every": 2, "epochs": 60}
        recorded, first = cuda_run(tiny_graph(), True, **settings)
        eager, second = cuda_run(tiny_graph(), False, **settings)
        assert recorded.group.recorded
        assert not eager.group.recorded
        assert (first.end, first.best_epoch) == (second.end, second.best_epoch)
        assert torch.allclose(recorded.state.best_flat, eager.state.best_flat, atol=1e-3)

    def test_a_module_that_asks_the_host_runs_eagerly_and_says_so(self):
        class Asks(nn.Linear):
            def forward(self, x):
                return super().forward(x * (1.0 if x.sum().item() > 0 else 2.0))

        recorded, progress = cuda_run(tiny_graph(), True, model=Asks)
        assert "could not be captured as a CUDA graph" in recorded.notes[0]
        _, second = cuda_run(tiny_graph(), False, model=Asks)
        assert torch.allclose(rows(progress), rows(second), atol=1e-5)

    def test_torchs_own_dropout_is_drawn_anew_in_every_replay(self):
        class Drops(nn.Linear):
            def forward(self, x):
                return super().forward(nn.functional.dropout(x, 0.5, self.training))

        recorded, progress = cuda_run(tiny_graph(), True, model=Drops, optimizer="sgd", lr=1e-12)
        assert recorded.group.recorded, recorded.notes
        assert len(set(rows(progress)[:, 0].tolist())) > 15

    def test_resume(self, tmp_path):
        class Enough(BaseException):  # an Exception in a listener is reported, and training goes on
            pass

        def listen(event):
            if event.kind == "checkpoint":
                raise Enough

        task = Task(graph=tiny_graph(), hidden=8, epochs=40, norm="batch")
        whole = engine_run(task, device="cuda", progress=False)
        with pytest.raises(Enough):
            engine_run(
                task,
                device="cuda",
                out=tmp_path,
                progress=False,
                on_event=listen,
                options=weft.RunOptions(checkpoint_every=0.0),
            )
        parts = engine_run(task, device="cuda", out=tmp_path, resume=True, progress=False)
        assert torch.allclose(torch.tensor(parts.history["loss"]), torch.tensor(whole.history["loss"]), atol=1e-3)

    def test_too_little_memory_is_one_sentence(self):
        class Greedy(nn.Linear):
            def forward(self, x):
                return super().forward(x) + torch.zeros(2**45, device=x.device).sum()

        with pytest.raises(OutOfMemoryError, match="the device ran out of memory"):
            engine_run(Task(graph=tiny_graph(), model=Greedy), device="cuda", progress=False)
