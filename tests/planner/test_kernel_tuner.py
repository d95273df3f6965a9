"""The model's formulas, and a search that finds a good configuration in about ten iterations."""

from __future__ import annotations

import math

import pytest

from weft.core.errors import SpecError
from weft.planner.kernel_tuner import (
    CrossIterationSearch,
    KernelConfig,
    KernelShape,
    Multiprocessors,
    estimate,
    is_sensible,
)

SHAPE = KernelShape(features=64, local_edges=60_000_000, remote_edges=60_000_000, rows=1_200_000)


def test_the_formulas_of_the_paper():
    config, shape = KernelConfig(16, 2, 4), KernelShape(64, 1600, 800, 0)
    found = estimate(config, shape, Multiprocessors(count=10))
    assert found.work_per_warp == 2 * 16 * 64 * 2
    assert found.shared_bytes == 16 * 4 * 4 + 2 * 4 * 64 * 4
    assert shape.pieces(16) == (100, 50)
    assert found.warps == 50
    assert found.blocks == 13
    assert found.blocks_per_multiprocessor == 1.3


def test_what_does_not_fit_is_not_tried():
    wide = KernelShape(16_384, 10**9, 10**9, 1000)
    assert not is_sensible(KernelConfig(1, 1, 16), wide)
    assert not is_sensible(KernelConfig(32, 16, 16), KernelShape(16, 1000, 1000, 10))
    assert is_sensible(KernelConfig(), KernelShape(16, 10, 10, 10))


@pytest.mark.parametrize("values", [{"ps": 0}, {"ps": 33}, {"dist": 17}, {"wpb": 17}, {"ps": True}, {"wpb": 1.5}])
def test_the_space_is_checked(values):
    with pytest.raises(SpecError, match="from 1 to"):
        KernelConfig(**values)
    with pytest.raises(SpecError, match="must be one of staged, tiles, interleaved, fetched"):
        KernelConfig(way="else")


def took(config: KernelConfig, best=(16, 2, 4)) -> float:
    """A valley around ``best``."""
    pairs = zip((config.ps, config.dist, config.wpb), best, strict=True)
    return 1.0 + sum(abs(math.log2(mine / right)) for mine, right in pairs)


@pytest.mark.parametrize("best", [(1, 1, 1), (16, 2, 4), (32, 16, 16), (8, 1, 2), (1, 16, 1)])
def test_the_search_finds_the_bottom_of_a_valley(best):
    search = CrossIterationSearch()
    while not search.finished:
        search.tell(took(search.next(), best))
    found = search.best
    assert (found.ps, found.dist, found.wpb) == best
    assert len(search.trials) <= 16
    assert next(iter(search.trials)) == KernelConfig()
    assert search.next() == found, "all iterations after the search use the best"
    search.tell(99.0)
    assert 99.0 not in search.trials.values()


def test_about_ten_iterations():
    search = CrossIterationSearch(lambda config: is_sensible(config, SHAPE))
    while not search.finished:
        search.tell(took(search.next(), (16, 2, 2)))
    assert 6 <= len(search.trials) <= 12
    assert search.trials[search.best] < search.trials[KernelConfig()]


def test_shapes_of_about_the_same_size_are_tuned_once():
    assert KernelShape(64, 58_000_000, 61_000_000, 1_250_000).key() == SHAPE.key()
    assert KernelShape(128, 58_000_000, 61_000_000, 1_250_000).key() != SHAPE.key()
