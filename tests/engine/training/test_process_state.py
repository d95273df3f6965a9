"""State that torch and Python keep per process: as it was after every run, and never shared by runs that differ."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.engine.small_sweeps import make_sweep
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.engine.control import Control
from weft.engine.process_state import Needs, process_state
from weft.engine.run import run
from weft.runtime.device.process import cpu_threads, matmul_precision, seeded

CPU = torch.device("cpu")
FP32, TF32 = (Needs(frozenset({precision}), "cpu") for precision in ("fp32", "tf32"))


def state():
    precision = torch.get_float32_matmul_precision()
    return precision, torch.get_num_threads(), gc.isenabled(), torch.get_rng_state().tolist()


def meddle():
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(1)
    gc.disable()
    torch.manual_seed(99)
    return 0


@pytest.fixture(autouse=True)
def own_state():
    """Whatever a test does, the next one finds two threads and collection as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    gc.enable()


def test_everything_is_as_before_however_it_ends():
    before = state()
    with process_state(FP32, CPU):
        meddle()
    assert state() == before
    with pytest.raises(ZeroDivisionError), process_state(FP32, CPU):
        1 / meddle()
    assert state() == before
    with process_state(TF32, CPU):
        """Nothing is left behind that would refuse this one."""


def test_runs_inside_each_other_nest():
    before = state()
    with process_state(FP32, CPU):
        torch.set_num_threads(1)
        outer = state()
        with process_state(TF32, CPU), seeded(5, CPU), matmul_precision("tf32"), cpu_threads(1):
            assert torch.get_float32_matmul_precision() == "high"
            torch.rand(3)
        assert state() == outer
    assert state() == before


def in_thread(needs, entered, leave):
    with process_state(needs, CPU):
        meddle()
        entered.set()
        assert leave.wait(30)


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_runs_beside_each_other_leave_what_the_first_found(first_leaves_first):
    before = state()
    events = [(threading.Event(), threading.Event()) for _ in range(2)]
    threads = [threading.Thread(target=in_thread, args=(FP32, *pair)) for pair in events]
    for thread, (entered, _) in zip(threads, events, strict=True):
        thread.start()
        assert entered.wait(30)
    for place in (0, 1) if first_leaves_first else (1, 0):
        events[place][1].set()
        threads[place].join(30)
    assert state() == before


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (FP32, TF32, "another precision"),
        (FP32, Needs(frozenset({"fp32", "tf32"}), "cpu"), "another precision"),
        (Needs(frozenset({"fp32"}), "cuda:0", capped=True), Needs(frozenset({"fp32"}), "cuda:0"), "a budget on cuda:0"),
        (Needs(frozenset({"fp32"}), "cpu", draws=True), FP32, "users' modules"),
        (FP32, FP32, ""),
        (Needs(frozenset({"fp32"}), "cuda:0", capped=True), Needs(frozenset({"fp32"}), "cuda:1", capped=True), ""),
    ],
)
def test_who_may_go_beside_whom(one, other, reason):
    for found in (one.conflict(other), other.conflict(one)):
        assert found.startswith(reason)
        assert bool(found) == bool(reason)


def test_what_tasks_need():
    tasks = [Task("demo", precision="bf16"), Task("demo", model=torch.nn.Linear)]
    assert Needs.of(tasks[:1], CPU, 10) == Needs(frozenset({"fp32"}), "cpu"), "a CPU has no cap"
    assert Needs.of(tasks, torch.device("cuda:0"), 10) == Needs(frozenset({"fp32"}), "cuda:0", True, True)


def test_a_run_that_conflicts_with_one_under_way_is_refused_and_one_that_does_not_is_not():
    control, paused = Control(), threading.Event()
    control.pause()
    found = []

    def listen(event):
        if event.kind == "paused":
            paused.set()

    options = {"progress": False, "control": control, "on_event": listen}
    thread = threading.Thread(target=lambda: found.append(run(make_sweep(seed=[0, 1]), **options)))
    thread.start()
    assert paused.wait(60)
    with pytest.raises(SpecError, match="another run is under way in this process, and one of the two has another pre"):
        run(make_sweep(seed=[0, 1], precision="tf32"), progress=False)
    assert run(make_sweep(seed=[0, 1]), progress=False).statuses == {"finished": 2}
    control.resume()
    thread.join(60)
    assert found[0].statuses == {"finished": 2}
    run(make_sweep(seed=[0, 1], precision="tf32"), progress=False)
