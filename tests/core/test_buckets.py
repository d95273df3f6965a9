"""Sizes that batches are padded to: the largest is always there, and a batch takes the smallest that it fits into."""

from __future__ import annotations

import pytest

from weft.batches.division.preparers import Layouts, PaddedLayout
from weft.core.batch_sizes import MOST_BUCKETS, bucket_shares, bucket_sizes, expected_batch, largest_batch
from weft.core.division import Division
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats

STATS = GraphStats(
    "g", 100_000, 3_000_000, num_features=16, num_classes=4, symmetric=True, num_train=20_000, max_degree=3000,
    degree_histogram=(0, 1000, 5000, 20_000, 30_000, 30_000, 10_000, 3000, 900, 90, 9, 1),
)  # fmt: skip
FANOUTS, SEEDS = (10, 5), 256


@pytest.mark.parametrize("count", range(1, MOST_BUCKETS + 1))
def test_sizes_ascend_to_the_largest(count):
    sizes = bucket_sizes(STATS, FANOUTS, SEEDS, count)
    assert len(sizes) == count
    assert [size.nodes for size in sizes] == sorted(size.nodes for size in sizes)
    assert sizes[-1] == largest_batch(FANOUTS, SEEDS, STATS.num_nodes)
    assert all(size.rows[0] == SEEDS for size in sizes)
    assert all(low <= high for size in sizes for low, high in zip(size.edges, sizes[-1].edges, strict=True))
    assert sum(bucket_shares(count)) == pytest.approx(1.0)


def test_the_expected_batch_fits_into_the_first():
    expected = expected_batch(STATS, FANOUTS, SEEDS)
    layouts = Layouts(FANOUTS, STATS.num_nodes, 3, STATS)
    given = ([*map(int, expected.rows)], [*map(int, expected.edges)], int(expected.nodes))
    found = layouts.fitting(SEEDS, *given)
    assert found.nodes < layouts.largest(SEEDS).nodes
    assert found.holds(*given)
    assert layouts.fitting(SEEDS, given[0], given[1], found.nodes + 1).nodes > found.nodes


def test_whatever_is_larger_takes_the_largest():
    layouts = Layouts(FANOUTS, STATS.num_nodes, 2, STATS)
    whole = layouts.largest(SEEDS)
    assert (
        layouts.fitting(SEEDS, whole.rows, whole.edges, whole.nodes) == whole == PaddedLayout.of(SEEDS, FANOUTS, 10**5)
    )
    assert Layouts(FANOUTS, STATS.num_nodes).fitting(SEEDS, [SEEDS, 1], [1, 1], 1) == whole


def test_a_division_says_how_many_sizes():
    division = Division(1, 2, workers=2, buckets=2)
    assert "padded to one of 2 sizes" in division.words()
    assert "sizes" not in Division(1, 2).words()
    assert Division.from_dict(division.to_dict()) == division
    for wrong in (0, MOST_BUCKETS + 1, True, 1.5):
        with pytest.raises(SpecError, match="must be a whole number from 1 to 3"):
            Division(1, 2, buckets=wrong)
