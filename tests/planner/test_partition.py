"""Partitions: balanced, in order, and the same edges as before; hubs, empty ranks and isolated nodes included."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.planner.partition_reference import local_id, neighbour_pieces, owner, shard_edges
from weft.core.errors import SpecError
from weft.planner.partition import Partition, split_by_edges


def offsets(degrees: list[int]) -> list[int]:
    found = [0]
    for degree in degrees:
        found.append(found[-1] + degree)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_every_rank_has_about_as_many_edges(ranks):
    chance = random.Random(0)
    indptr = offsets([chance.randint(0, 20) for _ in range(20_000)])
    found = split_by_edges(indptr, ranks)
    assert found.ranks == ranks
    assert found.bounds[0] == 0
    assert found.bounds[-1] == 20_000
    assert list(found.bounds) == sorted(found.bounds)
    assert sum(found.edges) == indptr[-1]
    assert found.imbalance < 0.01


def test_what_one_rank_has_too_much_does_not_add_up():
    found = split_by_edges(offsets([10] * 1001), 64)
    assert max(found.edges) - min(found.edges) <= 10


def test_a_hub_leaves_ranks_empty_rather_than_failing():
    found = split_by_edges(offsets([1, 1, 1000, 1, 1]), 4)
    assert sum(found.edges) == 1004
    assert max(found.edges) <= 1004
    assert len(found.edges) == 4


def test_more_ranks_than_nodes_and_no_edges():
    assert split_by_edges(offsets([2, 2]), 5).ranks == 5
    empty = split_by_edges([0, 0, 0], 2)
    assert empty.edges == (0, 0)
    assert empty.imbalance == 0.0


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5])
def test_the_number_of_ranks_is_checked(ranks):
    with pytest.raises(SpecError, match="at least 1"):
        split_by_edges([0, 1], ranks)


def test_ids():
    found = Partition((0, 3, 3, 8), (1, 0, 2))
    assert [owner(found, node) for node in range(8)] == [0, 0, 0, 2, 2, 2, 2, 2]
    assert [local_id(found, node) for node in range(8)] == [0, 1, 2, 0, 1, 2, 3, 4]


def test_local_and_remote_edges_are_all_edges():
    indptr, indices = [0, 2, 3, 3, 6], [1, 3, 2, 0, 1, 3]
    found = split_by_edges(indptr, 2)
    seen = []
    for rank in range(2):
        shard, own = shard_edges(indptr, indices, found, rank), range(*found.bounds[rank : rank + 2])
        for row in range(len(own)):
            local = shard.local_indices[shard.local_indptr[row] : shard.local_indptr[row + 1]]
            remote = shard.remote_indices[shard.remote_indptr[row] : shard.remote_indptr[row + 1]]
            seen.append(sorted([own.start + column for column in local] + [shard.halo[place] for place in remote]))
    assert seen == [sorted(indices[a:b]) for a, b in itertools.pairwise(indptr)]


@pytest.mark.parametrize("ps", [1, 2, 3, 8])
def test_pieces_cover_every_edge_once(ps):
    indptr = offsets([0, 5, 1, 0, 7])
    pieces = neighbour_pieces(indptr, ps)
    each = zip(pieces.start, pieces.length, strict=True)
    assert [edge for start, length in each for edge in range(start, start + length)] == list(range(13))
    assert all(1 <= length <= ps for length in pieces.length)
    for row, start in zip(pieces.row, pieces.start, strict=True):
        assert indptr[row] <= start < indptr[row + 1]
