"""The kernels that sample per relation give the reference's bits, alone and hop by hop with compaction."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ops.sampling.graphs import CLOCK, assert_same_sample
from tests.ops.sampling.relational import NODES, related_csr, rows_of
from weft.batches.sampler import TritonHops, cpu_hops
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import RelationFanouts, sample_relations_torch
from weft.ops.sampling.sample_triton import launch_sample_relations

SEEDS = torch.tensor([0, 3, 29, 7, 0, 12], dtype=torch.int32)


@pytest.mark.parametrize("fanouts", [(2, 3, 1), (0, 5, 0), (40, 1, 2)], ids=str)
def test_one_hop(fanouts):
    rows = rows_of(related_csr())
    given = (SEEDS, torch.tensor([SEEDS.numel()], dtype=torch.int32))
    counts = torch.tensor(fanouts, dtype=torch.int32)
    slots = SEEDS.numel() * sum(fanouts)
    mine = launch_sample_relations(rows, *given, counts, max(fanouts), CLOCK, 1, slots=slots)
    assert_same_sample(mine, sample_relations_torch(rows, SEEDS, fanouts, CLOCK, 1))


def test_fewer_rows_than_places():
    rows, fanouts = rows_of(related_csr()), (2, 3, 1)
    given = (SEEDS, torch.tensor([4], dtype=torch.int32), torch.tensor(fanouts, dtype=torch.int32), 3)
    mine = launch_sample_relations(rows, *given, CLOCK, 0, slots=36)
    expected = sample_relations_torch(rows, SEEDS[:4], fanouts, CLOCK)
    assert torch.equal(mine.indptr[:5], expected.indptr)
    assert (mine.indptr[5:] == mine.indptr[4]).all()
    assert torch.equal(mine.sources[: int(mine.indptr[-1])], expected.sources)


def test_hops_with_compaction_equal_the_cpus():
    rows = rows_of(related_csr())
    fanouts = [(2, 1, 1), 3, (0, 2, 1)]
    about = {"edges": True, "device": torch.device("cpu")}
    triton = TritonHops(rows.plain_indptr(), rows.indices, **about, relations=RelationFanouts(rows, fanouts))
    compiled = partial(cpu_hops, CpuSampler(rows.indptr, rows.indices, relations=rows.relations))
    for _ in range(2):  # the second time with a table that was used before
        mine, theirs = (sampler(SEEDS[:3], fanouts, CLOCK, "all") for sampler in (triton, compiled))
        for hop, expected in zip(mine, theirs, strict=True):
            for name in ("indptr", "indices", "edges", "nodes"):
                assert torch.equal(getattr(hop, name), getattr(expected, name)), name
    assert mine[-1].nodes.numel() <= NODES
