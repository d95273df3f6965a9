"""Memory budgets on a GPU: the cap holds during the run and is lifted after it; measured against predicted bytes."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.gpu.conftest import held_by_others
from weft.core.errors import DoesNotFitError, OutOfMemoryError
from weft.core.units import show_bytes
from weft.engine.errors import clear_errors
from weft.engine.machine import load_calibration, machine_with
from weft.engine.memory import memory_cap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SWEEP = weft.Sweep("shape:ogbn-arxiv?scale=0.3", model="gcn", layers=3, seed=range(8), epochs=30)


def test_a_run_keeps_to_its_budget_and_the_wall_goes_again():
    device = torch.device("cuda", torch.cuda.current_device())
    machine = machine_with(device)
    others = held_by_others()
    before = torch.cuda.get_per_process_memory_fraction(device)
    room = (1 << 30) + torch.cuda.memory_reserved()  # what others hold counts against the wall as well
    budget = machine.context_bytes + room
    result = weft.run(SWEEP, device="cuda", budget=budget, progress=False)
    assert {member.status for member in result} == {"finished"}
    assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(before)
    for plan in result.plan:
        assert plan.cost.get("total_bytes", budget + 1) <= budget, plan.why
        assert plan.measured["reserved_bytes"] <= room
        assert plan.measured["peak_bytes"] - others == pytest.approx(plan.cost["peak_bytes"], rel=0.1)
        assert plan.measured["epoch_seconds"] > 0
    assert load_calibration(machine) is not None


def test_a_wall_can_be_put_around_plain_cuda():
    device, before = torch.device("cuda"), torch.cuda.get_per_process_memory_fraction(0)
    machine = machine_with(torch.device("cuda", 0))
    most = machine.context_bytes + torch.cuda.memory_reserved() + (64 << 20)
    with memory_cap(device, machine, most), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(before)


def test_the_error_has_the_cap_what_is_held_and_the_request():
    device = torch.device("cuda", torch.cuda.current_device())
    machine = machine_with(device)
    most = machine.context_bytes + torch.cuda.memory_reserved() + (64 << 20)
    sizes = r"may reserve \S+ \wiB and has reserved \S+ \w+, \S+ \w+ of it in tensors; 2.00 GiB more were requested"
    raises = pytest.raises(OutOfMemoryError, match=sizes)
    with memory_cap(device, machine, most), raises as raised, clear_errors([weft.Task("demo")], device):
        torch.empty(2 << 30, dtype=torch.uint8, device=device)
    assert f"may reserve {show_bytes(most - machine.context_bytes)} and" in str(raised.value)


def test_a_later_run_of_a_process_takes_no_more_than_the_first():
    taken = []
    for seed in range(3):
        sweep = weft.Sweep("shape:cora", model="gcn", layers=3, seed=[seed, seed + 10], epochs=5)
        result = weft.run(sweep, device="cuda", progress=False)
        taken.append(max(plan.measured["peak_bytes"] for plan in result.plan))
    assert max(taken) <= 1.02 * taken[0]


def test_what_does_not_fit_is_refused_before_anything_is_allocated():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    task = weft.Task(graph="shape:ogbn-arxiv", model="gcn", layers=3, hidden=2048)
    with pytest.raises(DoesNotFitError, match="does not fit"):
        weft.run(task, device="cuda", budget="2GiB", progress=False)
    assert torch.cuda.max_memory_allocated() == before
