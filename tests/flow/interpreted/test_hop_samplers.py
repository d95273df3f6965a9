"""Every hop sampler returns what the compiled one on the CPU does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ops.sampling.graphs import CLOCK, SEEDS, random_csr
from weft.batches.sampler import TritonHops, cpu_hops, torch_hops
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import sample_torch
from weft.ops.sampling.sample_triton import SampleLaunch, launch_sample, sample_triton

FANOUTS = [3, 2]


def assert_same_hops(mine, theirs) -> None:
    for hop, expected in zip(mine, theirs, strict=True):
        assert hop.first == expected.first
        for name in ("indptr", "indices", "edges", "nodes"):
            assert torch.equal(getattr(hop, name), getattr(expected, name)), name


@pytest.mark.parametrize("replace", [False, True])
def test_triton(replace):
    csr = random_csr(50)
    triton = TritonHops(*csr, torch.device("cpu"), edges=True, sample_hop=partial(launch_sample, replace=replace))
    compiled = partial(cpu_hops, CpuSampler(*csr, replace=replace))
    for _ in range(2):
        assert_same_hops(triton(SEEDS, FANOUTS, CLOCK, "all"), compiled(SEEDS, FANOUTS, CLOCK, "all"))


@pytest.mark.parametrize("expand", ["all", "new"])
def test_hop_by_hop(expand):
    csr = random_csr(50)
    expected = cpu_hops(CpuSampler(*csr), SEEDS, FANOUTS, CLOCK, expand)
    for sampler in (sample_torch, partial(sample_triton, edges=True, launch=SampleLaunch(32, 4))):
        assert_same_hops(torch_hops(partial(sampler, *csr), SEEDS, FANOUTS, CLOCK, expand), expected)
