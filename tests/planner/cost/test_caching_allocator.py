"""The model of the caching allocator against cases computed by hand, and its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.planner.cost.memory import Allocator, rounded, segment_size

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(("size", "expected"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(size, expected):
    assert rounded(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (12 * MIB + 512, 14 * MIB),
    ],
)
def test_segments_come_in_three_kinds(size, expected):
    assert segment_size(size) == expected


def test_small_requests_share_a_segment():
    pool = Allocator()
    for _ in range(2):
        pool.allocate(MIB)
    assert (pool.allocated, pool.reserved) == (2 * MIB, 2 * MIB)
    pool.allocate(1)
    assert (pool.allocated, pool.reserved) == (2 * MIB + 512, 4 * MIB)


def test_requests_of_middling_size_share_twenty_mebibytes():
    pool = Allocator()
    for _ in range(4):
        pool.allocate(5 * MIB)
    assert pool.reserved == 20 * MIB
    pool.allocate(5 * MIB)
    assert pool.reserved == 40 * MIB


def test_a_rest_of_up_to_a_mebibyte_goes_with_the_block():
    pool = Allocator()
    pool.allocate(13 * MIB + 512 * KIB)
    assert (pool.allocated, pool.reserved) == (14 * MIB, 14 * MIB)
    pool.allocate(12 * MIB + 1)  # 14 MiB again, but now almost 2 MiB are left over and split off
    assert (pool.allocated, pool.reserved) == (26 * MIB + 512, 28 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    pool = Allocator()
    blocks = [pool.allocate(40 * MIB), pool.allocate(30 * MIB)]
    for block in blocks:
        pool.free(block)
    pool.allocate(29 * MIB)
    assert (pool.allocated, pool.reserved) == (30 * MIB, 70 * MIB)
    pool.allocate(39 * MIB - 512)  # fits into the other one only
    assert (pool.allocated, pool.reserved) == (69 * MIB - 512, 70 * MIB)


def test_neighbours_are_joined():
    pool = Allocator()
    blocks = [pool.allocate(4 * MIB) for _ in range(5)]
    for place in (1, 3, 2, 0, 4):
        pool.free(blocks[place])
    pool.allocate(9 * MIB)
    pool.allocate(9 * MIB)
    assert pool.reserved == 20 * MIB


def test_a_freed_hole_between_live_blocks_serves_only_what_fits():
    pool = Allocator()
    blocks = [pool.allocate(6 * MIB) for _ in range(3)]
    pool.free(blocks[1])
    pool.allocate(7 * MIB)
    assert pool.reserved == 40 * MIB
    pool.allocate(6 * MIB)
    assert (pool.allocated, pool.reserved) == (25 * MIB, 40 * MIB)


def test_nothing_takes_nothing():
    pool = Allocator()
    pool.free(pool.allocate(0))
    assert (pool.allocated, pool.reserved) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=60), st.randoms())
def test_bytes_are_neither_lost_nor_invented(requests, random):
    pool, live, asked = Allocator(), [], 0
    for size, release in requests:
        live.append((pool.allocate(size), rounded(size)))
        asked += rounded(size)
        assert asked <= pool.allocated <= pool.reserved - pool.idle
        assert pool.allocated - asked <= MIB * len(live)
        if release:
            block, size = live.pop(random.randrange(len(live)))
            pool.free(block)
            asked -= size
    for block, _ in live:
        pool.free(block)
    assert pool.allocated == 0
    assert pool.idle == pool.reserved
    free = [size for sizes in pool._free.values() for size, _ in sizes]
    assert sum(free) == pool.reserved
    assert all(block.before is None and block.after is None for block in pool._blocks.values())


def test_an_emptied_cache_gives_whole_segments_back():
    pool = Allocator()
    blocks = [pool.allocate(30 * MIB), pool.allocate(4 * MIB), pool.allocate(4 * MIB), pool.allocate(1)]
    pool.free(blocks[0])
    pool.free(blocks[1])
    pool.trim()
    assert (pool.allocated, pool.reserved) == (4 * MIB + 512, 22 * MIB)
    pool.free(blocks[2])
    pool.free(blocks[3])
    pool.trim()
    assert (pool.reserved, pool._blocks) == (0, {})
