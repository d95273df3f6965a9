"""Sampling per relation: counts, uniformity, and the same bits from the reference and the CPU's kernel."""

from __future__ import annotations

import pytest
import torch

from tests.ops.sampling.chi_square import normal_score
from tests.ops.sampling.graphs import CLOCK, assert_same_sample
from tests.ops.sampling.relational import NODES, RELATIONS, related_csr, rows_of
from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.reference import HopSample, RelationRows, make_clock, picks_at_most, sample_relations_torch

SEEDS = torch.tensor([0, 3, 29, 7, 0, 12, 26, 24], dtype=torch.int32)
FANOUTS = [(2, 3, 1), (0, 5, 0), (-1, 2, 4), (-1, -1, -1), (60, 1, 0), (1, 1, 1)]


def on_cpu(adj: Adjacency, seeds, fanouts, clock, hop) -> HopSample:
    rows = rows_of(adj)
    sampler = CpuSampler(rows.indptr, rows.indices, relations=rows.relations)
    sampler.begin(seeds, clock)
    sample, found = sampler.hop_of_relations(fanouts, hop)
    return HopSample(sample.indptr, found.nodes[found.indices.long()], sample.edges)


@pytest.mark.parametrize("fanouts", FANOUTS, ids=str)
def test_every_relation_has_its_own_fanout(fanouts):
    adj = related_csr()
    rows, sample = rows_of(adj), sample_relations_torch(rows_of(adj), SEEDS, fanouts, CLOCK, 1)
    relation = adj.relation[rows.order.long()][sample.edges]
    for place, seed in enumerate(SEEDS.tolist()):
        mine = slice(int(sample.indptr[place]), int(sample.indptr[place + 1]))
        edges = sample.edges[mine]
        assert edges.unique().numel() == edges.numel()
        assert torch.equal(relation[mine], relation[mine].sort().values)
        assert (adj.rows()[rows.order.long()[edges]] == seed).all()
        for which, fanout in enumerate(fanouts):
            degree = int((adj.relation[adj.indptr[seed] : adj.indptr[seed + 1]] == which).sum())
            assert int((relation[mine] == which).sum()) == (degree if fanout < 0 else min(degree, fanout))
    assert torch.equal(rows.indices[sample.edges], sample.sources)


@pytest.mark.parametrize("fanouts", FANOUTS, ids=str)
@pytest.mark.parametrize("hop", [0, 2])
def test_the_cpu_kernel_gives_the_same_bits(fanouts, hop):
    adj = related_csr()
    assert_same_sample(
        on_cpu(adj, SEEDS, fanouts, CLOCK, hop), sample_relations_torch(rows_of(adj), SEEDS, fanouts, CLOCK, hop)
    )


@pytest.mark.parametrize("fanout", [1, 3, 19])
def test_every_neighbour_of_a_relation_is_equally_likely(fanout):
    adj = Adjacency(torch.tensor([0, 40]).int(), torch.zeros(40, dtype=torch.int32), 1)
    adj = adj.related((torch.arange(40) % 2).int(), 2)
    counts = torch.zeros(40)
    for batch in range(2000):
        sample = on_cpu(adj, torch.zeros(1, dtype=torch.int32), (fanout, 2), make_clock(5, 0, batch), 0)
        counts[rows_of(adj).order.long()[sample.edges]] += 1
    first, second = counts[::2], counts[1::2]
    assert first.sum() == 2000 * fanout
    assert second.sum() == 4000
    for found in (first, second):
        assert normal_score(found, torch.full_like(found, float(found.mean()))) < 5


def test_relations_and_hops_have_streams_of_their_own():
    """Two relations with equal neighbours do not pick alike, nor do two hops."""
    adj = Adjacency(torch.tensor([0, 200]).int(), torch.zeros(200, dtype=torch.int32), 1)
    rows = rows_of(adj.related((torch.arange(200) // 100).int(), 2))
    picked = [sample_relations_torch(rows, SEEDS[:1], (10, 10), CLOCK, hop).edges for hop in (0, 1)]
    assert not torch.equal(picked[0][:10], picked[0][10:] - 100)
    assert not torch.equal(picked[0], picked[1])


def test_rows_per_relation_hold_every_edge_once():
    adj = related_csr()
    rows = rows_of(adj)
    assert rows.indptr.numel() == NODES * RELATIONS + 1
    assert torch.equal(rows.order.sort().values.long(), torch.arange(adj.num_edges))
    assert torch.equal(rows.plain_indptr(), adj.indptr)


def test_picks_are_bounded():
    assert picks_at_most(5, 10, 100, 10_000) == 500
    assert picks_at_most(5, 10, 100, 200) == 250


def test_too_many_rows_are_refused():
    adj = related_csr()
    with pytest.raises(InputError, match="more than 2\\^31 rows; give one fan-out for all relations together"):
        RelationRows.of(adj, adj.relation, 2**27)
