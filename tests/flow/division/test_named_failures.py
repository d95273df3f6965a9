"""Hardware that fails while it is measured ends a run as it does while it trains."""

from __future__ import annotations

import json

import pytest

import weft
from examples.thread_accelerator import ThreadAccelerator
from tests.flow.memory_errors import MEMORY_ERRORS
from weft.batches.division.profiler import Profiled
from weft.core.errors import TrainingError


@pytest.mark.parametrize("phase", ["batching_cpu", "transfer_pcie", "batching_npu", "transfer_npu"])
def test_a_failure_during_the_profile_names_its_phase(tmp_path, phase):
    def delay(key):
        if key == phase:
            raise ValueError("device lost")
        return 0.0

    task = weft.Task(graph="demo", model="sage", mode="sampled", fanout=[5, 3], batch=32, hidden=16, epochs=2)
    npu = ThreadAccelerator("npu", delay)
    with pytest.raises(TrainingError, match=f"phase '{phase}' failed while it was measured: ValueError: device lost"):
        weft.run(task, device="cpu", options=weft.RunOptions(hardware=npu), out=tmp_path, progress=False)
    npu.stop()
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "failed"


def _raising(error):
    def train(item):
        raise error

    return Profiled(None, None, train, "npu").with_named_failures().train


def test_training_is_named():
    with pytest.raises(TrainingError, match="phase 'training_npu' failed while it was measured: TypeError: no"):
        _raising(TypeError("no"))(None)
    with pytest.raises(TrainingError, match=r"^as it is$"):
        _raising(TrainingError("as it is"))(None)


@pytest.mark.parametrize("kind", MEMORY_ERRORS)
def test_memory_that_ran_out_stays_what_it_is(kind):
    error = MEMORY_ERRORS[kind]()
    with pytest.raises(type(error)) as caught:
        _raising(error)(None)
    assert caught.value is error
