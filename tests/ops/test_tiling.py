"""Tiles of remote rows: their shares, and the roofline of a pipeline of them."""

from __future__ import annotations

import pytest

from benchmarks.suites.sharded import pipelined_seconds
from weft.ops.sharded.sharded_spmm import MOST_TILES, TILE_ROWS, tile_count, tile_ends, tile_shares


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_shares_fall_and_add_up(count):
    shares = tile_shares(count)
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(2 / (count * (count + 1)))


@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
def test_ends_cover_all_rows(rows):
    ends = tile_ends(rows, 4)
    assert ends == sorted(ends)
    assert ends[-1] == rows


def test_few_rows_are_one_tile():
    assert tile_count(0) == tile_count(TILE_ROWS) == 1
    assert tile_count(100 * TILE_ROWS) == MOST_TILES


def pipeline(link, local, remote, count, per_tile=0.0):
    shares = tile_shares(count)
    return pipelined_seconds(link, local, [remote * share + per_tile for share in shares], shares)


def test_a_slow_link_hides_all_sums_but_the_last():
    assert pipeline(10.0, 2.0, 2.0, 1) == pytest.approx(12.0)
    assert pipeline(10.0, 2.0, 2.0, 4) == pytest.approx(10.2)


def test_a_fast_link_is_hidden_and_more_tiles_only_cost():
    assert pipeline(1.0, 5.0, 5.0, 1, 0.1) == pytest.approx(10.1)
    assert pipeline(1.0, 5.0, 5.0, 6, 0.1) == pytest.approx(10.6)


def test_waiting_for_a_large_first_tile():
    assert pipelined_seconds(4.0, 1.0, [0.5, 0.5], [0.75, 0.25]) == pytest.approx(4.5)
