"""Launch limits: on an H200 exactly the numbers that were measured, elsewhere each device's own share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from weft.core.task import Task
from weft.engine.estimator import Estimator, limits_for
from weft.ops.attention.gat_two_pass_triton import suits_one_pass
from weft.ops.dense.linear_triton import LinearBackwardLaunch, WeightGradLaunch
from weft.ops.dense.linear_triton import choose_backward_launch as choose_linear_backward
from weft.ops.dense.linear_triton import choose_weight_grad_launch as choose_weight_grad
from weft.ops.launch import backend as device_limits
from weft.ops.launch.backend import H200, DeviceLimits, assume_limits, limits_of
from weft.ops.sparse.spmm import choose_launch as choose_spmm
from weft.planner.machine_profiles import profile

RTX4090 = DeviceLimits(sms=128, l2_bytes=72 * 2**20, shared_memory_per_block=101376, max_threads_per_sm=1536)
CUDA = torch.device("cuda", 0)


def says(monkeypatch, **properties):
    """A stand-in for what torch says of a GPU."""
    device_limits._of_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


@pytest.fixture(autouse=True)
def _forget():
    yield
    device_limits._of_gpu.cache_clear()


def test_every_number_of_an_h200_is_the_measured_one(monkeypatch):
    says(
        monkeypatch,
        multi_processor_count=132,
        L2_cache_size=62914560,
        shared_memory_per_block_optin=232448,
        max_threads_per_multi_processor=2048,
    )
    found = limits_of(CUDA)
    assert found == H200
    assert [found.programs(each) for each in (2, 4, 8)] == [264, 528, 1056]
    assert found.l2_for_rows == 48 * 2**20
    assert found.l2_for_coefficients == 50 << 20
    assert found.l1_for_rows == 128 * 2**10
    assert found.shared_memory_per_block == 232448


def test_launches_of_an_h200_are_the_measured_ones():
    assert (LinearBackwardLaunch().programs, WeightGradLaunch(16, 16).programs) == (264, 528)
    assert choose_weight_grad(64, 64).programs == 264
    assert choose_weight_grad(64, 64, tasks=2).programs == choose_weight_grad(64, 128, tasks=16).programs == 528
    assert choose_linear_backward(64, 64).programs == 264
    rows = 48 * 2**20 // 256  # of 64 floats, that just stay in the L2
    assert choose_spmm(rows, 64, 4, 8.0).num_warps == 2
    assert choose_spmm(rows + 1, 64, 4, 8.0).num_warps == 4
    assert not suits_one_pass(torch.float32, 47, (50 << 20) // 4)
    assert suits_one_pass(torch.float32, 47, (50 << 20) // 4 + 1)


def test_another_gpu_gets_its_own_share():
    assert choose_weight_grad(64, 64, limits=RTX4090).programs == 256
    assert choose_linear_backward(128, 128, limits=RTX4090).block_rows < choose_linear_backward(128, 128).block_rows
    rows = 48 * 2**20 // 256 + 1
    assert choose_spmm(rows, 64, 4, 8.0, RTX4090).num_warps == 2


def test_what_torch_does_not_say_has_a_default(monkeypatch):
    says(monkeypatch, multi_processor_count=80)
    assert limits_of(CUDA) == DeviceLimits(80, H200.l2_bytes, device_limits.LEAST_SHARED)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_without_a_gpu_cuda_is_not_touched(kind, monkeypatch):
    def refuse(*_):
        raise AssertionError("CUDA was touched")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    assert limits_of(torch.device(kind)) == H200


def test_assumed_limits_hold_inside_alone():
    with assume_limits(RTX4090):
        assert limits_of(torch.device("meta")) == limits_of(CUDA) == RTX4090
        with assume_limits(None):
            assert limits_of(torch.device("cpu")) == RTX4090
    assert limits_of(torch.device("cpu")) == H200


def test_plans_are_made_with_the_limits_of_the_machine_planned_for():
    assert limits_for(profile("h200")) == H200
    assert limits_for(profile("rtx4090")) == replace(H200, sms=128, l2_bytes=72 * 2**20)
    assert limits_for(profile("cpu")) is None

    def workspace(machine):
        task = Task(graph="shape:ogbn-arxiv", model="gcn", hidden=64)
        return sum(op.workspace for op in Estimator(machine).steps(task).step.operators)

    whole = profile("h200")
    few = replace(whole, devices=tuple(replace(device, sms=33) for device in whole.devices))
    assert workspace(few) < workspace(profile("h200"))
