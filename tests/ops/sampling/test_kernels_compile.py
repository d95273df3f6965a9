"""The sampling kernels compile to sm_90 code, as they would be launched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.sampling.graphs import CLOCK, SEEDS, random_csr
from tests.ops.test_triton_compiles import compile_all, launches, pytestmark  # noqa: F401
from weft.core.errors import InputError


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fanout", [1, 10, 30, 100])
def test_default_sampler(launches, fanout, dtype):  # noqa: F811
    from weft.ops.sampling.sample_triton import sample_triton

    sample_triton(*random_csr(dtype=dtype), SEEDS, fanout, CLOCK, edges=fanout == 10, replace=fanout == 100)
    compile_all(launches)


def test_hops_with_compaction(launches):  # noqa: F811
    from weft.ops.sampling.compact_triton import Compactor, sample_hops_triton
    from weft.ops.sampling.sample_triton import CachedLists

    indptr, indices = random_csr()
    sample_hops_triton(indptr, indices, SEEDS, [15, 10, 5], CLOCK, Compactor(60, torch.device("cpu")))
    cached = CachedLists(indices, indptr[:-1].to(torch.int32), torch.zeros(2, dtype=torch.int64))
    sample_hops_triton(indptr, indices, SEEDS, [15, 10, 5], CLOCK, Compactor(60, torch.device("cpu")), cached=cached)
    compile_all(launches)


@pytest.mark.parametrize("fanouts", [(2, 3, 1), (0, 40, 2)], ids=str)
def test_per_relation(launches, fanouts):  # noqa: F811
    from tests.ops.sampling.relational import related_csr, rows_of
    from weft.ops.sampling.sample_triton import launch_sample_relations

    counts, rows = torch.tensor(fanouts, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for table in (None, torch.zeros(30, dtype=torch.int32)):
        given = (rows_of(related_csr()), SEEDS[:3], rows, counts, max(fanouts), CLOCK, 1)
        launch_sample_relations(*given, slots=3 * sum(fanouts), table=table)
    compile_all(launches)


@pytest.mark.parametrize("fanout", [10, 15, 30])
def test_reservoir(launches, fanout):  # noqa: F811
    from weft.ops.sampling.compact_triton import Compactor, sample_hops_triton
    from weft.ops.sampling.reservoir_triton import AS_DGL, launch_reservoir, sample_reservoir_triton

    sample_reservoir_triton(*random_csr(), SEEDS, fanout, CLOCK)
    sample_reservoir_triton(*random_csr(), SEEDS, fanout, CLOCK, edges=True, launch=AS_DGL)
    compactor = Compactor(60, torch.device("cpu"))
    sample_hops_triton(*random_csr(), SEEDS, [fanout], CLOCK, compactor, sample_hop=launch_reservoir)
    compile_all(launches)


@pytest.mark.parametrize("offset", ["int", "long long"])
def test_the_paper_s_sampler_in_cuda(offset):
    from weft.ops.sampling.paper_cuda import SOURCE, compile_cuda, nvrtc

    if nvrtc() is None:
        with pytest.raises(InputError, match="there is no NVRTC library"):
            compile_cuda(SOURCE, "sm_90")
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc)")
    assert compile_cuda(f"typedef {offset} Offset;\n{SOURCE}", "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("width", [1, 47, 100, 602])
def test_gather(launches, width):  # noqa: F811
    from weft.ops.sampling.gather_rows import GatherLaunch, clear_rows_triton, gather_rows_triton

    gather_rows_triton(torch.zeros(60, width), SEEDS)
    gather_rows_triton(torch.zeros(60, width), SEEDS, launch=GatherLaunch(64, 64))
    slots, hits = torch.full((60,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    gather_rows_triton(torch.zeros(60, width), SEEDS, cached=(torch.zeros(4, width), slots, hits))
    gather_rows_triton(torch.zeros(60, width), SEEDS, concurrent=True)
    gather_rows_triton(torch.zeros(60, width), SEEDS, count=torch.tensor([2], dtype=torch.int32))
    clear_rows_triton(torch.zeros(60, width), *torch.tensor([[2], [9]], dtype=torch.int32))
    compile_all(launches)
