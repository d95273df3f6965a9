"""ThreadAccelerator: refused delays, and commands after its end."""

from __future__ import annotations

import pytest

import weft
from examples.thread_accelerator import ThreadAccelerator
from weft.core.errors import InputError, TrainingError

SAMPLED = {"graph": "demo", "model": "sage", "mode": "sampled", "fanout": [5, 3], "batch": 32, "hidden": 16}


@pytest.fixture
def task():
    return weft.Task(**SAMPLED, epochs=2)


@pytest.mark.timeout(60)
def test_a_stopped_accelerator_is_refused(task):
    npu = ThreadAccelerator("npu")
    assert npu.train(lambda: 3) == 3
    npu.stop()
    npu.stop()
    with pytest.raises(InputError, match="accelerator 'npu' was stopped"):
        npu.train(lambda: 3)
    with pytest.raises(InputError, match="accelerator 'npu' was stopped"):
        weft.run(task, device="cpu", options=weft.RunOptions(hardware=npu), progress=False)


@pytest.mark.timeout(60)
def test_one_that_is_stopped_during_a_run_ends_it(task):
    npu = ThreadAccelerator("npu", {"batching_cpu": 0.2})  # so slow that the device prepares batches as well

    def stop(event):
        if event.kind == "start":
            npu.stop()

    with pytest.raises((InputError, TrainingError), match="accelerator 'npu' was stopped"):
        weft.run(task, device="cpu", options=weft.RunOptions(hardware=npu), progress=False, on_event=stop)


@pytest.mark.parametrize(
    ("delays", "words"),
    [
        (
            {"batching_gpu": 0.1},
            "'batching_gpu' is no phase of it; those are batching_cpu, transfer_pcie, batching_npu",
        ),
        ({"batching_npu": -1}, "'batching_npu' takes -1, which is no number of seconds from 0 on"),
        ({"training_npu": float("nan")}, "'training_npu' takes nan"),
        ({"training_npu": "1"}, "'training_npu' takes '1'"),
    ],
)
def test_delays_that_mean_nothing_are_refused(delays, words):
    with pytest.raises(InputError, match=words):
        ThreadAccelerator("npu", delays)


def test_a_function_is_asked_when_a_phase_runs():
    npu = ThreadAccelerator("npu", lambda key: -0.5)
    with pytest.raises(InputError, match=r"'training_npu' takes -0\.5"):
        npu.train(lambda: None)
    npu.stop()
