"""Tiles of remote rows: how large each is, and what a pipeline of them takes by the roofline.

While a tile crosses the link, local edges and the tiles before it are summed. The last tile has nothing to hide
behind, so tiles shrink: their shares fall evenly, to 2 / (k (k + 1)) of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_TILES = 6
TILE_ROWS = 1 << 17  # of a tile on average, at least: below, a launch more costs more than it hides


def tile_shares(count: int) -> list[float]:
    """The shares of ``count`` tiles, the largest first."""
    whole = count * (count + 1) / 2
    return [(count - place) / whole for place in range(count)]


def tile_count(rows: int) -> int:
    """Tiles that ``rows`` remote rows are cut into."""
    return max(1, min(MOST_TILES, rows // TILE_ROWS))


def tile_ends(rows: int, count: int) -> list[int]:
    """Where the tiles of ``rows`` rows end."""
    done, ends = 0.0, []
    for share in tile_shares(count):
        done += share
        ends.append(round(rows * done))
    return [*ends[:-1], rows]


def pipelined_seconds(link: float, local: float, sums: Sequence[float], shares: Sequence[float]) -> float:
    """Seconds until the last tile is summed.

    ``link``: of all remote rows, of which a tile has its share; ``local`` and ``sums``: of summing the local edges, and
    those of each tile, with reading and writing the sums so far.
    """
    arrived, done = 0.0, local
    for share, summed in zip(shares, sums, strict=True):
        arrived += link * share
        done = max(done, arrived) + summed
    return done
